"""`apr hex`: annotates a file's header, metadata and index, or the blocks of a tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt import formats
from aprfmt.errors import AprError, UsageError
from aprfmt.inspection.hex.blocks import TensorDump, check_offset, dump_tensor
from aprfmt.inspection.hex.containers import container_of
from aprfmt.inspection.hex.spans import Section, Walk, take
from aprfmt.io.source import Source, is_file
from aprfmt.trust.signature import REQUIRED_SIGNER
from aprfmt.types import PathLike

_ENTRIES, _BLOCKS, _LINES = 16, 2, 16
_MOST_WIDTH = 64


@dataclass(frozen=True, slots=True)
class FileDump:
    """The shown part of a file.

    Attributes:
        file: its path.
        size_bytes: its size.
        format: the container; None if it is not supported.
        sections: in file order.
        lines: plain lines of bytes as (offset, bytes), if requested or nothing else is known.
        damage: what is wrong, as far as visible; the sections end where it stops the walk.
    """

    file: str
    size_bytes: int
    format: str | None
    sections: Sequence[Section]
    lines: Sequence[tuple[int, bytes]]
    damage: Sequence[AprError]

    def to_json(self) -> dict[str, object]:
        """The file's object in the JSON of `apr hex`."""
        return {
            "file": self.file,
            "size_bytes": self.size_bytes,
            "format": self.format,
            "sections": [section.to_json() for section in self.sections],
            "lines": [{"offset": offset, "bytes": data.hex()} for offset, data in self.lines],
            "damage": [error.to_json() for error in self.damage],
        }


@dataclass(frozen=True, slots=True)
class HexDump:
    """The result of `hex`; `to_json` is the object of `apr hex --json`.

    Attributes:
        file: the path as given.
        files: one entry per file of the model; empty if a tensor was requested.
        tensor: the requested tensor.
    """

    file: str
    files: Sequence[FileDump]
    tensor: TensorDump | None

    @property
    def damage(self) -> AprError | None:
        """The first thing that is wrong with a file."""
        return next((error for file in self.files for error in file.damage), None)

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract."""
        tensor = None if self.tensor is None else self.tensor.to_json()
        return {"file": self.file, "files": [file.to_json() for file in self.files], "tensor": tensor}


def hex(
    path: PathLike,
    *,
    tensor: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    width: int = 16,
    raw: bool = False,
) -> HexDump:
    """Annotates the bytes of the file at `path`: header, metadata and index, or the blocks of `tensor`.

    Reads only what it shows, plus the part of a header before it. A damaged file is shown up to the damage
    (`FileDump.damage`).

    Args:
        path: a file, or a model of several files, each of which is shown.
        tensor: name of a tensor: show its blocks with fields and values.
        offset: byte offset to start at, within the tensor if one is given.
        limit: maximum number of keys and tensors of each section, of blocks, or of lines; 0: all; None: 16 (2 blocks).
        width: bytes per line.
        raw: plain hex dump, of any file.

    Raises:
        UsageError: unknown tensor, or a number out of range.
    """
    for name, number, least, most in (("offset", offset, 0, None), ("width", width, 1, _MOST_WIDTH)):
        if type(number) is not int or number < least or (most is not None and number > most):
            raise UsageError(f"--{name} {number}", hint=f"a number from {least} to {most}" if most else "0 or more")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise UsageError(f"--limit {limit}", hint="0 or more; 0 shows everything")
    name = os.fspath(path)
    if tensor is not None:
        with formats.open_unchanged(path) as model:
            found = model.tensors[tensor]
            if raw:
                check_offset(found, offset)
                span = found.offset, found.offset + found.n_bytes
                lines = _lines(found.source, span[0] + offset, span[1], _LINES if limit is None else limit, width)
                return HexDump(name, [FileDump(found.source.path, found.source.size, None, [], lines, [])], None)
            shown = dump_tensor(found, offset, _limit_of(limit, found.dtype), width)
            return HexDump(name, [], shown)
    files = [_file(place, offset, limit, width, raw) for place in _files(path)]
    if offset and all(offset >= file.size_bytes for file in files):
        raise _past_the_end(offset, files[0].file, max(file.size_bytes for file in files))
    return HexDump(name, files, None)


def _limit_of(limit: int | None, dtype: str) -> int:
    from aprfmt.codecs.dtypes import DTYPES

    if limit is not None:
        return limit
    return _LINES if DTYPES[dtype].kind == "plain" or dtype == "AprQ8" else _BLOCKS


def _files(path: PathLike) -> list[str]:
    """The files to show: the named one, or those of a folder, an index or a manifest."""
    name = formats.path_text(path)
    if is_file(name) and not name.endswith(".json"):
        if os.environ.get(REQUIRED_SIGNER):
            from aprfmt.formats.signatures import check_required

            check_required(Path(name), formats.detect_any(name))
        return [name]
    with formats.open_unchanged(path) as model:
        return list(dict.fromkeys(source.path for source in model.sources))


def _file(path: str, offset: int, limit: int | None, width: int, raw: bool) -> FileDump:
    sections: list[Section] = []
    damage: list[AprError] = []
    with Source.open(path) as source:
        container = None if raw else container_of(source)
        if container is None:
            lines = _lines(source, offset, source.size, _LINES if limit is None else limit, width)
            return FileDump(path, source.size, None, [], lines, [])
        try:
            for step in container.walk(source):
                if not isinstance(step, Walk):
                    damage.append(step)
                    continue
                section, error = take(step, source, offset, _ENTRIES if limit is None else limit)
                sections.append(section)
                if error is not None:
                    raise error
        except AprError as error:
            error.path = error.path or path
            damage.append(error)
        source.check_unchanged()
        return FileDump(path, source.size, container.label, sections, [], damage)


def _past_the_end(offset: int, path: str, n_bytes: int) -> UsageError:
    return UsageError(f"--offset {offset} is past the end of the file", path=path, hint=f"the file has {n_bytes} bytes")


def _lines(source: Source, start: int, end: int, limit: int, width: int) -> list[tuple[int, bytes]]:
    if start > end or (start == end and start):
        raise _past_the_end(start, source.path, end)
    end = min(end, start + limit * width) if limit else end
    return [(at, source.read(at, min(width, end - at))) for at in range(start, end, width)]
