"""What can go wrong in a round, by who has to do something about it."""

from __future__ import annotations


class SecureError(ValueError):
    """Any refusal of the protocol. Nothing was changed by the call that raised it."""


class Rejected(SecureError):
    """A message that is malformed, tampered with, repeated, or of another round or stage. It was not used."""


class Refused(SecureError):
    """A client was asked for something that would endanger what it hides. It sent nothing."""


class BelowThreshold(SecureError):
    """Too few clients are left: the sum cannot be recovered, or must not be."""


class Oversize(SecureError):
    """A value, or a sum of so many values, does not fit into the ring: it would wrap round without a sign of it."""
