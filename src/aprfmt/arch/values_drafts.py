"""Converters of draft models, which read hidden states of the model that they draft for. See arch.values."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_int
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
    return [layer + 1 for layer in _needed(value, scope) if isinstance(layer, int)]  # type: ignore[attr-defined]


def _previous(value: object, scope: Scope) -> object:
    return [layer - 1 for layer in value if isinstance(layer, int)] if isinstance(value, list) else DEFAULT


def _sections(target: Mapping[str, object], scope: Scope) -> list[int] | None:
    """Positions of one kind alone, for the draft of a model that has several."""
    ropes = target.get("rope_parameters") or target.get("rope_scaling")
    if not isinstance(ropes, Mapping) or "mrope_section" not in ropes or scope.h.head_dim is None:
        return None
    return [scope.h.head_dim // 2, 0, 0, 0]


DRAFTS: dict[str, Converter] = {
    "eagle_layers": Converter(_needed, from_target=_eagle_layers),
    "target_width": Converter(_needed, from_target=lambda target, scope: target.get("hidden_size")),
    "next_layers": Converter(_next, _previous, from_target=lambda target, scope: None),
    "target_sections": Converter(from_target=_sections),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
