"""The supported architectures, and the tensor and key mappings of one, as JSON data."""

from __future__ import annotations

from dataclasses import asdict

from aprfmt.arch.row import WHOLE_KEYS, Architecture, Key, TensorRow
from aprfmt.arch.table import ARCHITECTURES, classes_of, lookup, nearest
from aprfmt.arch.verified import verified
from aprfmt.errors import UsageError


def architectures(name: str | None = None) -> dict[str, object]:
    """Lists the supported architectures; with `name`, the tensor and key mappings of one.

    Args:
        name: a name from the list, a Hugging Face class, a model type or a GGUF architecture.

    Returns:
        The object of `apr architectures --json`.

    Raises:
        UsageError: unknown architecture.
    """
    if name is None:
        rows = [_facts(row) for row in ARCHITECTURES.values()]
        return {"count": len(rows), "architectures": rows}
    row = find_architecture(name)
    return _facts(row) | {
        "tensors": [
            {
                "hf": list(tensor.hf),
                "gguf": list(tensor.gguf),
                "shape": list(tensor.dims),
                "need": tensor.need,
                "layers": tensor.layers,
                "change": change_text(tensor),
            }
            for tensor in row.tensors
        ],
        "keys": [_key_mapping(key, row.gguf) for key in row.keys],
    }


def find_architecture(name: str) -> Architecture:
    """The architecture of a name, class, model type or GGUF word. Raises UsageError that names the nearest."""
    row = lookup(name)
    if row is None:
        near = nearest(name)
        raise UsageError(
            f"unknown architecture {name!r}",
            hint=f"did you mean {near!r}?" if near else "apr architectures lists all of them",
        )
    return row


def _facts(row: Architecture) -> dict[str, object]:
    known = verified().get(row.id)
    return {
        "name": row.id, "gguf": row.gguf, "hf_class": row.hf_class, "model_type": row.model_type,
        "hf_classes": list(classes_of(row)), "model_types": list(row.model_types),
        "verified": asdict(known) if known is not None else None,
    }  # fmt: skip


def _key_mapping(key: Key, prefix: str) -> dict[str, object]:
    whole = not key.gguf or key.gguf.startswith(WHOLE_KEYS)
    name = key.gguf if whole else f"{prefix}.{key.gguf}"
    return {"gguf": name, "hf": list(key.hf), "type": key.kind, "constant": key.constant}


def change_text(row: TensorRow) -> str:
    """Summarizes how a tensor's values change when written to GGUF."""
    steps = [
        "transposed" if row.transposed else "",
        *(f"rows {order}" for order in row.order),
        *(f"columns {order}" for order in row.columns),
        row.value,
        *(f"scaled by {numbers}" for numbers in dict.fromkeys(run.partition(":")[2] for run in row.scale)),
        f"packed {row.pack}" if row.pack else "",
        "split" if len(row.gguf) > 1 else "",
        "stacked" if any("{e}" in name for name in row.hf) else "",
        "transposed" if any(row.gguf_transposed) else "",
        "left out" if not row.gguf else "",
    ]
    return ", ".join(step for step in steps if step)
