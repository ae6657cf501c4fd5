"""`apr hex`: the annotated bytes of a model file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.complete import complete_tensor
from aprfmt.cli.options import ModelArgument
from aprfmt.cli.output import as_text, out, pairs, printable, shorten, width
from aprfmt.errors import UsageError
from aprfmt.text import format_bytes, format_shape, plural

if TYPE_CHECKING:
    from aprfmt.inspection.hex.blocks import HexBlock, TensorDump
    from aprfmt.inspection.hex.run import FileDump, HexDump
    from aprfmt.inspection.hex.spans import Section, Span

_BYTES, _WIDE, _WIDE_RAW = 16, 100, 76
"""Bytes of a line, and the columns that these take beside their meaning and beside their text; half of it on fewer."""

_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|\d{1,19}")


def hex(
    file: ModelArgument,
    *,
    tensor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show this tensor's blocks: bytes, fields, codes, values.",
            autocompletion=complete_tensor,
        ),
    ] = None,
    offset: Annotated[
        str,
        typer.Option(metavar="N", help="Start at this byte offset, within the tensor if given; hex allowed (0x10)."),
    ] = "0",
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Show N keys, tensors, lines or blocks; 0: all. [default: 16, blocks 2]"),
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(
            "--width", metavar="N", min=1, max=64, help="Bytes per line. [default: 16, or 8 in a narrow terminal]"
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print a plain hex dump of any file.")] = False,
) -> int:
    """Annotate the bytes of a model file: header, metadata, index; or decode the blocks of a tensor.

    A damaged file is shown up to the damage. Exit status: 0, or that of the error found.

    \b
    apr hex model.gguf
    apr hex model.safetensors --limit 0
    apr hex model.gguf --tensor blk.0.attn_q.weight --limit 1
    apr hex model.apr --raw --offset 0x40 --limit 8
    """
    if _NUMBER.fullmatch(offset) is None:
        raise UsageError(f"--offset {offset!r} is not a byte offset", hint="4096, or 0x1000")
    if columns is None:
        columns = _BYTES if out.mode == "json" or width() >= (_WIDE_RAW if raw else _WIDE) else _BYTES // 2
    start = int(offset, 16 if offset[:2].lower() == "0x" else 10)
    found = aprfmt.hex(file, tensor=tensor, offset=start, limit=limit, width=columns, raw=raw)
    damage = found.damage
    if damage is None or out.mode != "json":
        out.result(found.to_json(), _text(found, columns, raw))
    if found.tensor is not None:
        shown = sum(block.index >= 0 for block in found.tensor.blocks)
        if shown < found.tensor.n_blocks:
            noun = "line" if not found.tensor.formula or found.tensor.dtype == "AprQ8" else "block"
            out.hint(f"{shown:,} of {plural(found.tensor.n_blocks, noun)} shown; --limit 0 shows all, --offset others")
    if damage is None:
        return 0
    out.failure(damage, found.to_json())
    return damage.exit_code


def _text(found: HexDump, columns: int, raw: bool) -> Iterator[str]:
    if found.tensor is not None:
        yield from _format_tensor(found.tensor, columns)
    for i, file in enumerate(found.files):
        yield from ([""] if i else [])
        yield from _file(file, columns, raw)


def _file(file: FileDump, columns: int, raw: bool) -> Iterator[str]:
    what = file.format or ("bytes" if raw else "unknown container, shown as bytes")
    yield f"{out.style(printable(file.file), 'bold')}  {what}, {format_bytes(file.size_bytes)}"
    digits = len(f"{file.size_bytes:x}")
    for offset, data in file.lines:
        text = "".join(chr(c) if 32 <= c < 127 else "." for c in data)
        yield f"{_at(offset, digits)}  {data.hex(' '):<{3 * columns - 1}}  {text}"
    for section in file.sections:
        yield from _section(section, columns, digits)


def _section(section: Section, columns: int, digits: int) -> Iterator[str]:
    count = "" if section.name in ("header", "data") else f"  {plural(section.count, section.label)}"
    left = section.count - len(section.entries)
    count += f", {len(section.entries):,} shown" if count and left > 0 else ""
    yield out.style(f"{section.name}{count}", "cyan")
    for entry in section.entries:
        for span in entry:
            yield _span(span, columns, digits)


def _span(span: Span, columns: int, digits: int) -> str:
    some = span.data[:columns]
    stored = some.hex(" ") if span.n_bytes <= columns else span.data[: columns - 1].hex(" ") + " …"
    value = "" if span.value is None else printable(as_text(span.value))
    size = f"{span.n_bytes:,} bytes" if span.value is None else ""
    words = "  ".join(part for part in (value, size, printable(span.meaning)) if part)
    line = f"{_at(span.offset, digits)}  {stored:<{3 * columns - 1}}  {span.name:<14}  {words}"
    return shorten(line, width()) if out.data_stream.isatty() else line


def _at(offset: int, digits: int) -> str:
    return f"{offset:0{max(6, digits)}x}"


def _format_tensor(found: TensorDump, columns: int) -> Iterator[str]:
    yield out.style(printable(found.name), "bold")
    where = f"{found.offset:,} to {found.offset + found.n_bytes:,}"
    rows = [
        ("file", found.file + (" (offsets in the decompressed data)" if found.in_memory else "")),
        ("stored as", f"{found.dtype} {format_shape(found.shape)}, {format_bytes(found.n_bytes)}, bytes {where}"),
    ]
    if found.formula:
        each = f"{plural(found.n_blocks, 'block')} of {found.block_bytes} bytes for {found.block_values} values"
        rows += [("blocks", each), ("formula", found.formula)]
    yield from pairs(rows, indent=0, label=9)
    digits = len(f"{found.offset + found.n_bytes:x}")
    for block in found.blocks:
        if found.formula and block.parts and block.index >= 0:
            yield from _block(block, columns, digits)
            continue
        scale = [number for part in block.parts for number in part.values.get("scale", ())]
        name = "scale" if scale else ""
        yield from _beside(block.offset, block.data, name, scale or block.values or (), columns, digits)


def _block(block: HexBlock, columns: int, digits: int) -> Iterator[str]:
    n = len(block.values) if block.values is not None else 0
    span = f", values {block.first:,} to {block.first + n - 1:,}" if n else ""
    yield out.style(f"block {block.index:,}{span}", "cyan")
    for part in block.parts:
        numbers = part.values if block.codes is None or not part.name.startswith("q") else {}
        if part.name == "hmask":
            numbers = {}
        lists = list(numbers.items())
        name, first = lists[0] if lists else (part.name, ())
        yield from _beside(block.offset + part.offset, part.data, part.name, first, columns, digits)
        for name, more in lists[1:]:
            yield from _paragraph(name, more, max(6, digits) + 3 * columns + 3)
    if block.codes is not None:
        yield from _paragraph("codes", block.codes, 0)
    if block.values is not None:
        yield from _paragraph("values", block.values, 0)


def _beside(offset: int, data: bytes, name: str, numbers: Sequence[object], columns: int, digits: int) -> Iterator[str]:
    """Lines of bytes, and what they mean beside them."""
    lines = [data[i : i + columns] for i in range(0, len(data), columns)]
    label = f"{name:<8} " if name else ""
    room = max(12, width() - max(6, digits) - 3 * columns - 3 - len(label))
    for i, (part, words) in enumerate(zip_longest(lines, _wrapped(numbers, room))):
        at = _at(offset + i * columns, digits) if part is not None else " " * max(6, digits)
        stored = part.hex(" ") if part is not None else ""
        yield f"{at}  {stored:<{3 * columns - 1}}  {label if i == 0 else ' ' * len(label)}{words or ''}".rstrip()


def _paragraph(name: str, numbers: Sequence[object], indent: int) -> Iterator[str]:
    for i, line in enumerate(_wrapped(numbers, max(12, width() - indent - 9))):
        yield " " * indent + f"{name if i == 0 else '':<8} {line}"


def _wrapped(numbers: Sequence[object], room: int) -> list[str]:
    """Numbers as text, as many on a line as fit."""
    lines: list[str] = []
    for number in numbers:
        word = f"{number:.5g}" if isinstance(number, float) else str(number)
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
