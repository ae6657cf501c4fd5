"""Layers against kinds of tensors, and histograms of many layers in one picture, as inline SVG."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aprfmt.html.page import text
from aprfmt.text import format_number

STYLE = """
figure.wide{overflow-x:auto;margin-bottom:14px}figure.wide svg{min-width:720px}figure.wide svg text{font-size:11px}
.cell{stroke:var(--card);stroke-width:.6}.none{fill:var(--grid)}
.picture{image-rendering:pixelated}.frame{fill:none;stroke:var(--line);vector-effect:non-scaling-stroke}
""" + "".join(f".f{n}{{fill:var(--c{n})}}figcaption i.k{n}{{background:var(--c{n})}}" for n in range(4))

_WIDTH, _LABELS, _ROW = 800.0, 210.0, 17.0
_INK = (72, 124, 245)  # readable on light and dark
_LABEL_CHARS = 33


@dataclass(frozen=True, slots=True)
class Cell:
    """One square: how strong its colour is (0 to 1; None: no such tensor), which colour, words on hover."""

    strength: float | None
    words: str = ""
    colour: int = 0


def heat_map(
    title: str, rows: Sequence[tuple[str, Sequence[Cell]]], columns: Sequence[str], legend: str = ""
) -> str:
    """A square a row and column; the caption of every few columns is written below."""
    if not rows or not columns:
        return ""
    size = (_WIDTH - _LABELS) / len(columns)
    height = _ROW * len(rows) + 22
    body = "".join(part for i, row in enumerate(rows) for part in _row(i * _ROW, row, size))
    every = -(-len(columns) // 16)
    for i in range(0, len(columns), every):
        at = _LABELS + (i + 0.5) * size
        body += f'<text x="{at:.1f}" y="{height - 7:g}" text-anchor="middle">{text(columns[i])}</text>'
    return (
        f'<figure class="wide"><figcaption><b>{text(title)}</b>{legend}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{text(title)}">{body}</svg></figure>'
    )


def _row(top: float, row: tuple[str, Sequence[Cell]], size: float) -> Iterator[str]:
    name, cells = row
    if len(name) > _LABEL_CHARS:
        name = "…" + name[1 - _LABEL_CHARS :]
    yield f'<text x="{_LABELS - 8:g}" y="{top + 12:g}" text-anchor="end">{text(name)}</text>'
    for i, cell in enumerate(cells):
        place = f'x="{_LABELS + i * size:.1f}" y="{top:g}" width="{size:.1f}" height="{_ROW:g}"'
        if cell.strength is None:
            yield f'<rect class="cell none" {place}/>'
            continue
        opacity = 0.12 + 0.88 * min(1.0, max(0.0, cell.strength))
        yield (
            f'<rect class="cell f{cell.colour}" fill-opacity="{opacity:.2f}" {place}>'
            f"<title>{text(cell.words)}</title></rect>"
        )


def legend(names: Sequence[tuple[str, int, float]]) -> str:
    """What colours mean: (words, colour, strength)."""
    return "".join(
        f'<span><i class="dot k{colour}" style="opacity:{0.12 + 0.88 * strength:.2f}"></i>{text(words)}</span>'
        for words, colour, strength in names
    )


def histograms(title: str, rows: Sequence[Sequence[float]], reach: float, labels: tuple[str, str]) -> str:
    """A line of pixels a row, from -reach to reach, as dark as its bins are full; `labels` of first and last row."""
    if not rows or not rows[0]:
        return ""
    height = min(170.0, max(26.0, 7.0 * len(rows)))
    left, right = 50.0, 392.0
    picture = base64.b64encode(_png(rows)).decode()
    body = (
        f'<image class="picture" x="{left:g}" y="4" width="{right - left:g}" height="{height:g}" '
        f'preserveAspectRatio="none" href="data:image/png;base64,{picture}"/>'
        f'<rect class="frame" x="{left:g}" y="4" width="{right - left:g}" height="{height:g}"/>'
        f'<text x="{left - 6:g}" y="14" text-anchor="end">{text(labels[0])}</text>'
    )
    if len(rows) > 1:
        body += f'<text x="{left - 6:g}" y="{height + 3:g}" text-anchor="end">{text(labels[1])}</text>'
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        words = format_number((2 * share - 1) * reach).replace("-", "\N{MINUS SIGN}")
        at = left + share * (right - left)
        body += f'<text x="{at:g}" y="{height + 19:g}" text-anchor="{anchor}">{text(words)}</text>'
    return (
        f"<figure><figcaption><b>{text(title)}</b></figcaption>"
        f'<svg viewBox="0 0 400 {height + 24:g}" role="img" aria-label="{text(title)}">{body}</svg></figure>'
    )


def _png(rows: Sequence[Sequence[float]]) -> bytes:
    """A PNG (ISO/IEC 15948) of one ink, transparent where a bin is empty; each row against its fullest bin."""
    lines = bytearray()
    for row in rows:
        top = max(row) or 1.0
        lines.append(0)  # no filter
        for value in row:
            lines += bytes((*_INK, round(255 * (max(0.0, value) / top) ** 0.5)))
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(lines), 9)), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
