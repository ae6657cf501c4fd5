"""What import, export and convert have in common: run with a bar, print the report or the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from aprfmt.cli.output import out, pairs, printable, table
from aprfmt.cli.progress import Bar
from aprfmt.errors import RefusedError, UsageError
from aprfmt.text import format_bytes, format_count, format_seconds

_LABELS = {
    "apr-v2": "APR v2",
    "gguf": "GGUF",
    "safetensors": "SafeTensors",
    "hf": "HF folder",
    "mlx": "MLX folder",
}


class HasJson(Protocol):
    """A report of convert.api."""

    def to_json(self) -> dict[str, Any]:
        """The keys of the JSON contract."""


def transfer(
    verb: str, function: Callable[..., HasJson], source: str, output: Path, *, plan: bool, **options: Any
) -> None:
    """Calls `function(source, output, ...)`, shows a bar while it works and its report afterwards."""
    refuse_terminal(output)
    options["max_memory"] = parse_size(options.get("max_memory"))
    with Bar(verb) as bar:
        report = function(
            source, output, plan=plan, progress=None if plan else bar.factory, **options
        ).to_json()
    for warning in report["warnings"]:
        out.warning(warning)
    out.result(report, _plan_text(report) if plan else _done_text(report))


def refuse_terminal(output: Path) -> None:
    """Refuses `-`: models are written to files, whole or not at all."""
    if str(output) == "-":
        raise RefusedError("a model is not written to standard output", hint="name a file with -o")


def parse_size(text: str | None) -> int | None:
    """`5GB`, `500MiB`, `123456` as bytes. Raises UsageError."""
    if text is None:
        return None
    units = {
        "": 1,
        "b": 1,
        "k": 1e3,
        "kb": 1e3,
        "m": 1e6,
        "mb": 1e6,
        "g": 1e9,
        "gb": 1e9,
        "t": 1e12,
        "tb": 1e12,
    }
    units |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
    number = text.strip().rstrip("BbKkMmGgTtIi").strip()
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"{text!r} is no size", hint="write it as 5GB, 500MiB or a number of bytes")
    return size


def parse_shard_size(text: str | None) -> int | None:
    """The same for --shard-size, where 0 asks for one file. Raises UsageError."""
    return 0 if text is not None and text.strip() == "0" else parse_size(text)


def _done_text(report: dict[str, Any]) -> Iterator[str]:
    size, seconds = report["output_bytes"], report["seconds"]
    rate = f", {format_bytes(size / seconds)}/s" if seconds > 0 else ""
    yield f"{out.style('wrote', 'green')} {out.style(printable(str(report['output'])), 'bold')}"
    yield from pairs([*_facts(report), ("time", f"{format_seconds(seconds)}{rate}"), *_verify(report)])


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    dtypes = ", ".join(f"{name} {row['tensors']}" for name, row in report["dtypes"].items())
    yield "format", _LABELS.get(report["format"], str(report["format"]))
    yield "architecture", str(report["architecture"] or "(unknown)")
    yield "tensors", f"{report['tensor_count']:,} ({dtypes})" if dtypes else f"{report['tensor_count']:,}"
    bits = f", {report['bits_per_weight']:.2f} bits a weight" if report["bits_per_weight"] else ""
    yield "size", f"{format_bytes(report['output_bytes'])} from {format_bytes(report['input_bytes'])}{bits}"
    yield "parameters", format_count(sum(row["params"] for row in report["dtypes"].values()))
    if report["lossless"]:
        yield "lossless", "yes: the source can be had back byte for byte"
    elif report["losses"]:
        yield "losses", "; ".join(report["losses"])
    else:
        yield "lossless", "values yes; the bytes of the source files are not kept"


def _verify(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    found = report.get("verify")
    if found:
        text = f"loads in llama.cpp ({found['engine']}), {found['vocab_size']:,} tokens, "
        if "text" in found:
            text += f"continues with {found['text'].strip()!r}"
        else:
            text += f"embeds a sentence in {found['embedding_size']:,} dimensions"
        yield "verified", text


def _plan_text(report: dict[str, Any]) -> Iterator[str]:
    name = out.style(printable(str(report["output"])), "bold")
    yield f"{out.style('plan', 'cyan')} for {name}; nothing is written"
    yield from pairs([*_facts(report), ("memory", format_bytes(report["memory_bytes"]))])
    rows = [
        [t["name"], t["dtype"], "×".join(map(str, t["shape"])) or "scalar", format_bytes(t["size_bytes"])]
        for t in report["tensors"]
    ]
    if rows:
        yield from ("", *table(["tensor", "dtype", "shape", "size"], rows, right="size"))
