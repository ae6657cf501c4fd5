"""Encryption and signatures of `.apr` v1: Argon2id, X25519, AES-256-GCM, Ed25519."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aprfmt.errors import ChecksumError, CorruptError, MissingDependencyError, RefusedError, UsageError
from aprfmt.io.pipe import source_chunks
from aprfmt.io.source import Buffer, Source

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


SIGNATURE_BYTES = 64


PUBLIC_KEY_BYTES = 32


KEY_BYTES = 32


_SALT, _NONCE, _TAG, _KEY_HINT = 16, 12, 16, 8
_MOST_PREFIX = PUBLIC_KEY_BYTES + _KEY_HINT


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
    key, rest, wrong = _opened(stored, path, password, private_key)
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(rest[:_NONCE], rest[_NONCE:], None)
    except InvalidTag:
        raise RefusedError(wrong, path=path) from None


def decrypt_stream(
    source: Source, start: int, n_bytes: int, *, password: str | bytes | None, private_key: bytes | None
) -> Iterator[bytes]:
    """The same for the `n_bytes` from `start` of a file, in pieces.

    Nothing of it may be used before the last piece: only then the tag is checked. Raises as `decrypt`.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    path, head = source.path, source.read(start, min(n_bytes, _MOST_PREFIX + _NONCE + _TAG))
    key, rest, wrong = _opened(head, path, password, private_key)
    begin, end = start + len(head) - len(rest) + _NONCE, start + n_bytes - _TAG
    decryptor = Cipher(algorithms.AES(key), modes.GCM(rest[:_NONCE])).decryptor()
    for data in source_chunks(source, begin, end - begin):
        yield decryptor.update(data)
    try:
        yield decryptor.finalize_with_tag(source.read(end, _TAG))
    except InvalidTag:
        raise RefusedError(wrong, path=path) from None


def encrypt_stream(
    source: Source, password: str | bytes | None, public_key: bytes | None, entropy: Entropy
) -> Iterator[bytes]:
    """What `encrypt_password` or `encrypt_recipient` makes of a whole file, in pieces; ENVELOPE bytes more than it."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    prefix, key = _password_prefix(password, entropy) if password is not None else _sealed(public_key or b"", entropy)
    nonce = entropy(_NONCE)
    encryptor = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    yield prefix + nonce
    for data in source_chunks(source, 0, source.size):
        yield encryptor.update(data)
    yield encryptor.finalize() + encryptor.tag


def envelope_bytes(*, for_recipient: bool) -> int:
    """How much longer an encrypted payload is than the plain one."""
    return (PUBLIC_KEY_BYTES + _KEY_HINT if for_recipient else _SALT) + _NONCE + _TAG


def _opened(
    stored: bytes, path: str, password: str | bytes | None, private_key: bytes | None
) -> tuple[bytes, bytes, str]:
    """The key of a payload, the rest of `stored` from the nonce on, and the sentence for a wrong tag."""
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
    return key, rest, wrong


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

    prefix, key = _password_prefix(password, entropy)
    nonce = entropy(_NONCE)
    return prefix + nonce + AESGCM(key).encrypt(nonce, plain, None)


def _password_prefix(password: str | bytes, entropy: Entropy) -> tuple[bytes, bytes]:
    """The salt, and the key that a password gives with it."""
    salt = entropy(_SALT)
    return salt, _password_key(password, salt)


def encrypt_recipient(plain: bytes, public_key: bytes, entropy: Entropy) -> bytes:
    """Encrypts `plain` for the owner of an X25519 key; draws the ephemeral private key, then the nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    prefix, key = _sealed(public_key, entropy)
    nonce = entropy(_NONCE)
    return prefix + nonce + AESGCM(key).encrypt(nonce, plain, None)


def _sealed(public_key: bytes, entropy: Entropy) -> tuple[bytes, bytes]:
    """The ephemeral public key with the hint at the recipient's, and the key that both share."""
    public = _key32(public_key, "an X25519 public key")
    ephemeral = _x25519(entropy(KEY_BYTES))
    try:
        key = _shared_key(ephemeral, public)
    except ValueError as error:
        raise UsageError("the recipient's public key is not a usable X25519 key") from error
    return _public(ephemeral) + public[:_KEY_HINT], key


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
