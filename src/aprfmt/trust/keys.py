"""Key pairs as PEM files, and what a user names as the signer that he trusts.

A private key is a PKCS #8 file of mode 0600, encrypted if it has a passphrase; its public key is a file of its own.
P-256, P-384 and P-521 sign files and folders (OpenSSF Model Signing), Ed25519 signs `.apr` v1, X25519 is the key of
somebody for whom an `.apr` v1 is encrypted.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from aprfmt.errors import NotFoundError, RefusedError, UsageError, storage_errors
from aprfmt.io.sink import AtomicFile, check_target
from aprfmt.limits import MAX_KEY_FILE_BYTES
from aprfmt.text import first_few
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    AnyPrivateKey: TypeAlias = EllipticCurvePrivateKey | Ed25519PrivateKey | X25519PrivateKey
    AnyPublicKey: TypeAlias = EllipticCurvePublicKey | Ed25519PublicKey | X25519PublicKey

CURVES = {"p256": "secp256r1", "p384": "secp384r1", "p521": "secp521r1"}
ED25519, X25519 = "ed25519", "x25519"
KINDS = {
    "p256": "signs files and folders (model.sig)",
    "p384": "as p256, with a longer key",
    "p521": "as p256, with a longer key",
    ED25519: "signs .apr v1 files",
    X25519: "decrypts what was encrypted with its public key",
}
"""Kinds of keys, and what each is for."""

SIGSTORE = "sigstore:"
"""How a signer begins who is named by an identity: sigstore:IDENTITY,ISSUER."""

_SHORT = 16
"""Digits of a fingerprint that are shown."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A private key of a file.

    Attributes:
        path: the file.
        kind: a key of KINDS.
        key: the key.
        passphrase: of the file; None if it is not encrypted.
    """

    path: str
    kind: str
    key: AnyPrivateKey
    passphrase: bytes | None = None

    def raw(self) -> bytes:
        """The 32 bytes of an Ed25519 or X25519 key. Raises UsageError for another kind."""
        if self.kind in CURVES:
            raise _unfit(self.path, self.kind, ED25519)
        return self.key.private_bytes_raw()  # type: ignore[union-attr]


@dataclass(frozen=True)
class PublicKeyFile:
    """A public key of a file.

    Attributes:
        path: the file.
        kind: a key of KINDS.
        key: the key.
    """

    path: str
    kind: str
    key: AnyPublicKey

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the key in PEM, in hex; the key hint of OpenSSF Model Signing."""
        return hashlib.sha256(_public_pem(self.key)).hexdigest()

    def raw(self) -> bytes:
        """The 32 bytes of an Ed25519 or X25519 key. Raises UsageError for another kind."""
        if self.kind in CURVES:
            raise _unfit(self.path, self.kind, X25519)
        return self.key.public_bytes_raw()  # type: ignore[union-attr]

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)} ({short(self.fingerprint)})"


@dataclass(frozen=True, slots=True)
class CertificateFile:
    """Certificates of authorities whose signers are trusted."""

    path: str

    def __str__(self) -> str:
        return f"a certificate issued by {os.path.basename(self.path)}"


@dataclass(frozen=True, slots=True)
class SigstoreIdentity:
    """A signer without a key: an identity, as an issuer of OpenID Connect confirms it."""

    identity: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.identity} ({self.issuer})"


Signer: TypeAlias = PublicKeyFile | CertificateFile | SigstoreIdentity
"""Somebody whose signature is required."""


def short(fingerprint: str) -> str:
    """The first digits of a fingerprint."""
    return fingerprint[:_SHORT]


def _unfit(path: str, kind: str, needed: str) -> UsageError:
    return UsageError(
        f"this is a {kind} key; {needed} is needed", path=path, hint=f"apr keygen -o NAME --type {needed} makes one"
    )


def _public_pem(key: AnyPublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def generate(output: PathLike, kind: str = "p256", *, passphrase: bytes | None = None, force: bool = False) -> KeyFile:
    """Makes a key pair: OUTPUT.key, the private key (mode 0600), and OUTPUT.pub, the public one.

    Args:
        output: path without a suffix.
        kind: a key of KINDS.
        passphrase: encrypts the private key.
        force: replace existing files.

    Raises:
        UsageError: an unknown kind, or an empty passphrase.
        ExistsError, StorageError.
    """
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519

    make: dict[str, Callable[[], AnyPrivateKey]] = {
        "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
        "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
        ED25519: ed25519.Ed25519PrivateKey.generate,
        X25519: x25519.X25519PrivateKey.generate,
    }
    if kind not in make:
        raise UsageError(f"unknown type of key {kind!r}", hint=f"one of: {', '.join(KINDS)}")
    if passphrase == b"":
        raise UsageError("the passphrase is empty")
    private, public = f"{os.fspath(output)}.key", f"{os.fspath(output)}.pub"
    for path in (private, public):
        check_target(path, (), force)
    key = make[kind]()
    how = pem.BestAvailableEncryption(passphrase) if passphrase is not None else pem.NoEncryption()
    with AtomicFile(private, force=force, is_private=True) as file:
        file.write(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, how))
    with AtomicFile(public, force=force) as file:
        file.write(_public_pem(key.public_key()))
    return KeyFile(private, kind, key, passphrase)


def public_of(key: KeyFile) -> PublicKeyFile:
    """The public key of a private one."""
    return PublicKeyFile(key.path, key.kind, key.key.public_key())


def read_private(path: PathLike, passphrase: bytes | None = None) -> KeyFile:
    """The private key in a PEM file.

    Raises:
        RefusedError: other users can read the file, the passphrase is wrong, or the key is encrypted without one.
        UsageError: not a private key of a known kind.
        NotFoundError, StorageError.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    name = os.fspath(path)
    data, mode = _read(name)
    if b"PRIVATE KEY-----" not in data:
        raise UsageError("not a private key in PEM format", path=name, hint="apr keygen -o NAME makes a key pair")
    if os.name == "posix" and mode & 0o077:
        raise RefusedError("other users can read this private key", path=name, hint=f"chmod 600 {name}")
    try:
        key = load_pem_private_key(data, passphrase)
    except TypeError:
        if passphrase is None:
            raise RefusedError(
                "the private key is encrypted", path=name, hint="--passphrase-file FILE decrypts it"
            ) from None
        raise UsageError("the private key is not encrypted", path=name, hint="leave out the passphrase") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        if passphrase is not None:
            raise RefusedError("wrong passphrase, or the key file is damaged", path=name) from error
        raise UsageError("not a valid private key", path=name) from error
    kind = _kind(key.public_key())
    if kind is None:
        raise _unknown_kind(name)
    return KeyFile(name, kind, key, passphrase)  # type: ignore[arg-type]


def read_signer(text: str) -> Signer:
    """What `text` names: a PEM file with a public key or with certificates, or sigstore:IDENTITY,ISSUER.

    Raises UsageError, NotFoundError, StorageError.
    """
    if text.startswith(SIGSTORE):
        identity, comma, issuer = text.removeprefix(SIGSTORE).rpartition(",")
        if not identity or not comma or not issuer:
            raise UsageError(f"not a signer: {text!r}", hint=f"{SIGSTORE}me@example.com,https://accounts.google.com")
        return SigstoreIdentity(identity, issuer)
    data, _ = _read(text)
    if b"-----BEGIN CERTIFICATE-----" in data:
        return CertificateFile(text)
    return _public_key(data, text)


def read_public(path: PathLike) -> PublicKeyFile:
    """The public key in a PEM file. Raises UsageError, NotFoundError, StorageError."""
    return _public_key(_read(os.fspath(path))[0], os.fspath(path))


def _public_key(data: bytes, path: str) -> PublicKeyFile:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if b"PRIVATE KEY-----" in data:
        raise UsageError("this is a private key", path=path, hint="pass the public key: NAME.pub")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            "not a public key or certificate in PEM format",
            path=path,
            hint="pass the public key, NAME.pub of apr keygen",
        ) from error
    kind = _kind(key)
    if kind is None:
        raise _unknown_kind(path)
    return PublicKeyFile(path, kind, key)  # type: ignore[arg-type]


def _kind(key: object) -> str | None:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    if isinstance(key, EllipticCurvePublicKey):
        return next((kind for kind, curve in CURVES.items() if curve == key.curve.name), None)
    return ED25519 if isinstance(key, Ed25519PublicKey) else X25519 if isinstance(key, X25519PublicKey) else None


def _unknown_kind(path: str) -> UsageError:
    return UsageError("this kind of key is not supported", path=path, hint=f"supported: {first_few(KINDS)}")


def _read(path: str) -> tuple[bytes, int]:
    """The bytes of a key file, and its mode."""
    with storage_errors(path):
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise UsageError("a key must be a regular file", path=path)
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        except FileNotFoundError:
            raise NotFoundError("key not found", path=path, hint="apr keygen -o NAME makes a key pair") from None
        except IsADirectoryError:
            raise UsageError("a key must be a regular file", path=path) from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise UsageError(f"a key file is limited to {MAX_KEY_FILE_BYTES} bytes", path=path)
    return data, mode


def read_passphrase(path: PathLike) -> bytes:
    """The first line of a file, without the line break. Raises UsageError for an empty one, NotFoundError."""
    name = os.fspath(path)
    data = _read(name)[0].splitlines()
    if not data or not data[0]:
        raise UsageError("the passphrase file is empty", path=name)
    return data[0]
