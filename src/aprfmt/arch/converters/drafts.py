"""Converters of draft models that read hidden states of their target."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.errors import RefusedError

_HINT = "set the target model's folder with --target-model DIR"


def needed(value: object, scope: Scope) -> object:
    """What llama.cpp needs to know about the target model."""
    if value is None:
        raise RefusedError(f"{scope.name} is unknown: it is not in the draft model's config.json", hint=_HINT)
    return value


def _next(value: object, scope: Scope) -> object:
    """Converts layers by their outputs to layers by their inputs."""
    layers = needed(value, scope)
    return [layer + 1 for layer in layers if isinstance(layer, int)] if isinstance(layers, list) else layers


def _previous(value: object, scope: Scope) -> object:
    return [layer - 1 for layer in value if isinstance(layer, int)] if isinstance(value, list) else DEFAULT


def _read_layers(value: object, scope: Scope) -> object:
    """The speculators library lists the layers whose inputs are read."""
    return _previous(scope.h.extra.get("aux_hidden_state_layer_ids"), scope) if value is None else DEFAULT


next_layers = Converter(_next, _previous, normalize=_read_layers, from_target=lambda target, scope: None)
