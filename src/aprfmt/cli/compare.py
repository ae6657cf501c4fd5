"""`apr diff`: compare two models; by value as a table, the worst tensor first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import BaseOption, ForceOption
from aprfmt.cli.output import as_text, out, pairs, printable, progress_bar, table, width, wrapped
from aprfmt.errors import UsageError
from aprfmt.text import first_few, format_bytes, plural

if TYPE_CHECKING:
    from aprfmt.inspection.comparison import Comparison, ModelDifference
    from aprfmt.inspection.distance import Distance

_MAX_DIFFERENCES = 40
_TOP = 20
_SIDES = ("red", "green")
_HEADER = ["tensor", "RMSE", "SNR/dB", "cosine", "A/bit", "B/bit"]


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, in any supported format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to compare with A, in any format.")],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Compare only tensors, by decoded value; worst first.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="With --values: maximum accepted difference.")
    ] = 0.0,
    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="With --values: show the N worst tensors; 0: all. [default: 20]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="With --values: write an HTML report, page.html."),
    ] = None,
    force: ForceOption = False,
    metadata_only: Annotated[bool, typer.Option("--metadata-only", help="Compare only the metadata.")] = False,
    base: BaseOption = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Worker threads; default: one per CPU.")] = None,
) -> int:
    """Compare two models. Exit status: 0 same, 1 different, 2 error.

    With --values, each tensor of B is compared with A: relative RMSE, SNR in dB, cosine, bits per weight.

    \b
    apr diff old.apr new.apr
    apr diff model.gguf model.apr --values
    apr diff model-f16.gguf model-q4_k_m.gguf --values --top 10 -o page.html
    """
    if top is not None and not values:
        raise UsageError("--top needs --values", hint="apr diff A B --values --top 10")
    with progress_bar("comparing") as progress:
        found = aprfmt.diff(
            a, b, values=values, tolerance=tolerance, metadata_only=metadata_only, base=base, threads=threads,
            output=output, force=force, progress=progress,
        )  # fmt: skip
    written = {"output": str(output)} if output is not None else {}
    out.result(found.to_json() | written, _comparison(found, _TOP if top is None else top, output))
    return 0 if found.identical else 1


def _comparison(found: Comparison, top: int, output: Path | None) -> Iterator[str]:
    ranked = {row.name for row in found.tensors or ()}
    rows = [row for row in found.differences if row.kind != "tensor" or row.name not in ranked]
    groups = _grouped(rows)
    for row, names in groups[:_MAX_DIFFERENCES]:
        more = f" and {plural(len(names), f'more {row.kind}')}" if names else ""
        detail, short = _difference_detail(row), f"{row.kind} {printable(row.name)}{more}"
        fits = not out.data_stream.isatty() or len(short) + len(detail) <= width()
        yield f"{out.style(row.kind, 'cyan')} {out.style(printable(row.name), 'bold')}{more}{detail if fits else ''}"
        yield from () if fits else wrapped(detail.removeprefix(": "), indent=2)
        yield from wrapped(printable(first_few(names)), indent=2) if names else ()
        sides = ["(absent)" if value is None else printable(as_text(value)) for value in (row.a, row.b)]
        if sides[0] != sides[1]:
            yield from (
                f"  {out.style(mark, style)} {side}" for mark, style, side in zip("-+", _SIDES, sides, strict=True)
            )
    if len(groups) > _MAX_DIFFERENCES:
        left = sum(1 + len(names) for _, names in groups[_MAX_DIFFERENCES:])
        yield f"… {left} more; --json lists all"
    yield from found.notes
    yield from _figures(found, top)
    if output is not None:
        yield from pairs([("wrote", str(output))], indent=0)
    n = found.tensors_compared
    counts = f", {plural(n, 'tensor')} compared" if n else ""
    n = len(found.differences)
    yield f"same{counts}" if found.identical else f"different: {plural(n, 'difference')}{counts}"


def _grouped(rows: Sequence[ModelDifference]) -> list[tuple[ModelDifference, list[str]]]:
    """The differences with the names of those that are equal, such as tensors that all change from F16 to Q8_0."""
    groups: dict[object, tuple[ModelDifference, list[str]]] = {}
    for row in rows:
        alike = row.distance is None and row.first_difference is None
        key = (row.kind, row.what, as_text(row.a), as_text(row.b)) if alike else id(row)
        if key in groups:
            groups[key][1].append(row.name)
        else:
            groups[key] = (row, [])
    return [*groups.values()]


def _difference_detail(row: ModelDifference) -> str:
    if (far := row.distance) is not None:
        text = f"{far.n_different:,} of {far.n_values:,} values, at most {far.max_diff:.3g} apart"
        return f": {row.what} ({text})"
    if row.first_difference is not None:
        return f": first at item {row.first_difference}"
    return f": {row.what}" if row.what is not None else ""


def _figures_of(distance: Distance) -> list[str]:
    from aprfmt.text import cosine, decibels, percent

    return [percent(distance.relative_rmse), decibels(distance.snr_db), cosine(distance.cosine)]


def _figures(found: Comparison, top: int) -> Iterator[str]:
    """A table of the worst tensors, the rest combined, and the total."""
    from aprfmt.inspection.distance import together

    rows = [row for row in found.tensors or () if not row.distance.is_zero]
    if not rows or found.total is None:
        return
    shown = rows[:top] if top else rows
    is_narrow = width() < 80

    def stored(dtype: str, bits: float) -> str:
        return f"{bits:.2f}" if is_narrow else f"{dtype} {bits:.2f}"

    cells = [
        [row.name, *_figures_of(row.distance), stored(row.a, row.bits_a), stored(row.b, row.bits_b)] for row in shown
    ]
    if rest := rows[len(shown) :]:
        cells.append([f"and {len(rest):,} more", *_figures_of(together(rest)), "", ""])
    total = found.total.distance
    bits = ["" if n is None else f"{n:.2f}" for n in (found.total.bits_a, found.total.bits_b)]
    lines = table(
        _HEADER,
        [*cells, [f"all {found.total.n_tensors:,}", *_figures_of(total), *bits]],
        indent=0,
        right=" ".join(_HEADER[1:]),
        spare="cosine",
    )
    at = len(cells) + 1  # behind the header
    yield from (*lines[:at], out.style(lines[at], "bold"), *lines[at + 1 :])
    sizes = ", ".join(f"{side} {format_bytes(n)}" for side, n in (("A", found.total.size_a), ("B", found.total.size_b)))
    absolute = (
        "" if total.nonfinite_different else f"RMSE of all weights {total.rmse:.4g} (relative to A in the table); "
    )
    yield from wrapped(f"{absolute}{sizes}")
    for row in [row for row in rows if row.distance.nonfinite_different][:_MAX_DIFFERENCES]:
        places = plural(row.distance.nonfinite_different, "place")
        where = "only one model has NaN or infinity; metrics cover the other values"
        yield out.style(f"{printable(row.name)}: in {places} {where}", "red")
