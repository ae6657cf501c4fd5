"""`apr tensors`: one row a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from aprfmt.cli.options import JsonOption, ModelArgument, QuietOption
from aprfmt.cli.output import out, table
from aprfmt.cli.progress import Bar
from aprfmt.errors import CorruptError, UnsupportedError
from aprfmt.model import Tensor
from aprfmt.text import format_bytes, format_shape


def command(
    file: ModelArgument,
    *,
    filter: Annotated[
        str | None,
        typer.Option("--filter", metavar="GLOB", help="Only names that match; without * or ?: contain it."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="At most N tensors; 0 is all.")
    ] = 0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Mean, deviation, range, NaN, infinities, zeros.")
    ] = False,
    hash: Annotated[bool, typer.Option("--hash", help="SHA-256 of the stored bytes.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the tensors: name, dtype, shape (row-major), offset, size.

    \b
    apr tensors model.gguf --filter '*attn_q*' --stats
    apr tensors model.apr --hash --json
    """
    from aprfmt.formats import open as open_model

    with open_model(file) as model:
        entries = model.tensors.entries
        chosen = [t for t in entries if filter is None or _matches(t.name, filter)]
        shown = chosen[:limit] if limit else chosen
        with Bar("reading") as bar:
            advance = (
                bar.progress(sum(t.n_bytes for t in shown)) if bar.progress and (stats or hash) else None
            )
            rows = []
            for tensor in shown:
                row = _row(tensor, stats, hash)
                if len(model.sources) > 1:  # an offset means nothing without its shard
                    row["file"] = Path(tensor.source.path).name
                rows.append(row)
                if advance:
                    advance(tensor.n_bytes, tensor.name)
        body = {
            "file": file,
            "format": model.label,
            "tensor_count": len(entries),
            "matched": len(chosen),
            "tensors": rows,
        }
        out.result(body, _text(rows, stats, hash))
        if len(shown) < len(chosen):
            out.hint(f"{len(shown)} of {len(chosen)} tensors shown; --limit 0 shows all")
        elif not shown and entries:
            out.hint(f"no tensor matches {filter!r}; without --filter all {len(entries)} are shown")


def _matches(name: str, pattern: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatchcase(name, pattern)
    return pattern in name


def _row(tensor: Tensor, stats: bool, hash: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "offset": tensor.offset,
        "size_bytes": tensor.n_bytes,
    }
    if stats:
        from aprfmt.inspection.stats import Stats, tensor_stats

        try:
            row |= tensor_stats(tensor).to_json()
        except (CorruptError, UnsupportedError) as error:  # one odd tensor does not hide the others
            row |= dict.fromkeys(Stats().to_json()) | {"stats_error": error.message}
    if hash:
        from aprfmt.inspection.stats import tensor_sha256

        row["sha256"] = tensor_sha256(tensor)
    return row


def _text(rows: Sequence[dict[str, Any]], stats: bool, hash: bool) -> list[str]:
    header = ["name", "dtype", "shape"]
    cells = [[r["name"], r["dtype"], format_shape(r["shape"])] for r in rows]
    if stats:
        notes = [_note(r) for r in rows]
        header += ["mean", "std", "min", "max", "zeros", *(["note"] if any(notes) else [])]
        for cell, r, note in zip(cells, rows, notes, strict=True):
            cell += [_figure(r[key]) for key in ("mean", "std", "min", "max")]
            cell.append("-" if r["zero_fraction"] is None else f"{r['zero_fraction']:.1%}")
            cell += [note] if any(notes) else []
    else:
        header += ["size", "offset"]
        for cell, r in zip(cells, rows, strict=True):
            cell += [format_bytes(r["size_bytes"]), str(r["offset"])]
    if hash:
        header.append("sha256")
        for cell, r in zip(cells, rows, strict=True):
            cell.append(r["sha256"] if not out.data_stream.isatty() else r["sha256"][:12])
    return table(header, cells, right="size offset mean std min max zeros", indent=0)


def _note(row: dict[str, Any]) -> str:
    if "stats_error" in row:
        return "not decoded: " + str(row["stats_error"])
    counts = (("nan_count", "NaN"), ("inf_count", "inf"))
    return ", ".join(f"{row[key]:,} {word}" for key, word in counts if row[key])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
