"""The metadata section of an APR v2 file: typed fields in a fixed order, then any other keys.

Five generations of the text differ in which unset fields are written. All of them can be read, and a parsed section
that was not changed is written back with its original bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from aprfmt.errors import CorruptError, LimitError, UsageError
from aprfmt.io import jsonx
from aprfmt.io.jsonx import LongList
from aprfmt.limits import MAX_METADATA_BYTES

TRUE_DTYPES_KEY = "aprfmt.tensors"
"""Custom key with the dtypes that have no id in the container; always the last key."""

SOURCE_KEY = "aprfmt.source"
"""Custom key with the source manifest, see convert.source_manifest."""

FOOTER_KEY, FOOTER = "aprfmt.checksum", "aprfmt.crc32"
"""Custom key and value of an `.apr` that ends with its CRC-32: they reveal a missing footer."""

OWN_PREFIX = "aprfmt."
"""Prefix of the custom keys that only this package writes."""

FILES_PREFIX = "aprfmt.files/"
"""Name prefix of tensors that store files; the file's path follows."""

_U8, _U32, _U64 = (1 << 8) - 1, (1 << 32) - 1, (1 << 64) - 1


def _unsigned(limit: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and 0 <= value <= limit


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a string"),
    "bool": (lambda value: isinstance(value, bool), "a boolean"),
    "u8": (_unsigned(_U8), "an integer from 0 to 255"),
    "u32": (_unsigned(_U32), "an unsigned 32-bit integer"),
    "u64": (_unsigned(_U64), "an unsigned integer"),
    "f32": (lambda value: type(value) is float or (type(value) is int and abs(value) <= _U64), "a number"),
}

# Sub-object -> its fields in writing order: kind, and whether it is required.
_OBJECTS: dict[str, dict[str, tuple[str, bool]]] = {
    "quantization": {
        "quant_type": ("str", True),
        "bits": ("u8", True),
        "block_size": ("u64", False),
        "symmetric": ("bool", True),
    },
    "sharding": {
        "shard_count": ("u64", True),
        "shard_index": ("u64", True),
        "total_size": ("u64", True),
        "pattern": ("str", False),
    },
    "special_tokens": dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "pad_token", "im_start_token", "im_end_token"), ("str", False)
    ),
}

_STRINGS = "model_type name description author license data_source data_license version source original_format"
_SIZES = "hidden_size num_layers num_heads num_kv_heads vocab_size intermediate_size max_position_embeddings"

_KINDS: dict[str, str] = {
    **dict.fromkeys((*_STRINGS.split(), "created_at"), "str"), **dict.fromkeys(("total_size", "param_count"), "u64"),
    **dict.fromkeys(("quantization", "sharding"), "object"), **dict.fromkeys(("chat_template", "chat_format"), "str"),
    "special_tokens": "object", **dict.fromkeys(("architecture", "hf_architecture", "hf_model_type"), "str"),
    **dict.fromkeys(_SIZES.split(), "u64"), "rope_theta": "f32", "rope_type": "u32", "rms_norm_eps": "f32",
    **dict.fromkeys(("head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"), "u64"),
}  # fmt: skip

TYPED_FIELDS: tuple[str, ...] = tuple(_KINDS)
"""The typed fields in writing order; every other key is custom."""


def is_text(key: str) -> bool:
    """Whether the typed field `key` is text."""
    return _KINDS.get(key) == "str"


# Fields that may not be null, and the meaning of an absent one.
_REQUIRED: dict[str, object] = {"model_type": "", "total_size": 0, "param_count": 0}
# Written even if unset, in every generation that knows them.
_ALWAYS = {*_REQUIRED, "license", "data_source", "data_license"}

_GEN_B = tuple(name for name in TYPED_FIELDS if name not in ("hf_architecture", "hf_model_type"))
_GEN_A = tuple(name for name in _GEN_B if name not in ("data_source", "data_license"))
_GEN_0 = _GEN_A[: _GEN_A.index("sharding") + 1]

GENERATIONS: dict[str, tuple[str, ...]] = {
    "Current": TYPED_FIELDS, "GenC": TYPED_FIELDS, "GenB": _GEN_B, "GenA": _GEN_A, "Gen0": _GEN_0,
}  # fmt: skip
"""Generation -> the typed fields it knows. All but Current write an unset field as null instead of omitting it."""

# Typed field -> the names other tools use for it, in order of preference.
_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_dim", "d_model", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "vocab_size": ("n_vocab",),
    "intermediate_size": ("ffn_dim", "intermediate_dim", "n_inner"),
    "max_position_embeddings": ("max_seq_len", "context_length", "n_ctx"),
    "rms_norm_eps": ("layer_norm_eps", "norm_eps"),
}


class AprMetadata(Mapping[str, object]):
    """A parsed metadata section, read-only, with every key as stored, explicit nulls included.

    `dict(metadata)` makes a mutable copy; `dump` writes an AprMetadata with its original bytes.
    """

    def __init__(self, raw: bytes, values: dict[str, object]) -> None:
        self.raw = raw
        self._values = values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if isinstance(value, LongList):
            value = self._values[key] = value.read()
        return value

    def peek(self, key: str) -> tuple[list[object], int] | None:
        """The first item, if any, of the list under `key`, and its length; None unless it is a list."""
        value = self._values.get(key)
        if isinstance(value, LongList):
            return [value.first()], len(value)
        return (value[:1], len(value)) if isinstance(value, list) else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def generation(self) -> str:
        """The generation (a key of GENERATIONS) that writes these fields; Current if it cannot be told."""
        typed = {name for name in TYPED_FIELDS if name in self._values}
        if any(self._values[name] is None for name in typed - _ALWAYS):
            for name in ("GenC", "GenB", "GenA", "Gen0"):
                if typed == set(GENERATIONS[name]):
                    return name
        return "Current"

    def __repr__(self) -> str:
        return f"AprMetadata({self.generation}, {len(self.raw)} bytes, {list(self._values)[:8]})"


def parse(raw: bytes | memoryview) -> AprMetadata:
    """Parses a metadata section. Raises CorruptError unless it is a JSON object of the right types."""
    raw = bytes(raw)
    values = jsonx.loads_lazily(raw)
    if not isinstance(values, dict):
        raise CorruptError(f"the metadata is not a JSON object but {_json_kind(values)}")
    problem = _find_problem(values)
    if problem:
        raise CorruptError(f"metadata {problem}")
    return AprMetadata(raw, values)


def has_footer(values: Mapping[str, object]) -> bool:
    """Whether the metadata belongs to a file written with a footer: every writer of our keys adds one.

    In a damaged file the key or its value may have lost a bit, not both.
    """
    return values.get(FOOTER_KEY) is not None or any(
        key.startswith(OWN_PREFIX) or value == FOOTER for key, value in values.items()
    )


def dump(values: Mapping[str, object], generation: str = "Current") -> bytes:
    """Serializes `values` in a generation's form; an AprMetadata yields its original bytes.

    Typed fields come first in their order, the other keys sorted after them, TRUE_DTYPES_KEY last. A typed field that
    an older generation does not know is written among the other keys.

    Raises UsageError for values of the wrong type, LimitError beyond MAX_METADATA_BYTES.
    """
    if isinstance(values, AprMetadata):
        return values.raw
    if generation not in GENERATIONS:
        raise UsageError(f"unknown metadata generation {generation!r}", hint="known: " + ", ".join(GENERATIONS))
    if not all(isinstance(key, str) for key in values):
        raise UsageError("metadata keys must be strings")
    problem = _find_problem(values)
    if problem:
        raise UsageError(f"metadata {problem}")
    fields = GENERATIONS[generation]
    typed = [
        f'"{name}":{_field_text(name, values.get(name))}'
        for name in fields
        if generation != "Current" or name in _ALWAYS or values.get(name) is not None
    ]
    custom = sorted(set(values).difference(fields), key=lambda key: (key == TRUE_DTYPES_KEY, key))
    text = ",".join(typed + [f"{jsonx.quote(key)}:{jsonx.dumps(values[key], 2)}" for key in custom])
    try:
        raw = f"{{{text}}}".encode()
    except UnicodeEncodeError as error:
        raise UsageError("the metadata has a lone surrogate, which UTF-8 cannot encode", offset=error.start) from None
    if len(raw) > MAX_METADATA_BYTES:
        raise LimitError(f"the metadata has {len(raw)} bytes; the limit is {MAX_METADATA_BYTES}")
    return raw


def _field_text(name: str, value: object) -> str:
    kind = _KINDS[name]
    if value is None:
        value = _REQUIRED.get(name)
    if value is None:
        return "null"
    if kind == "f32" and isinstance(value, int | float):
        return jsonx.f32_text(float(value))
    if kind == "object" and isinstance(value, Mapping):
        return "{" + ",".join(f'"{key}":{jsonx.dumps(value.get(key))}' for key in _OBJECTS[name]) + "}"
    return jsonx.dumps(value)


def _find_problem(values: Mapping[str, object]) -> str | None:
    """Describes what is wrong with the typed fields; None if nothing is."""
    for name, kind in _KINDS.items():
        if name not in values:
            continue
        value = values[name]
        if value is None:
            if name in _REQUIRED:
                return f"field {name!r} must not be null"
        elif kind == "object":
            problem = _find_object_problem(name, value)
            if problem:
                return problem
        elif not _CHECKS[kind][0](value):
            return f"field {name!r} must be {_CHECKS[kind][1]}, not {_json_kind(value)}"
    return None


def _find_object_problem(name: str, value: object) -> str | None:
    if not isinstance(value, Mapping):
        return f"field {name!r} must be an object, not {_json_kind(value)}"
    for key, (kind, required) in _OBJECTS[name].items():
        item = value.get(key)
        if item is None:
            if required:
                return f"field {name!r} lacks {key!r}"
        elif not _CHECKS[kind][0](item):
            return f"field '{name}.{key}' must be {_CHECKS[kind][1]}, not {_json_kind(item)}"
    return None


def _json_kind(value: object) -> str:
    """A JSON value for messages: null, booleans and numbers as JSON, else "a string", "an array" or "an object"."""
    if value is None or isinstance(value, bool | int | float):
        return jsonx.dumps(value) if not isinstance(value, int) else str(value).lower()[:40]
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, Mapping) else "an array"


def canonicalize_aliases(values: Mapping[str, object]) -> dict[str, object]:
    """Resolves other tools' names of typed fields; an unset field gets its first numeric alias.

    A file must never contain a typed field together with one of its aliases: the reference reader would drop all
    metadata.
    """
    result = dict(values)
    for name, aliases in _ALIASES.items():
        is_number = _CHECKS[_KINDS[name]][0]
        found = [result.pop(alias) for alias in aliases if alias in result]
        if result.get(name) is None:
            for value in filter(is_number, found):
                result[name] = value
                break
    return result
