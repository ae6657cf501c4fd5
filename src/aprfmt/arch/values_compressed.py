"""Converters of networks that attend to a window and to keys of many positions in one. See arch.values."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch.converter import DEFAULT, Converter, Scope, default
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.errors import CorruptError, RefusedError

_WINDOW, _CHOSEN, _ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES: Mapping[str, object] = {_CHOSEN: 4, _ALL: 128}
"""Positions that become one key, by the kind of layer in transformers: those that an indexer chooses from, all."""
_HASHED = "hash_moe"
_N_HASHED, _N_STREAMS = 3, 4


def _ratios_settle(value: object, scope: Scope) -> object:
    """A ratio a layer, 0 of a window alone; by the kinds of layers where transformers wrote the config."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    kinds = extra.pop("layer_types", None)
    rates = {**_RATES, **as_mapping(extra.pop("compress_rates", None))}
    if rates != _RATES:
        raise RefusedError(
            f"compress_rates {rates} are not those of any published model",
            hint=f"layers compress by {_RATES[_CHOSEN]} and {_RATES[_ALL]} positions",
        )
    if kinds is None and (value is not None or n_layers is None):
        return DEFAULT
    if kinds is None:
        kinds = [_CHOSEN if i > 1 and i % 2 else _ALL for i in range(n_layers or 0)]
    if not isinstance(kinds, list) or any(kind not in (*rates, _WINDOW) for kind in kinds):
        raise CorruptError(f"layer_types may only have the words {_WINDOW!r}, {_CHOSEN!r} and {_ALL!r}")
    return [rates.get(kind, 0) for kind in kinds]


def _ratios_to(value: object, scope: Scope) -> object:
    for ratio in value if isinstance(value, list) else ():
        if ratio not in (0, *_RATES.values()):
            raise RefusedError(f"{scope.name} has {ratio}: llama.cpp's {scope.row.gguf} knows 0, 4 and 128 only")
    if isinstance(value, list) and _RATES[_CHOSEN] not in value:
        raise RefusedError(
            f"{scope.name} has no {_RATES[_CHOSEN]}: llama.cpp's {scope.row.gguf} stops without such a layer"
        )
    return value


def _hashed_settle(value: object, scope: Scope) -> object:
    """How many layers take the experts of a table; a list of kinds is kept where these are not the first ones."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    kinds = extra.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return min(_N_HASHED, n_layers) if value is None and n_layers is not None else DEFAULT
    count = kinds.count(_HASHED)
    if _HASHED not in kinds[count:]:
        del extra["mlp_layer_types"]
    return count


def _hashed_to(value: object, scope: Scope) -> object:
    if scope.h.extra.get("mlp_layer_types"):
        raise RefusedError(
            f"mlp_layer_types: llama.cpp's {scope.row.gguf} has tables of experts in the first layers only"
        )
    return value


def _all_streams(value: object, scope: Scope) -> int | None:
    width, n_streams = scope.h.hidden_size, as_int(scope.h.extra.get("hc_mult"), "hc_mult")
    if n_streams not in (None, _N_STREAMS):
        raise RefusedError(f"hc_mult is {n_streams}: llama.cpp's {scope.row.gguf} computes {_N_STREAMS} streams only")
    return width * n_streams if width and n_streams else None


def _stages_settle(value: object, scope: Scope) -> object:
    """A draft is published with its model, whose layers the config counts; ratios are listed of all of both."""
    scope.h.extra.pop("num_nextn_predict_layers", None)
    layers, ratios = as_int(value, scope.name), scope.h.extra.get("compress_ratios")
    n_stages = len(ratios) - layers if isinstance(ratios, list) and layers is not None else 0
    return n_stages if n_stages > 0 else DEFAULT


def _no_ratios(value: object, scope: Scope) -> list[int]:
    for name in ("layer_types", "compress_rates"):
        scope.h.extra.pop(name, None)
    return [0] * (scope.h.num_layers or 0)


def _no_tables(value: object, scope: Scope) -> int:
    scope.h.extra.pop("mlp_layer_types", None)
    return 0


COMPRESSED: dict[str, Converter] = {
    "compress_ratios": Converter(_ratios_to, settle=_ratios_settle),
    "compressed_rope": Converter(),
    "hash_layers": Converter(_hashed_to, settle=_hashed_settle),
    "all_streams": Converter(_all_streams, default),
    "draft_stages": Converter(settle=_stages_settle),
    "no_ratios": Converter(settle=_no_ratios),
    "no_tables": Converter(settle=_no_tables),
    "eighth_of_head": Converter(fill=lambda scope: None if scope.h.head_dim is None else scope.h.head_dim // 8),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
