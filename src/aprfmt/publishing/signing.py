"""Signing models and verifying their signatures: `aprfmt.sign` and `aprfmt.verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aprfmt import formats
from aprfmt.errors import UsageError, storage_errors
from aprfmt.formats.apr1_edit import sign_v1
from aprfmt.formats.signatures import covered_by
from aprfmt.formats.signatures import verify as verify_signature
from aprfmt.io.pipe import StartProgress
from aprfmt.io.sink import check_target
from aprfmt.io.source import is_folder, read_whole
from aprfmt.text import plural
from aprfmt.trust.bundle import CertificateSigner, SigstoreSigner, read_bundle, sign_bundle
from aprfmt.trust.keys import ED25519, KeyFile, public_of, read_private, read_signer
from aprfmt.trust.signature import ED25519_METHOD, ModelSignature
from aprfmt.types import PathLike


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """The result of `sign` and `verify`; `to_json` is the object of `apr sign --json` and `apr verify --json`.

    Attributes:
        file: the path as given.
        signature: the signature, and what it covers.
        n_files, n_bytes: covered files and their bytes.
        seconds: time that it took.
    """

    file: str
    signature: ModelSignature
    n_files: int
    n_bytes: int
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The object of the command line."""
        found = self.signature
        return {
            "file": self.file, "signature": found.path, "covers": found.root, "method": found.method,
            "signer": found.signer, "verified": found.verified, "file_count": self.n_files, "size_bytes": self.n_bytes,
            "seconds": round(self.seconds, 3),
        }  # fmt: skip

    @property
    def covers(self) -> str:
        """What is covered, in words."""
        return f"{self.signature.root} ({plural(self.n_files, 'file')})" if self.n_files > 1 else self.signature.root


def sign(
    path: PathLike,
    *,
    key: PathLike | None = None,
    passphrase: bytes | None = None,
    certificate: PathLike | None = None,
    chain: Sequence[PathLike] = (),
    sigstore: bool = False,
    identity_token: PathLike | None = None,
    output: PathLike | None = None,
    hash: str = "sha256",
    follow_links: bool = False,
    force: bool = False,
    progress: StartProgress | None = None,
) -> SignatureReport:
    """Signs a model: its weights, tokenizer, templates and configuration, with one signature.

    A P-256, P-384 or P-521 key writes a bundle of OpenSSF Model Signing: FILE.sig for a file that is a whole model
    (GGUF, `.apr`), else model.sig for all files of the folder. An Ed25519 key writes an `.apr` v1 that holds its
    signature.

    Args:
        path: the model, or any folder.
        key: private key file (PEM, mode 0600).
        passphrase: of the key file.
        certificate: certificate of the key (PEM), which the bundle then contains.
        chain: certificates between it and a trusted one.
        sigstore: sign with an identity instead of a key; needs a network.
        identity_token: file with an OpenID Connect token; default: that of the CI job around this process.
        output: the signature file; of an Ed25519 key the signed `.apr` v1, required.
        hash: digests of the files: sha256, which every verifier reads, blake3 (fastest) or blake2b.
        follow_links: cover files that symlinks refer to.
        force: replace an existing output.
        progress: called with the bytes to hash; returns a function to call as they are hashed.

    Raises:
        UsageError: options that do not fit, or a key that cannot sign.
        RefusedError: a key that others can read, or a symlink without `follow_links`.
        MissingDependencyError: model-signing is not installed.
        StorageError: Sigstore cannot be reached.
    """
    start, name = time.monotonic(), formats.path_text(path, "path")
    if sigstore == (key is not None):
        raise UsageError("sign with a key or with --sigstore", hint=f"apr sign {name} --key NAME.key")
    if certificate is None and chain:
        raise UsageError("--chain needs --certificate")
    if hash not in _HASHES:
        raise UsageError(f"unknown hash {hash!r}", hint=f"one of: {', '.join(_HASHES)}")
    who: str | None = None
    signer: KeyFile | CertificateSigner | SigstoreSigner
    if key is None:
        token = read_whole(identity_token).decode("utf-8", "replace").strip() if identity_token is not None else None
        signer = SigstoreSigner(token)
    else:
        signer = read_private(key, passphrase)
        if signer.kind == ED25519:
            if output is not None:
                check_target(output, [signer.path], force)
            return _sign_v1(name, signer.raw(), str(public_of(signer)), output, start, force=force)
        if certificate is None:
            who = str(public_of(signer))
        else:
            signer = CertificateSigner(signer, os.fspath(certificate), [os.fspath(path) for path in chain])
    root, place = covered_by(name, formats.detect_any(name))
    place = os.fspath(output) if output is not None else place
    bundle = sign_bundle(root, place, signer, algorithm=hash, follow_links=follow_links, force=force, progress=progress)
    return _report(name, ModelSignature(place, root, bundle.method, who or bundle.signer), len(bundle.digests), start)


_HASHES = ("sha256", "blake3", "blake2b")


def _sign_v1(
    name: str, seed: bytes, who: str, output: PathLike | None, start: float, *, force: bool
) -> SignatureReport:
    if formats.detect(name) != "apr-v1":
        raise UsageError(
            "an Ed25519 key signs .apr v1 files only", path=name, hint="apr keygen -o NAME makes a key for any model"
        )
    if output is None:
        raise UsageError("the signature of an .apr v1 is stored in the file", hint=f"apr sign {name} -o signed.apr ...")
    sign_v1(name, output, seed, force=force)
    signed = os.fspath(output)
    return _report(name, ModelSignature(signed, signed, ED25519_METHOD, who), 1, start)


def verify(
    path: PathLike, *, key: str, signature: PathLike | None = None, progress: StartProgress | None = None
) -> SignatureReport:
    """Verifies who signed a model, and that nothing of it was modified, added or removed since.

    Args:
        path: the model, or any folder.
        key: the signer: a file with a public key or with certificates of authorities (PEM), or
            "sigstore:IDENTITY,ISSUER".
        signature: the signature file; default: FILE.sig or model.sig.
        progress: called with the bytes to hash; returns a function to call as they are hashed.

    Raises:
        RefusedError: not signed, or signed by somebody else.
        ChecksumError: a broken signature, or files that differ from what was signed; the message names them.
        MissingDependencyError: model-signing is not installed.
        StorageError: Sigstore's trust root cannot be fetched.
    """
    start, name = time.monotonic(), formats.path_text(path, "path")
    signer = read_signer(key)
    place = formats.resolve(name)
    found = verify_signature(place, formats.detect_any(place), signer, signature=signature, progress=progress)
    n_files = 1 if found.method == ED25519_METHOD else len(read_bundle(found.path).digests)
    return _report(name, found, n_files, start)


def _report(name: str, found: ModelSignature, n_files: int, start: float) -> SignatureReport:
    with storage_errors(found.root):
        paths = [found.root]
        if is_folder(found.root):
            paths = [os.path.join(folder, each) for folder, _, names in os.walk(found.root) for each in names]
        n_bytes = sum(os.path.getsize(path) for path in paths)
    return SignatureReport(name, found, n_files, n_bytes, time.monotonic() - start)
