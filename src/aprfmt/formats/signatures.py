"""The signature of a model: where it lies, what it says, and whether it is the one that is required.

An `.apr` v1 may hold an Ed25519 signature. Any other model has a bundle of OpenSSF Model Signing: a single file that is
a whole model FILE.sig beside it, everything else model.sig in its folder, which covers weights, tokenizer, templates
and configuration together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from aprfmt.errors import AprError, RefusedError
from aprfmt.formats import apr1
from aprfmt.io.cache import EXPORTS, cache_home
from aprfmt.io.pipe import StartProgress
from aprfmt.io.source import Source, is_file, is_folder, watch_opened
from aprfmt.trust.bundle import FILE_SUFFIX, read_bundle, verify_bundle
from aprfmt.trust.contents import WHOLE
from aprfmt.trust.keys import ED25519, PublicKeyFile, Signer, read_signer, short
from aprfmt.trust.signature import ED25519_METHOD, FOLDER_SIGNATURE, REQUIRED_SIGNER, UNREADABLE, ModelSignature
from aprfmt.types import PathLike

_ALONE = ("gguf", "apr-v1", "apr-v2", "apr-legacy", UNREADABLE)
"""Readers that open nothing but the file itself, unless it is one of several parts."""


def covered_by(path: PathLike, reader: str) -> tuple[str, str]:
    """What the signature of a model covers, and where it lies: FILE and FILE.sig, or a folder and its model.sig.

    Args:
        path: the model.
        reader: the name of its reader.
    """
    name = os.fspath(path)
    if is_folder(name):
        return name, os.path.join(name, FOLDER_SIGNATURE)
    folder = os.path.dirname(name) or "."
    if reader in _ALONE and not _has_parts(name):
        beside = os.path.join(folder, FOLDER_SIGNATURE)
        if is_file(name + FILE_SUFFIX) or not is_file(beside):
            return name, name + FILE_SUFFIX
    return folder, os.path.join(folder, FOLDER_SIGNATURE)


def _has_parts(name: str) -> bool:
    return name.endswith(".json") or "-of-0" in os.path.basename(name)


def signature_of(path: PathLike, reader: str) -> ModelSignature | None:
    """What the signature of a model claims; None without one. Raises CorruptError for a damaged one."""
    if reader == "apr-v1":
        with Source.open(path) as source:
            key = apr1.embedded_key(source)
        if key is not None:
            return ModelSignature(
                os.fspath(path), os.fspath(path), ED25519_METHOD, f"the key in the file, {short(key.hex())}"
            )
    root, signature = covered_by(path, reader)
    if not is_file(signature) or (root == os.fspath(path) and not is_folder(root) and not _is_json(signature)):
        return None
    bundle = read_bundle(signature)
    return ModelSignature(signature, root, bundle.method, bundle.signer)


def _is_json(signature: str) -> bool:
    """Whether it looks like JSON; FILE.sig may be a signature of another program, such as gpg."""
    with Source.open(signature) as source:
        return source.read(0, min(source.size, 64)).lstrip()[:1] == b"{"


def verify(
    path: PathLike,
    reader: str,
    signer: Signer,
    *,
    signature: PathLike | None = None,
    progress: StartProgress | None = None,
) -> ModelSignature:
    """Checks that `signer` signed the model, and that it is what was signed.

    Args:
        path: the model.
        reader: the name of its reader.
        signer: whose signature is required.
        signature: the signature file, if it lies elsewhere.
        progress: called with the bytes to hash; returns a function to call as they are hashed.

    Raises:
        RefusedError: not signed, or signed by somebody else.
        ChecksumError: a broken signature, or files that differ from what was signed.
        MissingDependencyError: model-signing is not installed.
    """
    name = os.fspath(path)
    if isinstance(signer, PublicKeyFile) and signer.kind == ED25519 and signature is None:
        if reader != "apr-v1":
            hint = f"apr sign {name} --key KEY with a P-256 key signs any model"
            raise RefusedError(f"not signed by {signer}: an Ed25519 key signs .apr v1 only", path=name, hint=hint)
        with Source.open(name) as source:
            if apr1.embedded_key(source) is None:
                raise _unsigned(name, f"a signature by {signer} is required")
            apr1.V1File(source, public_key=signer.raw())
        return ModelSignature(name, name, ED25519_METHOD, str(signer), verified=True)
    root, place = covered_by(name, reader)
    place = os.fspath(signature) if signature is not None else place
    if not is_file(place):
        raise _unsigned(name, f"{place} not found; a signature by {signer} is required")
    bundle = read_bundle(place)
    if signature is not None and any(each.partition(":")[0] == WHOLE for each in bundle.digests):
        root = name
    verify_bundle(bundle, root, signer, progress=progress)
    return ModelSignature(place, root, bundle.method, str(signer), verified=True)


def _unsigned(path: str, why: str) -> RefusedError:
    signed = path.removesuffix(".sig")
    hint = f"sign it: apr sign {path} --key KEY"
    if signed != path and os.path.exists(signed):
        hint = f"pass the signed file: {signed}"
    return RefusedError(f"not signed: {why}", path=path, hint=hint)


def required_signer() -> Signer | None:
    """Whose signature every model must have; None if none is required. Raises UsageError, NotFoundError."""
    text = os.environ.get(REQUIRED_SIGNER)
    return read_signer(text) if text else None


_VERIFIED: dict[tuple[str, str], tuple[ModelSignature, list[Source], list[str]]] = {}
"""What was verified in this process, by place and signer: the files that were read for it, and all that were there."""


def check_required(path: Path, reader: str) -> ModelSignature | None:
    """Verifies the signature of a model, or of a file of one, if one is required; once for each state of its files.

    The cache of exports is exempt: it holds what was made of verified models, in a folder of this user alone.

    Raises what `verify` raises.
    """
    signer = required_signer()
    if signer is None or Path(os.path.abspath(path)).is_relative_to(os.path.abspath(cache_home() / EXPORTS)):
        return None
    key = (os.path.abspath(path), os.environ[REQUIRED_SIGNER])
    known = _VERIFIED.get(key)
    if known is not None and _is_unchanged(*known):
        return known[0]
    with watch_opened() as opened:
        found = verify(path, reader, signer)
    _VERIFIED[key] = (found, opened, sorted(_names(found.root)))
    return found


def _is_unchanged(found: ModelSignature, opened: list[Source], names: list[str]) -> bool:
    try:
        for source in opened:
            source.check_unchanged()
        return names == sorted(_names(found.root))
    except AprError:
        return False


def _names(root: str) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        yield from (os.path.join(folder, name) for name in names)
