"""Signatures of files and folders: OpenSSF Model Signing bundles, made and checked with the package model-signing.

    model.sig         of a folder, in it
    FILE.sig          of a file that is a whole model, beside it

A bundle (Sigstore bundle 0.3, JSON) holds a DSSE envelope whose payload, an in-toto statement, lists the digest of each
file. model-signing judges the signature; the files are hashed here, so that it takes little memory and errors can say
which file differs. Whatever is read of a bundle before it was judged is a claim.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from aprfmt.errors import (
    AprError,
    ChecksumError,
    CorruptError,
    LimitError,
    MissingDependencyError,
    RefusedError,
    StorageError,
    UsageError,
    storage_errors,
)
from aprfmt.io.json_shape import list_of, mapping_of
from aprfmt.io.jsonx import loads
from aprfmt.io.pipe import StartProgress
from aprfmt.io.sink import AtomicFile, check_target, inputs_of
from aprfmt.io.source import Source, exists
from aprfmt.limits import MAX_SIGNATURE_BYTES
from aprfmt.text import first_few
from aprfmt.trust.contents import GIT_NAMES, WHOLE, Serialization, SignedDifference, compare, digests, list_files
from aprfmt.trust.keys import CURVES, CertificateFile, KeyFile, PublicKeyFile, Signer, SigstoreIdentity, short
from aprfmt.types import PathLike

if TYPE_CHECKING:
    from model_signing import signing, verifying
    from model_signing.manifest import Manifest

FILE_SUFFIX = ".sig"

_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE, _OLD_PREDICATE = "https://model_signing/signature/v1.0", "https://model_signing/Digests/v0.1"
_INSTALL = "pip install model-signing pyopenssl"
_HARMLESS_SUFFIXES = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", FILE_SUFFIX)
_HARMLESS_STEMS = ("LICENSE", "LICENCE", "NOTICE")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a signature file says. Nothing of it is proven before `verify_bundle`.

    Attributes:
        path: the signature file.
        method: "key", "certificate" or "sigstore".
        fingerprint: SHA-256 of the key or certificate in hex; "" if the bundle has none.
        subject: whose certificate it is; None for a key.
        model_name: the name of the file or folder when it was signed.
        serialization: how its digests were made.
        digests: digest by file, or by shard.
        algorithms: the algorithm of each digest, in the words of the bundle.
    """

    path: str
    method: str
    fingerprint: str
    subject: str | None
    model_name: str
    serialization: Serialization
    digests: Mapping[str, str]
    algorithms: Mapping[str, str]

    @property
    def signer(self) -> str:
        """The signer that the bundle names."""
        if self.method == "key":
            return f"the key {short(self.fingerprint)}" if self.fingerprint else "an unnamed key"
        return f"{self.subject} ({'certificate' if self.method == 'certificate' else 'sigstore'})"


def read_bundle(path: PathLike) -> Bundle:
    """Reads a signature file.

    Raises:
        CorruptError, LimitError: not a bundle of OpenSSF Model Signing, or a huge one.
        NotFoundError, StorageError.
    """
    name = os.fspath(path)
    with Source.open(name) as source:
        if source.size > MAX_SIGNATURE_BYTES:
            raise LimitError(f"a signature is limited to {MAX_SIGNATURE_BYTES} bytes", path=name)
        data = source.read(0, source.size)
    try:
        return _parse(name, loads(data))
    except AprError as error:
        error.path = name
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, binascii.Error) as error:
        raise CorruptError("not a signature of OpenSSF Model Signing", path=name) from error


def _parse(path: str, value: object) -> Bundle:
    bundle = mapping_of(value)
    envelope = mapping_of(bundle["dsseEnvelope"])
    statement = mapping_of(loads(base64.b64decode(str(envelope["payload"]), validate=True)))
    if statement["_type"] != _STATEMENT or statement["predicateType"] not in (_PREDICATE, _OLD_PREDICATE):
        raise CorruptError("not the signature of a model: unknown statement type")
    subjects = [mapping_of(item) for item in list_of(statement["subject"])]
    if statement["predicateType"] == _OLD_PREDICATE:
        serialization = Serialization(algorithm="sha256")
        resources = [(str(item["name"]), "sha256", str(mapping_of(item["digest"])["sha256"])) for item in subjects]
        name = os.path.basename(path)
    else:
        predicate = mapping_of(statement["predicate"])
        serialization = _serialization(mapping_of(predicate["serialization"]))
        rows = (mapping_of(item) for item in list_of(predicate["resources"]))
        resources = [(str(row["name"]), str(row["algorithm"]), str(row["digest"])) for row in rows]
        name = str(subjects[0]["name"])
    for resource, _, _ in resources:
        if resource.startswith("/") or "\0" in resource or ".." in resource.split("/"):
            raise CorruptError(f"the signature lists {resource[:80]!r}, which is not a file of its folder")
    method, fingerprint, subject = _material(mapping_of(bundle["verificationMaterial"]))
    return Bundle(
        path=path, method=method, fingerprint=fingerprint, subject=subject, model_name=name,
        serialization=serialization, digests={name: digest.lower() for name, _, digest in resources},
        algorithms={name: algorithm for name, algorithm, _ in resources},
    )  # fmt: skip


def _serialization(fields: Mapping[str, object]) -> Serialization:
    size = fields.get("shard_size")
    if size is not None and not isinstance(size, int | float):
        raise TypeError
    return Serialization(
        method=str(fields["method"]),
        algorithm=str(fields["hash_type"]),
        follows_links=fields.get("allow_symlinks") is True,
        ignored=tuple(str(item) for item in list_of(fields.get("ignore_paths", []))),
        shard_size=None if size is None else int(size),
    )


def _material(fields: Mapping[str, object]) -> tuple[str, str, str | None]:
    """The method of a bundle, the fingerprint of its key or certificate, and the subject of the latter."""
    if "publicKey" in fields:
        return "key", str(mapping_of(fields["publicKey"]).get("hint") or ""), None
    if "x509CertificateChain" in fields:
        method, first = "certificate", list_of(mapping_of(fields["x509CertificateChain"])["certificates"])[0]
    else:
        method, first = "sigstore", fields["certificate"]
    der = base64.b64decode(str(mapping_of(first)["rawBytes"]), validate=True)
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    certificate = x509.load_der_x509_certificate(der)
    subject = certificate.subject.rfc4514_string()
    if method == "sigstore":
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        subject = first_few([str(name.value) for name in names])
    return method, certificate.fingerprint(SHA256()).hex(), subject


class _Hashing:
    """The hashing configuration that model-signing calls: it hashes by `contents`, and remembers what it found."""

    def __init__(
        self, root: str, serialization: Serialization, algorithms: Mapping[str, str], progress: StartProgress | None
    ) -> None:
        self._root = root
        self._serialization = serialization
        self._algorithms = algorithms
        self._progress = progress
        self.found: dict[str, str] | None = None

    def add_ignored_paths(self, *, model_path: object, paths: Sequence[str]) -> None:
        """Called with the paths that the judged signature leaves out."""
        if set(map(str, paths)) - set(self._serialization.ignored):
            raise ChecksumError("the signature changed while it was read")

    def hash(self, model_path: object, *, files_to_hash: object = None) -> Manifest:
        """The digests of the files, as model-signing compares and signs them."""
        from model_signing import manifest

        names = list_files(self._root, self._serialization)
        self.found = digests(self._root, self._serialization, names, self._progress)
        arguments: dict[str, object] = {
            "method": self._serialization.method,
            "hash_type": self._serialization.algorithm,
            "allow_symlinks": self._serialization.follows_links,
            "ignore_paths": [*dict.fromkeys([*GIT_NAMES, *self._serialization.ignored])],
        }
        if self._serialization.method == "shards":
            arguments["shard_size"] = self._serialization.shard_size
        kind = manifest.SerializationType.from_args(arguments)
        items = [
            kind.new_item(
                name,
                manifest.hashing.Digest(
                    self._algorithms.get(name, self._serialization.algorithm), bytes.fromhex(digest)
                ),
            )
            for name, digest in self.found.items()
        ]
        name = os.path.basename(os.path.realpath(self._root))
        return manifest.Manifest(name, items, kind)


@contextmanager
def _quiet() -> Iterator[None]:
    """model-signing prints warnings to standard output, which belongs to the data of a command."""
    with redirect_stdout(io.StringIO()):
        yield


def _model_signing() -> tuple[type[signing.Config], type[verifying.Config]]:
    try:
        from model_signing import signing, verifying
    except ImportError as error:
        raise MissingDependencyError("signatures need the package model-signing", hint=_INSTALL) from error
    return signing.Config, verifying.Config


def signature_in(root: str, signature: str) -> tuple[str, ...]:
    """The name of the signature file if it lies in the folder that it covers: no signature covers itself."""
    inside = os.path.relpath(os.path.realpath(signature), os.path.realpath(root)).replace(os.sep, "/")
    return () if inside.startswith("../") or inside == WHOLE else (inside,)


def verify_bundle(bundle: Bundle, root: PathLike, signer: Signer, *, progress: StartProgress | None = None) -> None:
    """Checks that `signer` signed `bundle`, and that the file or folder `root` is what was signed.

    Args:
        bundle: the signature.
        root: the file or folder.
        signer: whose signature is required.
        progress: called with the bytes to hash; returns a function to call as they are hashed.

    Raises:
        RefusedError: signed by somebody else.
        ChecksumError: the signature is broken, or files were modified, added or removed.
        MissingDependencyError: model-signing is not installed.
        StorageError: Sigstore's trust root cannot be fetched.
    """
    place = os.fspath(root)
    _check_method(bundle, signer)
    own = signature_in(place, bundle.path)
    serialization = replace(bundle.serialization, ignored=(*bundle.serialization.ignored, *own))
    _check_ignored(bundle, place, own)
    hashing = _Hashing(place, serialization, bundle.algorithms, progress)
    _, make = _model_signing()
    with _quiet(), _judged(bundle, place, hashing):
        config = _verifier(make().set_hashing_config(hashing), signer)
        config.verify(Path(place), Path(bundle.path))


def _verifier(config: verifying.Config, signer: Signer) -> verifying.Config:
    if isinstance(signer, PublicKeyFile):
        return config.use_elliptic_key_verifier(public_key=signer.path)
    if isinstance(signer, CertificateFile):
        return config.use_certificate_verifier(certificate_chain=[signer.path])
    with _sigstore():
        return config.use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.issuer)


@contextmanager
def _sigstore() -> Iterator[None]:
    """Raises whatever Sigstore raises, which fetches its trust root and certificates, as a StorageError."""
    try:
        yield
    except AprError:
        raise
    except Exception as error:
        raise StorageError(
            f"Sigstore cannot be reached: {type(error).__name__}: {str(error)[:200]}",
            hint="signing and verifying without a key need a network; use a key: apr keygen -o NAME",
        ) from error


def _check_method(bundle: Bundle, signer: Signer) -> None:
    needed = {PublicKeyFile: "key", CertificateFile: "certificate", SigstoreIdentity: "sigstore"}[type(signer)]
    if isinstance(signer, PublicKeyFile) and signer.kind not in CURVES:
        raise RefusedError(
            f"{signer} is a {signer.kind} key, which cannot have signed {os.path.basename(bundle.path)}",
            path=bundle.path,
            hint="pass the public key of the signer: a P-256, P-384 or P-521 key",
        )
    other_key = isinstance(signer, PublicKeyFile) and bundle.fingerprint not in ("", signer.fingerprint)
    if bundle.method != needed or other_key:
        raise RefusedError(f"signed by {bundle.signer}, not by {signer}", path=bundle.path, hint=_OTHER_SIGNER)


_OTHER_SIGNER = "get the model from a source that you trust, or pass the key of its signer"


def _check_ignored(bundle: Bundle, root: str, own: Sequence[str]) -> None:
    """Refuses a signature that leaves out what may decide how the model behaves."""
    left_out = [
        name
        for name in bundle.serialization.ignored
        if name not in (*GIT_NAMES, *own)
        and not name.startswith((".", "/"))
        and not name.lower().endswith(_HARMLESS_SUFFIXES)
        and not os.path.basename(name).upper().startswith(_HARMLESS_STEMS)
        and exists(os.path.join(root, name))
    ]
    if left_out:
        raise ChecksumError(
            f"the signature does not cover {first_few(left_out)}",
            path=bundle.path,
            hint="sign the whole folder: apr sign",
        )


@contextmanager
def _judged(bundle: Bundle, root: str, hashing: _Hashing) -> Iterator[None]:
    """Raises what model-signing raises as the AprError that names the files that differ."""
    try:
        yield
    except (AprError, MemoryError):
        raise
    except Exception as error:
        if hashing.found is not None:
            difference = compare(bundle.digests, hashing.found, by_shards=bundle.serialization.method == "shards")
            if difference:
                raise _differs(bundle, root, difference) from error
        reason = str(error) or type(error).__name__
        raise ChecksumError(f"the signature is broken: {reason[:200]}", path=bundle.path, hint=_OTHER_SIGNER) from error


def _differs(bundle: Bundle, root: str, found: SignedDifference) -> ChecksumError:
    if found.is_other:
        return ChecksumError(
            f"the signature belongs to another model, {bundle.model_name}", path=bundle.path, hint=_OTHER_SIGNER
        )
    if found.modified == [WHOLE]:
        renamed = os.path.basename(root) != bundle.model_name
        what = f", or the signature belongs to another file, {bundle.model_name}" if renamed else ""
        return ChecksumError(f"the file was modified after it was signed{what}", path=root, hint=_OTHER_SIGNER)
    parts = (("modified", found.modified), ("removed", found.missing), ("added", found.added))
    changes = [f"{first_few(names)} {'was' if len(names) == 1 else 'were'} {word}" for word, names in parts if names]
    return ChecksumError(f"{', '.join(changes)} after signing", path=root, hint=_OTHER_SIGNER)


def compare_files(bundle: Bundle, root: PathLike) -> None:
    """Compares files with the digests of a signature that nobody judged. Files that it does not list are no error.

    Raises ChecksumError for a file that was modified or removed since it was signed.
    """
    place = os.fspath(root)
    names = sorted({name.rsplit(":", 2)[0] for name in bundle.digests} if _by_shards(bundle) else bundle.digests)
    there = [name for name in names if exists(place if name == WHOLE else os.path.join(place, name))]
    found = digests(place, bundle.serialization, there)
    difference = compare(bundle.digests, found, by_shards=_by_shards(bundle))
    if difference:
        raise _differs(bundle, place, difference)


def _by_shards(bundle: Bundle) -> bool:
    return bundle.serialization.method == "shards"


@dataclass(frozen=True, slots=True)
class CertificateSigner:
    """A private key with the certificate of its owner, and those of the authorities between it and a trusted one."""

    key: KeyFile
    certificate: str
    chain: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SigstoreSigner:
    """An identity that Sigstore confirms: by a token, or by that of the CI job around this process."""

    token: str | None = None


def sign_bundle(
    root: PathLike,
    signature: PathLike,
    signer: KeyFile | CertificateSigner | SigstoreSigner,
    *,
    algorithm: str = "sha256",
    follow_links: bool = False,
    force: bool = False,
    progress: StartProgress | None = None,
) -> Bundle:
    """Signs a file or a folder with all its files, but for those of git.

    Args:
        root: the file or folder.
        signature: the signature file to write.
        signer: who signs.
        algorithm: digests of the files: sha256, blake3 (fastest) or blake2b.
        follow_links: cover files that symlinks refer to.
        force: replace an existing signature.
        progress: called with the bytes to hash; returns a function to call as they are hashed.

    Raises:
        UsageError: the key cannot sign, or does not belong to the certificate.
        RefusedError: a symlink without `follow_links`, or nothing to sign.
        MissingDependencyError: model-signing is not installed.
        StorageError: Sigstore cannot be reached.
    """
    place, target = os.fspath(root), os.fspath(signature)
    check_target(target, (*inputs_of([place], ".sig"), *_files_of(signer)), force)
    own = signature_in(place, target)
    hashing = _Hashing(place, Serialization("files", algorithm, follow_links, own), {}, progress)
    make, _ = _model_signing()
    with storage_errors(tempfile.gettempdir()), TemporaryDirectory(prefix="apr-sign-") as folder, _quiet():
        made = Path(folder) / "bundle"
        config = _signer(make().set_hashing_config(hashing), signer)
        with _sigstore() if isinstance(signer, SigstoreSigner) else _quiet():
            config.sign(Path(place), made)
        if not hashing.found:
            raise RefusedError("the folder contains no files to sign", path=place)
        data = made.read_bytes()
    with AtomicFile(target, force=force) as file:
        file.write(data)
    return read_bundle(target)


def _files_of(signer: KeyFile | CertificateSigner | SigstoreSigner) -> tuple[str, ...]:
    if isinstance(signer, SigstoreSigner):
        return ()
    return (signer.path,) if isinstance(signer, KeyFile) else (signer.key.path, signer.certificate, *signer.chain)


def _signer(config: signing.Config, signer: KeyFile | CertificateSigner | SigstoreSigner) -> signing.Config:
    if isinstance(signer, SigstoreSigner):
        with _sigstore():
            return config.use_sigstore_signer(use_ambient_credentials=True, identity_token=signer.token)
    key = signer if isinstance(signer, KeyFile) else signer.key
    if key.kind not in CURVES:
        hint = "apr keygen -o NAME makes a P-256 key"
        raise UsageError(f"this is a {key.kind} key, which cannot sign files or folders", path=key.path, hint=hint)
    if isinstance(signer, KeyFile):
        return config.use_elliptic_key_signer(private_key=key.path, password=key.passphrase)
    if key.passphrase is not None:
        raise UsageError(
            "model-signing reads the key of a certificate without a passphrase only",
            path=key.path,
            hint="decrypt it: openssl pkcs8 -in KEY -out PLAIN (umask 077)",
        )
    try:
        return config.use_certificate_signer(
            private_key=key.path, signing_certificate=signer.certificate, certificate_chain=signer.chain
        )
    except ValueError as error:
        raise UsageError(f"cannot sign with this certificate: {error}", path=signer.certificate) from error
