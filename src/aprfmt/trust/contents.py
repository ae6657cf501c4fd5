"""The files that a signature covers, and their digests.

A file is hashed through two small buffers, one read while the other is hashed, and never mapped: resident memory stays
small, and a file that is cut short meanwhile is an error. BLAKE3 uses every core on one file; the other algorithms hash
several files at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol

from aprfmt.errors import RefusedError, UnsupportedError, storage_errors
from aprfmt.io.pipe import StartProgress
from aprfmt.io.source import Buffer, Source, exists, is_folder
from aprfmt.io.system import n_processors
from aprfmt.limits import MAX_SIGNED_FILES
from aprfmt.types import PathLike

WHOLE = "."
"""The name under which a signature of a single file lists it."""

GIT_NAMES = (".git", ".gitattributes", ".github", ".gitignore")
"""What OpenSSF Model Signing never covers: no reader of a model opens it."""

_BUFFER_BYTES = 4 << 20
_MOST_THREADS = 8


class _Hash(Protocol):
    def update(self, data: Buffer, /) -> object: ...

    def hexdigest(self) -> str: ...


def _blake3() -> _Hash:
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO)


_HASHES: Mapping[str, Callable[[], _Hash]] = {
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
    "blake2": hashlib.blake2b,
    "blake3": _blake3,
}


@dataclass(frozen=True, slots=True)
class Serialization:
    """How the contents of a folder become digests, in the terms of OpenSSF Model Signing.

    Attributes:
        method: "files", one digest a file, or "shards", one for each `shard_size` bytes of a file.
        algorithm: sha256, blake2b or blake3.
        follows_links: whether files may be symlinks.
        ignored: paths that are not covered, relative to the folder.
        shard_size: of the method "shards".
    """

    method: str = "files"
    algorithm: str = "blake3"
    follows_links: bool = False
    ignored: Sequence[str] = ()
    shard_size: int | None = None


@dataclass(frozen=True, slots=True)
class SignedDifference:
    """How files differ from what was signed, by names in order.

    Attributes:
        modified: another digest.
        missing: signed, but not there.
        added: there, but not signed.
        is_other: nothing that is there has its signed digest: the signature is of another model.
    """

    modified: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    is_other: bool = False

    def __bool__(self) -> bool:
        return bool(self.modified or self.missing or self.added)


def list_files(root: PathLike, serialization: Serialization) -> list[str]:
    """The files of a folder that a signature covers, with forward slashes; WHOLE of a file.

    Raises:
        RefusedError: a symlink, unless the signature follows them; a device or a pipe; more than MAX_SIGNED_FILES.
        NotFoundError, StorageError.
    """
    if not is_folder(root):
        return [WHOLE]
    ignored = {_normal(name) for name in (*GIT_NAMES, *serialization.ignored)}
    found = []
    for name in _walk(os.fspath(root), "", ignored, serialization.follows_links):
        found.append(name)
        if len(found) > MAX_SIGNED_FILES:
            raise RefusedError(f"more than {MAX_SIGNED_FILES} files in the folder", path=root)
    return sorted(found)


def _normal(name: str) -> str:
    return os.path.normpath(name).replace(os.sep, "/")


def _walk(root: str, prefix: str, ignored: set[str], follows: bool) -> Iterator[str]:
    folder = os.path.join(root, prefix)
    with storage_errors(folder):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        name = prefix + entry.name
        if name in ignored:
            continue
        if entry.is_symlink() and not follows:
            raise RefusedError(
                f"{name} is a symlink, which a signature does not cover",
                path=root,
                hint="replace it with the file, or sign with --follow-links",
            )
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, f"{name}/", ignored, follows)
        elif entry.is_file():
            yield name
        elif follows and entry.is_dir():
            raise RefusedError(f"{name} is a symlink to a folder, which a signature cannot cover", path=root)
        else:
            raise RefusedError(f"{name} is not a regular file", path=root)


def path_of(root: PathLike, name: str) -> str:
    """Where the file lies that a signature of `root` lists as `name`."""
    return os.fspath(root) if name == WHOLE else os.path.join(root, *name.split("/"))


def digests(
    root: PathLike, serialization: Serialization, names: Sequence[str], progress: StartProgress | None = None
) -> dict[str, str]:
    """The digests of files in hex, by name; of shards by name:start:end.

    Raises:
        UnsupportedError: an unknown algorithm or method.
        ChangedError, StorageError.
    """
    if serialization.algorithm not in _HASHES or serialization.method not in ("files", "shards"):
        what = f"{serialization.algorithm} digests of {serialization.method}"
        raise UnsupportedError(f"the signature uses {what}, which this version does not support", path=root)
    sources = [(name, path_of(root, name)) for name in names]
    total = sum(_size(path) for _, path in sources)
    advance = progress(total) if progress is not None else lambda n_bytes, label: None
    n_threads = 1 if serialization.algorithm == "blake3" else max(1, min(_MOST_THREADS, n_processors(), len(sources)))
    with ThreadPoolExecutor(n_threads) as pool:
        # In the context of the caller, whose `watch_opened` is told of every file.
        parts = [
            pool.submit(copy_context().run, _digests_of, name, path, serialization, advance) for name, path in sources
        ]
        return {name: digest for part in parts for name, digest in part.result()}


def _size(path: str) -> int:
    with storage_errors(path):
        return os.path.getsize(path) if exists(path) else 0


def _digests_of(
    name: str, path: str, serialization: Serialization, advance: Callable[[int, str], None]
) -> list[tuple[str, str]]:
    with Source.open(path) as source:
        if serialization.method == "files":
            found = [(name, _digest(source, 0, source.size, serialization.algorithm, advance))]
        else:
            step = serialization.shard_size or 0
            if step <= 0:
                raise UnsupportedError(f"the signature has shards of {step} bytes", path=path)
            ranges = [(at, min(at + step, source.size)) for at in range(0, source.size, step)]
            if len(ranges) > MAX_SIGNED_FILES:
                raise UnsupportedError(f"the signature has more than {MAX_SIGNED_FILES} shards", path=path)
            found = [
                (f"{name}:{start}:{end}", _digest(source, start, end, serialization.algorithm, advance))
                for start, end in ranges
            ]
        source.check_unchanged()
    return found


def _digest(source: Source, start: int, end: int, algorithm: str, advance: Callable[[int, str], None]) -> str:
    digest = _HASHES[algorithm]()
    for view in _read_ahead(source, start, end):
        digest.update(view)
        advance(len(view), os.path.basename(source.path))
    return digest.hexdigest()


def _read_ahead(source: Source, start: int, end: int) -> Iterator[memoryview]:
    """The bytes [start, end) of a file in views, each valid until the next one, which is read meanwhile."""
    if end <= start:
        return
    buffers = [memoryview(bytearray(min(_BUFFER_BYTES, end - start))) for _ in range(1 + (end - start > _BUFFER_BYTES))]

    def read(at: int) -> memoryview:
        view = buffers[(at - start) // _BUFFER_BYTES % 2][: min(_BUFFER_BYTES, end - at)]
        source.read_into(at, view)
        return view

    if len(buffers) == 1:
        yield read(start)
        return
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, start)
        for at in range(start, end, _BUFFER_BYTES):
            view = ahead.result()
            if at + _BUFFER_BYTES < end:
                ahead = reader.submit(read, at + _BUFFER_BYTES)
            yield view


def compare(signed: Mapping[str, str], found: Mapping[str, str], *, by_shards: bool = False) -> SignedDifference:
    """How the digests `found` differ from those that were signed."""

    def files(names: set[str]) -> set[str]:
        return {name.rsplit(":", 2)[0] if by_shards else name for name in names}

    of_signed, of_found = files(set(signed)), files(set(found))
    same = {name for name in signed if found.get(name) == signed[name]}
    changed = {name for name in (*signed, *found) if signed.get(name) != found.get(name)}
    return SignedDifference(
        modified=sorted(files(changed) & of_signed & of_found),
        missing=sorted(of_signed - of_found),
        added=sorted(of_found - of_signed),
        is_other=not same and len(of_signed) > 1,
    )
