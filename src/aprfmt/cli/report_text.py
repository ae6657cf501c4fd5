"""Reports and plans of conversions, as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from aprfmt.cli.output import out, pairs, printable, table, width
from aprfmt.text import first_few, format_bytes, format_count, format_seconds, format_shape

if TYPE_CHECKING:
    from aprfmt.convert.report import PlannedTensor, Report

_SHOWN_FILES = 6
_WIDE = 100
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")


def done_text(report: Report) -> Iterator[str]:
    """The report of a conversion: one line per property."""
    rate = f", {format_bytes(report.output_bytes / report.seconds)}/s" if report.seconds > 0 else ""
    yield f"{out.style('wrote', 'green')} {out.style(printable(report.output), 'bold')}"
    rows = [*_facts(report), ("time", f"{format_seconds(report.seconds)}{rate}")]
    if (found := report.verify) and "loaded" in found:
        text = f"loads in llama.cpp ({found['engine']}), {found['vocab_size']:,} tokens, "
        if "text" in found:
            text += f"continues with {found['text'].strip()!r}"
        else:
            text += f"embeds a sentence in {found['embedding_size']:,} dimensions"
        rows.append(("verified", text))
    if found and (logits := found.get("logits")):
        text = f"{logits['what']} of {logits['tokens']} tokens: {logits['engine']} differs from "
        text += f"{logits['source_engine']} by {logits['relative_error']:.2g} (relative; limit {logits['limit']:.2g})"
        rows.append(("compared", text))
    yield from pairs(rows)
    yield from _groups(report)


def _groups(report: Report) -> Iterator[str]:
    """The types chosen for a target, by role and layers."""
    if report.groups:
        header = ["role", "layers", "types", "bits", "error", "share", "size"]
        body = [
            [
                row["role"], row["layers"], ", ".join(f"{name} {n}" for name, n in row["dtypes"].items()),
                f"{row['bits_per_weight']:.2f}", f"{row['error']:.2g}", f"{row['share']:.1%}",
                format_bytes(row["size_bytes"]),
            ]
            for row in report.groups
        ]  # fmt: skip
        yield from ("", *table(header, body, right="bits error share size", spare="layers error", indent=0))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    dtypes = ", ".join(f"{name} {row['tensors']}" for name, row in report.dtypes.items())
    yield "format", report.label
    yield "architecture", report.architecture or "(unknown)"
    if report.signature is not None:
        yield "source", report.signature
    yield "tensors", f"{report.tensor_count:,} ({dtypes})" if dtypes else f"{report.tensor_count:,}"
    bits = f", {report.bits_per_weight:.2f} bits per weight" if report.bits_per_weight else ""
    yield "size", f"{format_bytes(report.output_bytes)} from {format_bytes(report.input_bytes)}{bits}"
    if report.written:
        sizes = (f"{name} ({format_bytes(n)})" for name, n in report.written.items())
        yield "files", f"{len(report.written)}: {first_few(sizes, _SHOWN_FILES)}"
    yield "parameters", format_count(report.param_count or 0)
    if report.predicted_kl is not None:
        measured = f", measured {report.measured_kl:.4g} in round {report.rounds}" if report.measured_kl else ""
        yield "KL divergence", f"predicted {report.predicted_kl:.4g} nats per token{measured}"
    if report.lossless:
        proven = "yes, proven: every file matches the digest recorded at import"
        yield "lossless", proven if report.proven else "yes: the source can be restored byte for byte"
    elif report.losses:
        yield "losses", "; ".join(report.losses)
    else:
        yield "losses", "none in the weights; the source files cannot be restored byte for byte"


def plan_text(report: Report) -> Iterator[str]:
    """The tensors to be written, layers grouped; then the summary, last so that it stays on screen."""
    if report.tensors:
        header = ["tensor", "*", "dtype", "shape", "count", "size"]
        yield from (*table(header, _folded(report.tensors), right="count size", spare="count size shape"), "")
    name = out.style(printable(report.output), "bold")
    yield f"{out.style('plan', 'cyan')} for {name}; nothing is written"
    yield from pairs([*_facts(report), ("memory", format_bytes(report.memory_bytes))])
    yield from _groups(report)


def _folded(tensors: Sequence[PlannedTensor]) -> list[list[str]]:
    """Rows of a plan: tensors whose names differ only in numbers, with equal dtype and shape, share a row.

    `*` replaces the numbers that differ; the column `*` lists the values of the first one.
    """
    from aprfmt.inspection.tree import ranges

    most = 3 if out.data_stream.isatty() and width() < _WIDE else 6
    names: dict[str, dict[object, list[PlannedTensor]]] = {}
    for tensor in tensors:
        kinds = names.setdefault(_NUMBER.sub("*", tensor["name"]), {})
        kinds.setdefault((tensor["dtype"], *tensor["shape"]), []).append(tensor)
    rows = []
    for same in chain.from_iterable(kinds.values() for kinds in names.values()):
        numbers = [set(column) for column in zip(*(_NUMBER.findall(tensor["name"]) for tensor in same), strict=True)]
        words = [min(column) if len(column) == 1 else "*" for column in numbers]
        name = "".join(chain(*zip_longest(_NUMBER.split(same[0]["name"]), words, fillvalue="")))
        first = next((ranges(sorted(map(int, column)), most) for column in numbers if len(column) > 1), "")
        size = format_bytes(sum(tensor["size_bytes"] for tensor in same))
        rows.append([name, first, same[0]["dtype"], format_shape(same[0]["shape"]), f"{len(same):,}", size])
    return rows
