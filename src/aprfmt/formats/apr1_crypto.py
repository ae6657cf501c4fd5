"""Encryption and signatures of `.apr` v1: Argon2id, X25519, AES-256-GCM, Ed25519."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aprfmt.errors import ChecksumError, CorruptError, MissingDependencyError, RefusedError, UsageError
from aprfmt.io.source import Buffer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


SIGNATURE_BYTES = 64


PUBLIC_KEY_BYTES = 32


KEY_BYTES = 32


_SALT, _NONCE, _TAG, _KEY_HINT = 16, 12, 16, 8


_MEMORY_KIB, _PASSES, _LANES = 19456, 2, 1


_INFO = b"apr-v1-encrypt"


Entropy = Callable[[int], bytes]
"""Returns the given number of random bytes."""


def _key32(key: bytes, what: str) -> bytes:
    if len(key) != KEY_BYTES:
        raise UsageError(f"{what} must be {KEY_BYTES} raw bytes, not {len(key)}")
    return bytes(key)


def _password_key(password: str | bytes, salt: bytes) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

    secret = password.encode() if isinstance(password, str) else password
    try:
        kdf = Argon2id(salt=salt, length=KEY_BYTES, iterations=_PASSES, lanes=_LANES, memory_cost=_MEMORY_KIB)
        return kdf.derive(secret)
    except UnsupportedAlgorithm as error:
        raise MissingDependencyError(
            "this build of cryptography lacks Argon2id", hint="pip install -U cryptography"
        ) from error


def _public(key: X25519PrivateKey | Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _shared_key(private: X25519PrivateKey, public: bytes) -> bytes:
    """HKDF-SHA256 of the X25519 secret, no salt. Raises ValueError for a public key of small order."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, None, _INFO).derive(secret)


def _x25519(private_key: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_key32(private_key, "an X25519 private key"))


def decrypt(stored: bytes, path: str, *, password: str | bytes | None, private_key: bytes | None) -> bytes:
    """Decrypts the payload. Raises RefusedError without a matching key, CorruptError if it is too short."""
    if private_key is not None:
        key, rest = _recipient_key(stored, path, private_key)
        wrong = "the payload was modified, or not encrypted for this private key"
    elif password is not None:
        _check_length(stored, _SALT, path)
        key, rest = _password_key(password, stored[:_SALT]), stored[_SALT:]
        wrong = "wrong password, or the payload was modified"
    else:
        raise RefusedError(
            "the payload is encrypted", path=path, hint="pass the password or the recipient's private key to read_v1"
        )
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(rest[:_NONCE], rest[_NONCE:], None)
    except InvalidTag:
        raise RefusedError(wrong, path=path) from None


def _check_length(stored: bytes, n_prefix: int, path: str) -> None:
    if len(stored) < n_prefix + _NONCE + _TAG:
        raise CorruptError("the encrypted payload is too short for its keys and tag", path=path)


def _recipient_key(stored: bytes, path: str, private_key: bytes) -> tuple[bytes, bytes]:
    private = _x25519(private_key)
    prefix = PUBLIC_KEY_BYTES + _KEY_HINT
    _check_length(stored, prefix, path)
    if stored[PUBLIC_KEY_BYTES:prefix] != _public(private)[:_KEY_HINT]:
        raise RefusedError(
            "the payload was encrypted for another recipient, or by password",
            path=path,
            hint="pass the private key of the recipient, or the password",
        )
    try:
        return _shared_key(private, stored[:PUBLIC_KEY_BYTES]), stored[prefix:]
    except ValueError as error:
        raise CorruptError("the ephemeral key of the payload is not a usable X25519 key", path=path) from error


def encrypt_password(plain: bytes, password: str | bytes, entropy: Entropy) -> bytes:
    """Encrypts `plain` under a password; draws the salt, then the nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, nonce = entropy(_SALT), entropy(_NONCE)
    return salt + nonce + AESGCM(_password_key(password, salt)).encrypt(nonce, plain, None)


def encrypt_recipient(plain: bytes, public_key: bytes, entropy: Entropy) -> bytes:
    """Encrypts `plain` for the owner of an X25519 key; draws the ephemeral private key, then the nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    public = _key32(public_key, "an X25519 public key")
    ephemeral, nonce = _x25519(entropy(KEY_BYTES)), entropy(_NONCE)
    try:
        key = _shared_key(ephemeral, public)
    except ValueError as error:
        raise UsageError("the recipient's public key is not a usable X25519 key") from error
    return _public(ephemeral) + public[:_KEY_HINT] + nonce + AESGCM(key).encrypt(nonce, plain, None)


def sign(message: bytes, signing_key: bytes) -> bytes:
    """Returns the Ed25519 signature block: signature 64, public key 32. `signing_key` is the 32-byte seed."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(_key32(signing_key, "an Ed25519 signing key"))
    return key.sign(message) + _public(key)


def verify(message: Buffer, block: bytes, path: str, trusted_key: bytes | None) -> None:
    """Checks a signature block against `trusted_key`, or the embedded key. Raises ChecksumError."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    embedded = bytes(block[SIGNATURE_BYTES:])
    public = embedded if trusted_key is None else _key32(trusted_key, "an Ed25519 public key")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes(block[:SIGNATURE_BYTES]), message)
    except (InvalidSignature, ValueError):
        if public != embedded:
            raise ChecksumError("the file is not signed with the trusted key", path=path) from None
        raise ChecksumError("signature mismatch", path=path, hint="the file was modified after signing") from None
