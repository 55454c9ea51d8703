"""Measurements that need a clone: the engine's speed (`python -m benchmarks`), and a script for each other figure."""
