"""Converters of Qwen4, whose residuals are several streams and one of whose layers has a table of n-grams."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.errors import RefusedError

_FULL = "full_attention"


def _has_table(scope: Scope) -> bool:
    return bool(scope.h.extra.get("ple_layer_ids"))


def with_plain_kinds(layers: Converter) -> Converter:
    """`layers`, where transformers calls attention to chosen positions what published configs call full attention."""

    def settle(value: object, scope: Scope) -> object:
        kinds = value if isinstance(value, list) else None
        return DEFAULT if kinds is None else [_FULL if kind == "indexed_attention" else kind for kind in kinds]

    return replace(layers, settle=settle)


def _ratios_to(value: object, scope: Scope) -> list[int] | None:
    ratio, kinds = as_int(value, scope.name), layer_kinds(scope.h.extra, scope.h.num_layers)
    return None if ratio is None or kinds is None else [ratio if kind == _FULL else 0 for kind in kinds]


def _ratios_from(value: object, scope: Scope) -> object:
    ratios = [ratio for ratio in value if isinstance(ratio, int)] if isinstance(value, list) else []
    return max(ratios, default=0) or 1  # of a file that says 0 llama.cpp attends to everything


def _tables_to(value: object, scope: Scope) -> list[int] | None:
    """The layer with the table, counted from 0."""
    layers = value if isinstance(value, list) else []
    if len(layers) > 1:
        raise RefusedError(f"{scope.name} is {layers}: llama.cpp's {scope.row.gguf} has a table in one layer only")
    return [layer - 1 for layer in layers] or None


def _tables_from(value: object, scope: Scope) -> list[int]:
    return [layer + 1 for layer in value if isinstance(layer, int)] if isinstance(value, list) else []


def _row_width_to(value: object, scope: Scope) -> int | None:
    if not _has_table(scope):
        return None
    width, heads = as_int(value, scope.name) or scope.h.hidden_size, _hashes(scope)
    if width != scope.h.hidden_size:
        raise RefusedError(f"{scope.name} is {width}: llama.cpp's {scope.row.gguf} takes the hidden size only")
    return width // heads if width and heads and width % heads == 0 else None


def _row_width_from(value: object, scope: Scope) -> object:
    width, sizes = as_int(value, scope.key.gguf), scope.gguf("ple.head_vocab_sizes")
    return DEFAULT if width is None or not isinstance(sizes, list) else width * len(sizes)


def _hashes(scope: Scope) -> int:
    return max(0, (scope.size("ngram_size") or 1) - 1) * (scope.size("heads_per_ngram") or 0)


def _first_prime(value: object, scope: Scope) -> object:
    """The rows of the first hash, from which those of the others follow."""
    sizes = scope.gguf("ple.head_vocab_sizes")
    return sizes[0] if isinstance(sizes, list) and sizes and isinstance(sizes[0], int) else DEFAULT


def _parts_from(value: object, scope: Scope) -> object:
    """One: a GGUF holds the table whole."""
    return 1 if scope.gguf("ple.layers") is not None else DEFAULT


def _output_gate_settle(value: object, scope: Scope) -> object:
    """The activation of the MLPs, where the config does not name it."""
    return scope.config("hidden_act") if value is None else DEFAULT


def _end_from(value: object, scope: Scope) -> object:
    if scope.h.eos_token_id is None:
        scope.h.eos_token_id = as_int(value, scope.key.gguf)
    return DEFAULT


NGRAMS: dict[str, Converter] = {
    "ratio_a_layer": Converter(_ratios_to, _ratios_from),
    "table_layers": Converter(_tables_to, _tables_from),
    "of_table": Converter(lambda value, scope: value if _has_table(scope) else None),
    "end_of_ngrams": Converter(lambda value, scope: scope.h.eos_token_id if _has_table(scope) else None, _end_from),
    "output_gate": Converter(nothing, lambda value, scope: "sigmoid", settle=_output_gate_settle),
    "row_width": Converter(_row_width_to, _row_width_from),
    "first_prime": Converter(nothing, _first_prime),
    "parts_of_table": Converter(nothing, _parts_from),
}
