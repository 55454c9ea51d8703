"""Defences, one paper per file."""
