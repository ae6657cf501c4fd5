"""Detects failed downloads: Git LFS pointers, error pages, archives, unfinished files under a model's name.

Nothing here decides whether a file can be read. Readers refuse it first; `explained` then looks at the file again, says
what it is and how to get the real one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aprfmt.errors import AprError, ChangedError, CorruptError, TruncatedError, UnknownFormatError
from aprfmt.io.source import Source, exists
from aprfmt.text import format_bytes, plural
from aprfmt.types import PathLike

_LFS, _XET = b"version https://git-lfs.github.com/spec/", b"# xet version"
MAX_POINTER_BYTES = 1024
"""Git LFS writes pointers of at most this size."""

_HEAD_BYTES = 4096
_ZEROS_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 64 << 10
_MODELS = (".gguf", ".ggml", ".apr", ".safetensors")
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml")
_SIZE = re.compile(rb"^(?:size |filesize = )(\d{1,15})\s*$", re.MULTILINE)
_TITLE = re.compile(r"<(title|message)>\s*([^<]{1,120}?)\s*</", re.IGNORECASE)

_PARTIAL = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".opdownload", ".aria2")
"""Suffixes of downloads in progress."""

_CONTROL = ".aria2"
"""aria2c's control file next to a download: removed at the end; the download has its full size from the start."""

_ZIP, _PICKLES = b"PK\x03\x04", (".bin", ".pt", ".pth")
"""torch.save writes zip archives: a zip archive with this suffix is a damaged PyTorch file."""

_ARCHIVES = (
    (0, _ZIP, "a zip archive", "unzip"),
    (0, b"\x1f\x8b", "gzip-compressed", "gzip -dc"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed", "zstd -dc"),
    (0, b"\xfd7zXZ\0", "xz-compressed", "xz -dc"),
    (0, b"BZh", "bzip2-compressed", "bzip2 -dc"),
    (0, b"\x04\x22\x4d\x18", "lz4-compressed", "lz4 -dc"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "7z x"),
    (0, b"Rar!", "a RAR archive", "unrar x"),
    (257, b"ustar", "a tar archive", "tar -xf"),
)
"""Offset, magic, name of the format, program that unpacks it."""

_AGAIN = "download it again: hf download REPO FILE, or curl -fL -o FILE URL, which fails instead of saving a page"


@contextmanager
def explained(path: PathLike) -> Iterator[None]:
    """Replaces a CorruptError or UnknownFormatError of the block by an error about the failed download that caused it,
    if any.
    """
    try:
        yield
    except ChangedError:
        raise
    except (CorruptError, UnknownFormatError) as error:
        found = None
        with suppress(AprError):
            found = _explain(error.path or os.fspath(path))
        if found is None:
            raise
        raise found from error


def check_complete(path: str) -> None:
    """Raises TruncatedError if aria2c has not finished the file."""
    if (found := _unfinished(path)) is not None:
        raise found


def cut_short(size: int, expected: int, path: PathLike, tensor: str | None = None, *, least: bool = False) -> AprError:
    """The error for a file of `size` bytes that should have `expected`, or at least `least`."""
    return TruncatedError(
        f"the file is cut short: {'at least ' * least}{expected - size:,} of its {expected:,} bytes are missing",
        path=path,
        tensor=tensor,
        offset=size,
    )


def check_no_pointer(head: bytes, path: PathLike, size: int) -> None:
    """Raises UnknownFormatError if `head`, of a file of `size` bytes, is that of a Git LFS or Xet pointer."""
    if (found := _pointer(head, size, os.fspath(path))) is not None:
        raise found


def _explain(path: str) -> AprError | None:
    with Source.open(path) as source:
        size = source.size
        head = source.read(0, min(size, _HEAD_BYTES))
        found = _pointer(head, size, path) or _page(source, head) or _archive(head, path)
        if found is None and path.lower().endswith(_PARTIAL):
            suffix = os.path.splitext(path)[1]
            found = TruncatedError(
                f"the download is unfinished ({suffix}, {format_bytes(size)} so far)",
                path=path,
                hint="resume it with the program that started it (hf download, curl -C -, wget -c, aria2c -c)",
            )
        if found is None and size and not any(head):
            n = min(size, _ZEROS_BYTES)
            if not any(source.read(0, n)):
                what = "contains only zeros" if n == size else f"begins with {format_bytes(n)} of zeros"
                found = CorruptError(
                    f"the file {what}: its space was reserved, but no data was written", path=path, hint=_AGAIN
                )
    return found or _unfinished(path)


def _unfinished(path: str) -> AprError | None:
    if not exists(path + _CONTROL):
        return None
    control = os.path.basename(path) + _CONTROL
    return TruncatedError(
        f"the download is unfinished: {control} is next to it",
        path=path,
        hint=f"finish it with aria2c -c URL, or remove {control} if the file is known to be complete",
    )


def _pointer(head: bytes, size: int, path: str) -> AprError | None:
    if size > MAX_POINTER_BYTES or not head.startswith((_LFS, _XET)):
        return None
    missing = _pointed_bytes(head)
    if head.startswith(_XET):
        message, hint = f"a Xet pointer: {format_bytes(missing)} are missing", _AGAIN
        return UnknownFormatError(message, path=path, hint=hint)
    folder = os.path.dirname(path) or os.curdir
    others = _pointers_in(folder)
    more = f"; {plural(len(others), 'pointer')} in the folder, {format_bytes(sum(others))}" if len(others) > 1 else ""
    return UnknownFormatError(
        f"a Git LFS pointer, not the file itself: {format_bytes(missing)} are missing{more}",
        path=path,
        hint=f"git -C {shlex.quote(folder)} lfs pull",
    )


def _pointed_bytes(head: bytes) -> int:
    """The size of the file that a pointer refers to."""
    match = _SIZE.search(head)
    return int(match[1]) if match else 0


def _pointers_in(folder: str) -> list[int]:
    """The sizes of the files that the Git LFS pointers in a folder refer to."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file() and entry.stat().st_size <= MAX_POINTER_BYTES:
                with open(entry.path, "rb") as file:
                    head = file.read(MAX_POINTER_BYTES)
                found += [_pointed_bytes(head)] if head.startswith(_LFS) else []
    return found


def _page(source: Source, head: bytes) -> AprError | None:
    """Detects a server response that was saved instead of the file: HTML, XML, JSON or a line of text."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    answer = head.decode("utf-8", "replace")
    if text[:16].lower().startswith(_PAGES):
        kind = "an XML answer" if text.startswith(b"<?xml") and b"<html" not in text.lower() else "an HTML page"
        title = _TITLE.search(answer)
        message = title[2] if title else ""
    elif text.startswith(b"{") and source.size <= _MAX_ANSWER_BYTES:
        kind, message = "a JSON answer", _error_in(source.read(0, source.size))
        if not message:
            return None
    elif source.size <= 512 and source.path.lower().endswith(_MODELS) and _is_text(answer):
        kind, message = "a line of text", answer.strip()
    else:
        return None
    quoted = f": {message[:120]!r}" if message else ""
    return UnknownFormatError(
        f"{kind} that a server sent instead of the file{quoted}", path=source.path, hint=_hint_for(message)
    )


def _is_text(answer: str) -> bool:
    return " " in answer.strip() and answer.isascii() and all(char.isprintable() or char.isspace() for char in answer)


def _error_in(raw: bytes) -> str:
    """The error in a server's JSON object; "" if it has none or is not JSON."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "errors", "message", "detail") if key in value), "")
        value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def _hint_for(message: str) -> str:
    denied = (
        "restricted", "gated", "401", "403", "unauthorized", "forbidden", "access", "sign in", "log in", "password",
    )  # fmt: skip
    if any(word in message.lower() for word in denied):
        return f"accept the model's terms on the hub and run hf auth login, then {_AGAIN}"
    return _AGAIN


def _archive(head: bytes, path: str) -> AprError | None:
    for offset, magic, what, program in _ARCHIVES:
        if head.startswith(magic, offset) and not (magic == _ZIP and path.endswith(_PICKLES)):
            packed = f"the file is {what}" if what.endswith("compressed") else what
            hint = f"unpack it first: {program} {shlex.quote(path)}"
            if program.endswith("-dc"):  # these programs refuse names without a suffix of theirs
                stem, suffix = os.path.splitext(path)
                target = stem if suffix in (".gz", ".zst", ".xz", ".bz2", ".lz4") else f"{stem}.unpacked{suffix}"
                hint += f" > {shlex.quote(target)}"
            return UnknownFormatError(f"{packed}, not a model", path=path, hint=hint)
    return None
