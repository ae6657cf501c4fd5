"""`apr inspect`: what a file is, in one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import JsonOption, ModelArgument, QuietOption
from aprfmt.cli.output import out, pairs, printable, table
from aprfmt.text import format_bytes, format_count, format_shape

if TYPE_CHECKING:
    from aprfmt.codecs.pieces import DtypeTotals
    from aprfmt.inspection.describe import Inspection, Quality, TokenizerInfo

_IDENTITY = ("name", "description", "author", "version", "source", "original_format", "created_at")
_PROVENANCE = (("license", "license"), ("data_source", "data source"), ("data_license", "data license"))


def command(
    file: ModelArgument,
    *,
    vocab: Annotated[bool, typer.Option("--vocab", help="List the tokens with their ids.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="List the tensors.")] = False,
    quality: Annotated[
        bool, typer.Option("--quality", help="Score how completely the file documents itself.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a model file is: container, dimensions, dtypes, tokenizer, provenance.

    \b
    apr inspect model.gguf
    apr inspect model.apr --quality --json
    """
    from aprfmt.inspection.describe import inspect

    found = inspect(file, vocab=vocab, weights=weights, quality=quality)
    out.result(found.to_json(), _text(found))


def _text(found: Inspection) -> Iterator[str]:
    yield out.style(printable(found.file), "bold")
    yield from pairs(_summary(found))
    yield from _network(found.metadata)
    if found.dtypes:
        yield from ("", out.style("Weights", "bold"), *_dtypes(found.dtypes))
    yield from ("", out.style("Tokenizer", "bold"), *pairs(_tokenizer(found.tokenizer)))
    yield from ("", out.style("Provenance", "bold"), *pairs(_provenance(found.metadata)))
    if found.quality is not None:
        yield from _quality(found.quality)
    if found.tensors is not None:
        rows = [[t.name, t.dtype, format_shape(t.shape), format_bytes(t.n_bytes)] for t in found.tensors]
        yield from ("", *table(["tensor", "dtype", "shape", "size"], rows, right="size"))
    if found.vocabulary:
        tokens = [[str(i), repr(token)] for i, token in enumerate(found.vocabulary)]
        yield from ("", *table(["id", "token"], tokens, right="id"))


def _summary(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "format", f"{found.format}, {format_bytes(found.size_bytes)}"
    yield "tensors", f"{found.tensor_count:,} ({format_count(found.param_count)} parameters)"
    if set(found.checksum.values()) != {"none"}:
        words = {"unchecked": "not checked (large file; apr validate checks it)"}
        yield (
            "checksum",
            ", ".join(f"{part} {words.get(state, state)}" for part, state in found.checksum.items()),
        )
    if flags := [name for name, value in found.flags.items() if value]:
        yield "flags", ", ".join(flags)
    if found.format.startswith("APR v2"):
        reasons = "; ".join(found.compat.reasons)
        yield "reference apr", "can run it" if found.compat.reference_runtime else f"cannot run it: {reasons}"
    for warning in found.warnings:
        yield "note", warning


def _network(metadata: Mapping[str, object]) -> Iterator[str]:
    from aprfmt.inspection.describe import DIMS

    dims = [f"{label} {_number(metadata[key])}" for key, label in DIMS if metadata.get(key) is not None]
    classes = [str(metadata[key]) for key in ("hf_architecture", "hf_model_type") if metadata.get(key)]
    name = metadata.get("architecture")
    if not (dims or name):
        return
    rows = [("architecture", f"{name or '(unknown)'}" + (f" ({', '.join(classes)})" if classes else ""))]
    rows += [("dimensions", ", ".join(dims))] if dims else []
    yield from ("", out.style("Network", "bold"), *pairs(rows))


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _dtypes(dtypes: Mapping[str, DtypeTotals]) -> list[str]:
    total = sum(row["bytes"] for row in dtypes.values())
    rows = [
        [
            name,
            f"{row['tensors']:,}",
            format_count(row["params"]),
            format_bytes(row["bytes"]),
            f"{row['bytes'] / total:.1%}" if total else "",
            f"{8 * row['bytes'] / row['params']:.2f}" if row["params"] else "",
        ]
        for name, row in dtypes.items()
    ]
    header = ["dtype", "tensors", "params", "size", "share", "bits/weight"]
    return table(header, rows, right="tensors params size share bits/weight")


def _tokenizer(info: TokenizerInfo | None) -> Iterator[tuple[str, str]]:
    if info is None:
        yield "model", "(none embedded)"
        return
    yield "model", info.model + (f", pre-tokenizer {info.pre}" if info.pre else "")
    counts = f"{info.vocab_size:,} tokens"
    counts += f", {info.merges:,} merges" if info.merges else ""
    yield "vocabulary", counts + (f", {info.added:,} added" if info.added else "")
    ids = {"bos": info.bos_id, "eos": info.eos_id, "pad": info.pad_id, "unk": info.unk_id}
    yield "special ids", ", ".join(f"{role} {i}" for role, i in ids.items() if i is not None) or "(none)"
    yield "chat template", "yes" if info.chat_template else "no"


def _provenance(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key in _IDENTITY:
        if metadata.get(key):
            yield key.replace("_", " "), str(metadata[key])
    for key, label in _PROVENANCE:
        yield label, str(metadata.get(key) or "(missing)")


def _quality(quality: Quality) -> Iterator[str]:
    from aprfmt.inspection.describe import QUALITY_THRESHOLD

    verdict = "ready to ship" if quality.score >= QUALITY_THRESHOLD else f"below {QUALITY_THRESHOLD}"
    yield from ("", out.style(f"Quality {quality.score} of 100 ({verdict})", "bold"))
    for name, part in quality.breakdown.items():
        yield from pairs([(f"{name} {part.points}/{part.max}", f"based on {part.looked_at}")], label=18)
        if part.missing:
            yield from pairs([("", "missing: " + "; ".join(part.missing))], label=18)
