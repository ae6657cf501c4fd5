"""SHA-256 digests from outside the file: given as hex, as the hub's ETag, or in a list in sha256sum's format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from aprfmt.errors import UsageError
from aprfmt.formats import path_text
from aprfmt.formats.hf_files import read_text_file
from aprfmt.inspection.validate import DIGEST_RULE, Check, Subject, ValidationRule
from aprfmt.io.pipe import sha256_of_range
from aprfmt.io.source import Source, is_file, is_folder
from aprfmt.text import first_few
from aprfmt.types import PathLike

_HEX = re.compile(r'"?([0-9a-fA-F]{64})"?')
_LINE = re.compile(r"\\?([0-9a-fA-F]{64})[ \t]+[* ]?(.+)|SHA256 \((.+)\) = ([0-9a-fA-F]{64})")


def digest_rule(path: PathLike, sha256: PathLike | None, manifest: PathLike | None) -> ValidationRule | None:
    """The rule that compares the files of the model at `path` with digests; None if none are given.

    Args:
        path: the model.
        sha256: 64 hex digits (of a model in one file), or a list: its lines about files of the model count.
        manifest: a list; every file in it must exist beside the model.

    Raises:
        UsageError: both, or neither hex digits nor a list, or a list without the model.
        NotFoundError, StorageError: the list cannot be read.
    """
    given = sha256 if sha256 is not None else manifest
    if given is None:
        return None
    if sha256 is not None and manifest is not None:
        raise UsageError(
            "--sha256 and --manifest are mutually exclusive", hint="--manifest compares every file of the list"
        )
    text = path_text(given, "sha256" if sha256 is not None else "manifest")
    value = _HEX.fullmatch(text.strip())
    if value is not None and sha256 is not None:
        if is_folder(path):
            hint = f"sha256sum * > SHA256SUMS in the folder, then apr validate {path} --manifest SHA256SUMS"
            raise UsageError("one SHA-256 cannot describe a folder", path=path, hint=hint)
        expected = {Path(path): value[1].lower()}
    else:
        expected = _listed(Path(path), text, every=manifest is not None)
    return ValidationRule(
        DIGEST_RULE, 10, f"the SHA-256 of {first_few(p.name for p in expected)} matches", lambda s: _look(s, expected)
    )


def _listed(path: Path, list_path: str, *, every: bool) -> dict[Path, str]:
    """File -> digest of a list in sha256sum's format, relative to the model's folder."""
    if not is_file(list_path) and len(list_path) > 40 and os.sep not in list_path:
        raise UsageError(f"not a SHA-256: {len(list_path)} characters instead of 64 hex digits")
    folder = path if is_folder(path) else path.parent
    lines = read_text_file(Path(list_path)).decode("utf-8", "replace").splitlines()
    if len(lines) == 1 and (value := _HEX.fullmatch(lines[0].strip())) is not None:
        return {path: value[1].lower()}
    found: dict[Path, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if (match := _LINE.fullmatch(line.strip())) is None:
            hint = "expected sha256sum's format: 64 hex digits, two spaces, a file name"
            raise UsageError(f"line {number} is not a digest and a file name", path=list_path, hint=hint)
        name, value_text = match[2] or match[3], match[1] or match[4]
        found[folder / name.strip()] = value_text.lower()
    if not every and path != folder and path in found:
        found = {path: found[path]}
    elif not every:
        found = {file: digest for file, digest in found.items() if is_file(file)}
        if not found or (path != folder and path not in found):
            raise UsageError(
                f"the list does not contain {path.name}", path=list_path, hint="pass the digest: --sha256 HEX"
            )
    return found


def _look(subject: Subject, expected: Mapping[Path, str]) -> Iterator[Check]:
    for path, digest in expected.items():
        if not is_file(path):
            yield Check("fail", f"{path.name} is listed, but missing")
            continue
        with Source.open(path) as source:
            found = sha256_of_range(source, 0, source.size)
        if found != digest:
            yield Check("fail", f"{path.name} differs from the published file: SHA-256 {found}, expected {digest}")
    weights = [Path(source.path) for source in subject.model.sources]
    unlisted = [path.name for path in weights if path.resolve() not in {p.resolve() for p in expected}]
    if unlisted:
        yield Check("warn", f"no SHA-256 given for {first_few(unlisted)}")
