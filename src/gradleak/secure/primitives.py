"""The cryptography of the protocol, all of it from the package `cryptography`.

Key agreement X25519 (RFC 7748), derivation HKDF-SHA256 (RFC 5869), sealing ChaCha20-Poly1305 (RFC 8439), signatures
Ed25519 (RFC 8032), key streams AES-256 in counter mode (NIST SP 800-38A). Keys are 32 bytes each, kept as `bytes`.

Every derived key is bound to a round (`binding`), a purpose and its clients, and is used once. So streams and sealed
boxes can start from a constant nonce.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from gradleak.secure.errors import Rejected

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

LABEL = b"gradleak secure aggregation 1"
KEY = 32  # bytes of every key, secret and digest
TAG = 16  # bytes that sealing adds
SIGNATURE = 64

P = ParamSpec("P")
R = TypeVar("R")


def _needs_cryptography(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "cryptography":
                raise
            raise ModuleNotFoundError(
                "Secure aggregation needs the package cryptography: pip install 'gradleak[secure]'", name=error.name
            ) from error

    return checked


def joined(*parts: bytes) -> bytes:
    """The parts with their lengths, so that no two different lists give the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def number(value: int) -> bytes:
    """Eight bytes, most significant first: every number in a digest has the same length."""
    return value.to_bytes(8, "big")


def digest(purpose: str, *parts: bytes) -> bytes:
    """SHA-256 of the parts, for one purpose."""
    return hashlib.sha256(joined(LABEL, purpose.encode(), *parts)).digest()


def fresh() -> bytes:
    """A new secret, from the operating system's generator."""
    return secrets.token_bytes(KEY)


@_needs_cryptography
def agreement_public(secret: bytes) -> bytes:
    """The X25519 public key of a secret."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


@_needs_cryptography
def agree(secret: bytes, publics: Mapping[int, bytes]) -> dict[int, bytes]:
    """The secret that the owner of `secret` shares with each of these clients and nobody else; input of `derive`."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    private, shared = X25519PrivateKey.from_private_bytes(secret), {}
    for client, public in publics.items():
        try:
            shared[client] = private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # a point of small order: the result would be known to everybody
            raise Rejected(f"Client {client}'s public key is no usable X25519 key: it must make a new one.") from error
    return shared


@_needs_cryptography
def derive(secret: bytes, *, binding: bytes, purpose: str, clients: Sequence[int] = ()) -> bytes:
    """A key from a secret, for one round, one purpose and these clients in this order."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = joined(LABEL, purpose.encode(), *(number(client) for client in clients))
    return HKDF(algorithm=SHA256(), length=KEY, salt=binding, info=info).derive(secret)


@_needs_cryptography
def seal(key: bytes, text: bytes, associated: bytes) -> bytes:
    """Encrypt and authenticate; `associated` is authenticated only. The key must not seal anything else."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), text, associated)


@_needs_cryptography
def unseal(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """The text that was sealed; `Rejected` if a single bit differs."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, associated)
    except InvalidTag as error:
        raise Rejected("A sealed box does not open: it was changed, or made for another client or round.") from error


@_needs_cryptography
def signing_public(secret: bytes) -> bytes:
    """The Ed25519 public key of a secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


@_needs_cryptography
def sign(secret: bytes, text: bytes) -> bytes:
    """An Ed25519 signature of the text."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


@_needs_cryptography
def signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the owner of the public key signed this text."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


@_needs_cryptography
def stream(key: bytes) -> CipherContext:
    """The key stream of AES-256 in counter mode from zero: encrypting zeros with `update_into` gives the next bytes."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    return Cipher(AES(key), CTR(bytes(16))).encryptor()
