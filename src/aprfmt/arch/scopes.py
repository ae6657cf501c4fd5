"""The keys of a row for one network: defaults, where values are stored, and derived values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import rope
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, converter_of, look_up, nothing
from aprfmt.arch.hyperparams import FIELD, Hyperparams
from aprfmt.arch.row import WHOLE_KEYS, Architecture, Key

TOKEN_IDS = ("bos_token_id", "eos_token_id")
KEPT = (
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
    "attention_bias", "mlp_bias", "pad_token_id", "quantization_config", "num_nextn_predict_layers",
    "original_max_position_embeddings", "mixer_rms_eps", "rescale_prenorm_residual",
)  # fmt: skip
"""config.json keys, in addition to those of a row, that are kept in Hyperparams.extra if present."""

# Read and written elsewhere, not by the keys of a row.
_ELSEWHERE = frozenset(("tie_word_embeddings", *TOKEN_IDS, *rope.NAMES))
_VOCAB = Key("vocab_size", FIELD["vocab_size"].hf, field="vocab_size")
_OTHER_DRAFTS = Converter(nothing, lambda value, scope: value or DEFAULT)
DRAFTS = Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=_OTHER_DRAFTS)
"""The number of MTP layers; for a family without a key of its own, a new GGUF has none."""


def drafts_key(row: Architecture | None) -> Key:
    """The family's key of the number of MTP layers."""
    own = (key for key in row.keys if key.gguf == DRAFTS.gguf) if row is not None else ()
    return next(iter(own), DRAFTS)


def full_key(row: Architecture, suffix: str) -> str:
    """A full GGUF key: prefixed with the architecture, except keys that are not specific to a family."""
    return suffix if suffix.startswith(WHOLE_KEYS) else f"{row.gguf}.{suffix}"


def defaults_of(row: Architecture | None, *model_types: str | None) -> dict[str, object]:
    """The defaults for the first of the model types that the row knows."""
    if row is None:
        return {}
    own = next((row.defaults[name] for name in model_types if name and name in row.defaults), None)
    if own is None:
        own = row.defaults.get(row.model_type, {})
    return {**row.defaults.get("", {}), **own}


def keys_of(row: Architecture, defaults: Mapping[str, object]) -> Iterator[Key]:
    """The row's keys, the vocabulary's size, then plain config.json keys that only the row's defaults name."""
    yield from row.keys
    if not any(key.field == "vocab_size" for key in row.keys):
        yield _VOCAB
    named = {name for key in row.keys for name in key.hf} | _ELSEWHERE | {"vocab_size"}
    for name in (*defaults, *KEPT):
        if name not in named:
            named.add(name)
            yield DRAFTS if name in DRAFTS.hf else Key("", (name,))


def scopes_of(h: Hyperparams, row: Architecture, defaults: Mapping[str, object]) -> list[Scope]:
    """The scope of each key of a config.json."""
    return [Scope(h, row, key, defaults) for key in keys_of(row, defaults)]


def read_config(
    scopes: Sequence[Scope],
    config: Mapping[str, object],
    defaults: Mapping[str, object],
    *,
    null_is_absent: bool = False,
) -> None:
    """Sets each key's value from a config.json, else the default; then normalizes all of them."""
    for scope in scopes:
        value, found = look_up(config, scope.key.hf)
        if not found or (null_is_absent and value is None):
            value, _ = look_up(defaults, scope.key.hf)
        elif value is None and scope.key.constant is True:
            value = False  # for a switch that is on by default, null is off
        scope.put(scope.key.constant if value is None else value)
    normalize(scopes)


def take(scope: Scope, value: object) -> None:
    """Sets the result of a converter."""
    key = scope.key
    if isinstance(value, ConfigKeys):
        by_name = {name: known for known in scope.row.keys for name in known.hf}
        for name, item in value.items():
            replace(scope, key=by_name.get(name, Key("", (name,)))).put(item)
    elif value is not DEFAULT:
        scope.put(value)
    # A hyper-parameter that a GGUF lacks is unknown, whatever transformers' default;
    # a value set by another key is kept.
    elif not (key.field and key.gguf) and not (key.hf and key.hf[0] in scope.h.extra):
        default, _ = look_up(scope.defaults, key.hf)
        if default is not None:
            scope.put(default)


def normalize(scopes: Sequence[Scope]) -> None:
    """Converts the values of a config.json, all of which are read, into their stored form."""
    for scope in scopes:
        convert = converter_of(scope.key).normalize
        if convert is not None and (value := convert(scope.value, scope)) is not DEFAULT:
            take(scope, value)


def fill(h: Hyperparams, scopes: Sequence[Scope]) -> None:
    """Sets derived values: sizes, then heads, which need sizes, then what is counted in those."""
    for only_sizes in (True, False):
        for scope in scopes:
            derive = converter_of(scope.key).derive
            if derive is not None and scope.value is None and (scope.key.field or not only_sizes):
                scope.put(derive(scope))
        if only_sizes:
            derive_heads(h)


def derive_heads(h: Hyperparams) -> None:
    """By default as many key-value heads as heads, and heads of equal size."""
    if h.num_kv_heads is None:
        h.num_kv_heads = h.num_heads
    if h.head_dim is None:
        h.head_dim = h.plain_head_dim
