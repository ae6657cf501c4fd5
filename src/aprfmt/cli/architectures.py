"""`apr architectures`: the families in the table, and what the tensors of a family become in a GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out, pairs, plain, table
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.arch.row import Architecture, Key, TensorRow
    from aprfmt.types import JsonObject


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A name from the list, a Hugging Face class, a model type or a GGUF architecture.",
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the supported architectures; with NAME, show the tensors and keys of one.

    \b
    apr architectures
    apr architectures Qwen3ForCausalLM
    apr architectures gpt_neox --json
    """
    from aprfmt.arch.table import ARCHITECTURES, lookup, nearest

    if name is None:
        rows = list(ARCHITECTURES.values())
        cells = [[row.id, row.gguf, ", ".join(row.hf_classes)] for row in rows]
        lines = table(["name", "GGUF", "Hugging Face classes"], cells, indent=0)
        out.result({"count": len(rows), "architectures": [_summary(row) for row in rows]}, lines)
        return
    row = lookup(name)
    if row is None:
        near = nearest(name)
        raise UsageError(
            f"unknown architecture {name!r}",
            hint=f"did you mean {near!r}?" if near else "apr architectures lists all of them",
        )
    body = _summary(row) | {
        "tensors": [_tensor(tensor) for tensor in row.tensors],
        "keys": [_key(key, row.gguf) for key in row.keys],
    }
    out.result(body, _text(row))


def _summary(row: Architecture) -> JsonObject:
    return {
        "name": row.id,
        "gguf": row.gguf,
        "hf_class": row.hf_class,
        "model_type": row.model_type,
        "hf_classes": list(row.hf_classes),
        "model_types": list(row.model_types),
    }


def _tensor(row: TensorRow) -> JsonObject:
    return {
        "hf": list(row.hf),
        "gguf": list(row.gguf),
        "shape": list(row.dims),
        "need": row.need,
        "layers": row.layers,
        "change": _change(row),
    }


def _key(key: Key, prefix: str) -> JsonObject:
    whole = not key.gguf or key.gguf.startswith(("general.", "tokenizer."))
    name = key.gguf if whole else f"{prefix}.{key.gguf}"
    return {"gguf": name, "hf": list(key.hf), "type": key.kind, "constant": plain(key.constant)}


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
        [" + ".join(t.hf), " + ".join(t.gguf) or "-", ", ".join(filter(None, (t.need, t.layers))), _change(t)]
        for t in row.tensors
    ]
    return [
        out.style(row.id, "bold"),
        *pairs(facts),
        "",
        *table(["Hugging Face", "GGUF", "need", "change"], cells, indent=0),
    ]
