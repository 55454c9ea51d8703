"""Attacks that read which inputs span the gradient of a layer."""

from gradleak.attacks.spans.denoisers import SpanDM

__all__ = ["SpanDM"]
