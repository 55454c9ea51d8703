"""Errors of a round."""

from __future__ import annotations


class SecureError(ValueError):
    """Base of all errors of the protocol. The call that raised it changed nothing."""


class Rejected(SecureError):
    """A message that is malformed, tampered with, repeated, or of another round or stage. It was not used."""


class Refused(SecureError):
    """A client was asked for something that would endanger its values. It sent nothing."""


class BelowThreshold(SecureError):
    """Too few clients remain: the sum cannot be recovered, or must not be."""


class Oversize(SecureError):
    """A value, or the sum of all clients' values, does not fit into the ring: it would wrap round silently."""
