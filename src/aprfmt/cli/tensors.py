"""`apr tensors`: one row per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

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
        typer.Option(
            "--filter",
            metavar="GLOB",
            help="Only names that match; without wildcards: names that contain it.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="At most N tensors; 0: all.")] = 0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Add mean, deviation, range, NaN, infinity and zero counts.")
    ] = False,
    hash: Annotated[bool, typer.Option("--hash", help="Add the SHA-256 of the stored bytes.")] = False,
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
        # An offset means nothing without its shard.
        sharded = len(model.sources) > 1
        with Bar("reading") as bar:
            reads = bar.progress if stats or hash else None
            advance = reads(sum(t.n_bytes for t in shown)) if reads else None
            rows = []
            for tensor in shown:
                rows.append(_row(tensor, stats=stats, hash=hash, sharded=sharded))
                if advance:
                    advance(tensor.n_bytes, tensor.name)
        body = {
            "file": file,
            "format": model.label,
            "tensor_count": len(entries),
            "matched": len(chosen),
            "tensors": [row.to_json() for row in rows],
        }
        out.result(body, _text(rows))
        if len(shown) < len(chosen):
            out.hint(f"{len(shown)} of {len(chosen)} tensors shown; --limit 0 shows all")
        elif not shown and entries:
            out.hint(f"no tensor matches {filter!r}; without --filter all {len(entries)} are shown")


def _matches(name: str, pattern: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatchcase(name, pattern)
    return pattern in name


@dataclass(frozen=True, slots=True)
class _Row:
    tensor: Tensor
    file: str | None
    stats: Mapping[str, float | None] | None
    error: str | None
    sha256: str | None

    def to_json(self) -> dict[str, object]:
        t = self.tensor
        row: dict[str, object] = {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}
        row |= {"offset": t.offset, "size_bytes": t.n_bytes, **(self.stats or {})}
        more = {"stats_error": self.error, "sha256": self.sha256, "file": self.file}
        return row | {key: value for key, value in more.items() if value is not None}


def _row(tensor: Tensor, *, stats: bool, hash: bool, sharded: bool) -> _Row:
    figures, error, digest = None, None, None
    if stats:
        from aprfmt.inspection.stats import Stats, tensor_stats

        try:
            figures = tensor_stats(tensor).to_json()
        except (CorruptError, UnsupportedError) as caught:  # one odd tensor does not hide the others
            figures, error = dict.fromkeys(Stats().to_json()), caught.message
    if hash:
        from aprfmt.io.pipe import sha256_of_range

        digest = sha256_of_range(tensor.source, tensor.offset, tensor.n_bytes)
    return _Row(tensor, Path(tensor.source.path).name if sharded else None, figures, error, digest)


def _text(rows: Sequence[_Row]) -> list[str]:
    columns = {
        "name": [row.tensor.name for row in rows],
        "dtype": [row.tensor.dtype for row in rows],
        "shape": [format_shape(row.tensor.shape) for row in rows],
    }
    figures = [row.stats for row in rows if row.stats is not None]
    if figures:
        for key in ("mean", "std", "min", "max"):
            columns[key] = ["-" if (value := stats[key]) is None else f"{value:.3g}" for stats in figures]
        zeros = [stats["zero_fraction"] for stats in figures]
        columns["zeros"] = ["-" if share is None else f"{share:.1%}" for share in zeros]
        notes = [_note(row) for row in rows]
        columns |= {"note": notes} if any(notes) else {}
    else:
        columns["size"] = [format_bytes(row.tensor.n_bytes) for row in rows]
        columns["offset"] = [str(row.tensor.offset) for row in rows]
    digests = [row.sha256 for row in rows if row.sha256 is not None]
    if digests:
        columns["sha256"] = [digest[:12] for digest in digests] if out.data_stream.isatty() else digests
    cells = list(zip(*columns.values(), strict=True))
    return table(list(columns), cells, right="size offset mean std min max zeros", indent=0)


def _note(row: _Row) -> str:
    if row.error is not None:
        return f"not decoded: {row.error}"
    counts = (("nan_count", "NaN"), ("inf_count", "inf"))
    found = ((row.stats[key], word) for key, word in counts) if row.stats else ()
    return ", ".join(f"{n:,} {word}" for n, word in found if n)
