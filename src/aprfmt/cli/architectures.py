"""`apr architectures`: the families that the table knows, and what a family's tensors become in a GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out, pairs, table
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.arch.row import Architecture, Key, TensorRow


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A row, a Hugging Face class, a model type or a GGUF architecture."
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the architectures that can be converted; with NAME, the tensors and keys of one.

    \b
    apr architectures
    apr architectures Qwen3ForCausalLM
    apr architectures gpt_neox --json
    """
    from aprfmt.arch.table import ARCHITECTURES

    if name is None:
        rows = list(ARCHITECTURES.values())
        cells = [[row.id, row.gguf, ", ".join(row.hf_classes)] for row in rows]
        lines = table(["name", "GGUF", "Hugging Face classes"], cells, indent=0)
        out.result({"count": len(rows), "architectures": [_summary(row) for row in rows]}, lines)
        return
    row = _row(name)
    body = _summary(row) | {
        "tensors": [_tensor(tensor) for tensor in row.tensors],
        "keys": [_key(key, row.gguf) for key in row.keys],
    }
    out.result(body, _text(row))


def _row(name: str) -> Architecture:
    from aprfmt.arch.table import lookup, nearest

    row = lookup(name)
    if row is None:
        near = nearest(name)
        raise UsageError(
            f"no architecture is called {name!r}",
            hint=f"did you mean {near!r}?" if near else "apr architectures lists all of them",
        )
    return row


def _summary(row: Architecture) -> dict[str, Any]:
    return {
        "name": row.id,
        "gguf": row.gguf,
        "hf_class": row.hf_class,
        "model_type": row.model_type,
        "hf_classes": list(row.hf_classes),
        "model_types": list(row.model_types),
    }


def _tensor(row: TensorRow) -> dict[str, Any]:
    return {
        "hf": list(row.hf),
        "gguf": list(row.gguf),
        "shape": list(row.dims),
        "need": row.need,
        "layers": row.layers,
        "change": _change(row),
    }


def _key(key: Key, prefix: str) -> dict[str, Any]:
    name = (
        key.gguf
        if key.gguf.startswith(("general.", "tokenizer.")) or not key.gguf
        else f"{prefix}.{key.gguf}"
    )
    return {"gguf": name, "hf": list(key.hf), "type": key.kind, "constant": key.constant}


def _change(row: TensorRow) -> str:
    """What happens to the values on the way to a GGUF, in a few words."""
    steps = [
        "transposed" if row.transposed else "",
        *(f"rows {order}" for order in row.order),
        *(f"columns {order}" for order in row.columns),
        row.value,
        f"packed {row.pack}" if row.pack else "",
        "split" if len(row.gguf) > 1 else "",
        "stacked" if any("{e}" in name for name in row.hf) else "",
        "transposed" if any(row.gguf_transposed) else "",
        "left out" if not row.gguf else "",
    ]
    return ", ".join(step for step in steps if step)


def _text(row: Architecture) -> list[str]:
    facts = [
        ("GGUF", row.gguf),
        ("classes", ", ".join(row.hf_classes)),
        ("model types", ", ".join(row.model_types) or "-"),
    ]
    cells = [
        [
            " + ".join(t.hf),
            " + ".join(t.gguf) or "-",
            t.need + (f", {t.layers}" if t.layers else ""),
            _change(t),
        ]
        for t in row.tensors
    ]
    return [
        out.style(row.id, "bold"),
        *pairs(facts),
        "",
        *table(["Hugging Face", "GGUF", "need", "change"], cells, indent=0),
    ]
