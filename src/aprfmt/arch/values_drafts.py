"""Converters of draft models, which read hidden states of the model that they draft for. See arch.values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aprfmt.arch import rope
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope, default, nothing
from aprfmt.arch.fields import as_int
from aprfmt.arch.values_layers import FULL, SLIDING
from aprfmt.errors import RefusedError

_HINT = "--target-model DIR gives the folder of the model that it drafts for"


def _needed(value: object, scope: Scope) -> object:
    """What llama.cpp needs to know of the other model."""
    if value is None:
        raise RefusedError(f"{scope.name} is unknown: the draft model's own config.json does not say it", hint=_HINT)
    return value


def _eagle_layers(target: Mapping[str, object], scope: Scope) -> list[int] | None:
    """The layers that EAGLE-3 reads where nothing is said: an early, a middle and a late one."""
    n_layers = as_int(target.get("num_hidden_layers"), "num_hidden_layers of the target model")
    return [2, n_layers // 2, n_layers - 3] if n_layers is not None else None


def _next(value: object, scope: Scope) -> object:
    """Layers whose outputs are read, as those whose inputs are."""
    layers = _needed(value, scope)
    return [layer + 1 for layer in layers if isinstance(layer, int)] if isinstance(layers, list) else layers


def _read_layers(value: object, scope: Scope) -> object:
    """The speculators library names the layers whose inputs are read."""
    return _previous(scope.h.extra.get("aux_hidden_state_layer_ids"), scope) if value is None else DEFAULT


def _previous(value: object, scope: Scope) -> object:
    return [layer - 1 for layer in value if isinstance(layer, int)] if isinstance(value, list) else DEFAULT


def _sections(target: Mapping[str, object], scope: Scope) -> list[int] | None:
    """Positions of one kind alone, for the draft of a model that has several."""
    ropes = target.get("rope_parameters") or target.get("rope_scaling")
    if not isinstance(ropes, Mapping) or "mrope_section" not in ropes or scope.h.head_dim is None:
        return None
    return [scope.h.head_dim // 2, 0, 0, 0]


def _dflash_window(value: object, scope: Scope) -> object:
    """A window of all layers, which some configs have beside those of single layers."""
    if not value:
        return DEFAULT
    window = scope.h.extra.get("dflash_config.swa_window_size") or scope.config("sliding_window")
    layers = [SLIDING] * (scope.h.num_layers or 0)
    return ConfigKeys({"sliding_window": window, "use_sliding_window": True, "layer_types": layers})


def _partial_rotary(value: object, scope: Scope) -> object:
    """Written only where not all of a head is rotated."""
    return rope.rotary_dim(scope.h) if scope.h.extra.get("partial_rotary_factor") is not None else None


def _partial_rotary_from(value: object, scope: Scope) -> object:
    if value is not None:
        rope.set_rotary_dim(scope.h, as_int(value, scope.key.gguf), scope.defaults)
    return DEFAULT


def _anchor(value: object, scope: Scope) -> object:
    """Whether the first token of a block is drafted: not where the speculators library wrote the config."""
    if value is not None:
        return DEFAULT
    return not (scope.h.hf_architecture == "DSparkSpeculator" or "aux_hidden_state_layer_ids" in scope.h.extra)


def _draft_vocabulary(scope: Scope) -> int | None:
    return scope.h.vocab_size if "d2t" not in scope.names else None


def _global_head(value: object, scope: Scope) -> GgufKeys:
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    return GgufKeys(dict.fromkeys(names, ("u32", value)))


def _all_full(value: object, scope: Scope) -> None:
    if isinstance(value, list) and set(map(str, value)) - {FULL}:
        raise RefusedError(f"{scope.name}: llama.cpp's draft of a Gemma 4 has layers that see everything only")


def _root_of_width(value: object, scope: Scope) -> float | None:
    return math.sqrt(scope.h.hidden_size) if scope.h.hidden_size else None


DRAFTS: dict[str, Converter] = {
    "eagle_layers": Converter(_needed, from_target=_eagle_layers),
    "target_width": Converter(_needed, from_target=lambda target, scope: target.get("hidden_size")),
    "next_layers": Converter(_next, _previous, settle=_read_layers, from_target=lambda target, scope: None),
    "dflash_window": Converter(nothing, settle=_dflash_window),
    "partial_rotary": Converter(_partial_rotary, _partial_rotary_from),
    "anchor": Converter(settle=_anchor),
    "draft_vocabulary": Converter(nothing, lambda value, scope: None, _draft_vocabulary),
    "global_head": Converter(_global_head),
    "all_full": Converter(_all_full, fill=lambda scope: [FULL] * (scope.h.num_layers or 0)),
    "root_of_width": Converter(_root_of_width, default),
    "layer_count": Converter(lambda value, scope: scope.h.num_layers, lambda value, scope: DEFAULT),
    "target_sections": Converter(from_target=_sections),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
