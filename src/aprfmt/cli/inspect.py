"""`apr inspect`: what a file is, in one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from aprfmt.cli.options import JsonOption, ModelArgument, QuietOption
from aprfmt.cli.output import out, pairs, printable, table
from aprfmt.text import format_bytes, format_count, format_shape

_DIMS = (
    *(("num_layers", "layers"), ("hidden_size", "hidden"), ("intermediate_size", "feed-forward")),
    *(("num_heads", "heads"), ("num_kv_heads", "kv heads"), ("head_dim", "head dim")),
    *(("vocab_size", "vocabulary"), ("max_position_embeddings", "context")),
    *(("num_experts", "experts"), ("num_experts_per_tok", "experts used")),
    *(("rope_theta", "rope theta"), ("rms_norm_eps", "norm eps")),
)
_IDENTITY = ("name", "description", "author", "version", "source", "original_format", "created_at")
_PROVENANCE = (("license", "license"), ("data_source", "data source"), ("data_license", "data license"))


def command(
    file: ModelArgument,
    *,
    vocab: Annotated[bool, typer.Option("--vocab", help="List the tokens with their ids.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="List the tensors.")] = False,
    quality: Annotated[
        bool, typer.Option("--quality", help="Score how completely the file describes itself.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a model file is: container, dims, dtypes, tokenizer, provenance.

    \b
    apr inspect model.gguf
    apr inspect model.apr --quality --json
    """
    from aprfmt.inspection.describe import inspect

    body = inspect(file, vocab=vocab, weights=weights, quality=quality).to_json()
    out.result(body, _text(body))


def _text(body: Mapping[str, Any]) -> Iterator[str]:
    yield out.style(printable(str(body["file"])), "bold")
    yield from pairs(_summary(body))
    yield from _network(body["metadata"])
    if body["dtypes"]:
        yield from ("", out.style("Weights", "bold"))
        yield from _dtypes(body)
    yield from ("", out.style("Tokenizer", "bold"), *pairs(_tokenizer(body["tokenizer"])))
    yield from ("", out.style("Provenance", "bold"), *pairs(_provenance(body["metadata"])))
    if "quality" in body:
        yield from _quality(body["quality"])
    if "tensors" in body:
        rows = [
            [t["name"], t["dtype"], format_shape(t["shape"]), format_bytes(t["size_bytes"])]
            for t in body["tensors"]
        ]
        yield from ("", *table(["tensor", "dtype", "shape", "size"], rows, right="size"))
    if body.get("vocabulary"):
        tokens = [[str(i), repr(token)] for i, token in enumerate(body["vocabulary"])]
        yield from ("", *table(["id", "token"], tokens, right="id"))


def _summary(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "format", f"{body['format']}, {format_bytes(body['size_bytes'])}"
    yield "tensors", f"{body['tensor_count']:,} ({format_count(body['param_count'])} parameters)"
    sums = body["checksum"]
    if set(sums.values()) != {"none"}:
        words = {"unchecked": "not checked (big file: apr validate does)", "absent": "absent", "none": "none"}
        yield "checksum", ", ".join(f"{part} {words.get(state, state)}" for part, state in sums.items())
    flags = [name for name, value in body["flags"].items() if value]
    if flags:
        yield "flags", ", ".join(flags)
    compat = body["compat"]
    if body["format"].startswith("APR v2"):
        yield (
            "reference apr",
            "runs it as it is"
            if compat["reference_runtime"]
            else "cannot run it: " + "; ".join(compat["reasons"]),
        )
    for warning in body["warnings"]:
        yield "note", warning


def _network(metadata: Mapping[str, Any]) -> Iterator[str]:
    dims = [f"{label} {_number(metadata[key])}" for key, label in _DIMS if metadata.get(key) is not None]
    classes = [metadata[key] for key in ("hf_architecture", "hf_model_type") if metadata.get(key)]
    name = metadata.get("architecture")
    if not (dims or name):
        return
    yield from ("", out.style("Network", "bold"))
    yield from pairs(
        [("architecture", f"{name or '(unknown)'}" + (f" ({', '.join(classes)})" if classes else ""))]
    )
    yield from pairs([("dims", ", ".join(dims))] if dims else [])


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _dtypes(body: Mapping[str, Any]) -> list[str]:
    total = sum(row["bytes"] for row in body["dtypes"].values())
    rows = [
        [
            name,
            f"{row['tensors']:,}",
            format_count(row["params"]),
            format_bytes(row["bytes"]),
            f"{row['bytes'] / total:.1%}" if total else "",
            f"{8 * row['bytes'] / row['params']:.2f}" if row["params"] else "",
        ]
        for name, row in body["dtypes"].items()
    ]
    header = ["dtype", "tensors", "params", "size", "share", "bits/weight"]
    return table(header, rows, right="tensors params size share bits/weight")


def _tokenizer(info: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if info is None:
        yield "model", "(none embedded)"
        return
    yield "model", info["model"] + (f", pre-tokenizer {info['pre']}" if info["pre"] else "")
    counts = f"{info['vocab_size']:,} tokens"
    counts += f", {info['merges']:,} merges" if info["merges"] else ""
    yield "vocabulary", counts + (f", {info['added']:,} added" if info["added"] else "")
    ids = [
        f"{role} {info[role + '_id']}"
        for role in ("bos", "eos", "pad", "unk")
        if info[role + "_id"] is not None
    ]
    yield "special ids", ", ".join(ids) or "(none)"
    yield "chat template", "yes" if info["chat_template"] else "no"


def _provenance(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _IDENTITY:
        if metadata.get(key):
            yield key.replace("_", " "), str(metadata[key])
    for key, label in _PROVENANCE:
        yield label, str(metadata.get(key) or "(missing)")


def _quality(quality: Mapping[str, Any]) -> Iterator[str]:
    verdict = "ready to ship" if quality["ship_ready"] else f"below {quality['threshold']}"
    yield from ("", out.style(f"Quality {quality['score']} of 100 ({verdict})", "bold"))
    for name, row in quality["breakdown"].items():
        yield from pairs(
            [(f"{name} {row['points']}/{row['max']}", f"looked at {row['looked_at']}")], label=18
        )
        if row["missing"]:
            yield from pairs([("", "missing: " + "; ".join(row["missing"]))], label=18)
