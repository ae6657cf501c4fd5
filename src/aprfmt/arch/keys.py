"""The engine behind a row's `keys`: config.json keys and GGUF keys to hyper-parameters and back."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from aprfmt.arch import rope
from aprfmt.arch.fields import (
    BY_NAME,
    FIELDS,
    KEPT,
    GgufKey,
    as_float,
    as_int,
    checked,
    listed,
    typed_key,
    untyped,
)
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Architecture, Key
from aprfmt.arch.values import base, dense, gemma, gpt, hybrid, moe
from aprfmt.arch.values.base import DEFAULT, Converter, Side, head_dim_is_named, plain_head_dim
from aprfmt.errors import LimitError, RefusedError
from aprfmt.limits import MAX_LAYERS

UNKNOWN_KEYS: tuple[Key, ...] = (
    *(
        Key(
            f.gguf,
            f.hf,
            "f32" if f.is_float else "u32",
            f.name,
            via="head_dim" if f.name == "head_dim" else "",
        )
        for f in FIELDS
        if f.name != "rope_theta"
    ),
    Key("rope", via="rope"),
    Key("attention.sliding_window", ("sliding_window",), via="window"),
)
"""Keys of an architecture that the table does not have."""

_FILES = (base, dense, gemma, gpt, hybrid, moe)
CONVERTERS: dict[str, Converter] = {name: item for file in _FILES for name, item in file.CONVERTERS.items()}
"""What a Key's `via` names."""

_ELSEWHERE = frozenset(("tie_word_embeddings", "bos_token_id", "eos_token_id", *rope.NAMES))
_STRUCTURAL = frozenset(("rope", "rotary_dim", "head_dim"))
_PLAIN = Converter()
_VOCAB = Key("vocab_size", BY_NAME["vocab_size"].hf, field="vocab_size")
_LAYER = re.compile(r"\.\d+\.")


def unknown(gguf: str | None) -> Architecture:
    """A row for an architecture that the table does not have."""
    return Architecture("", gguf or "", "", "", (), (), (), UNKNOWN_KEYS)


def defaults_of(row: Architecture, *model_types: str | None) -> dict[str, Any]:
    """What absent config.json keys mean for the first of the model types that the row knows."""
    own = next((row.defaults[name] for name in model_types if name and name in row.defaults), None)
    if own is None:
        own = row.defaults.get(row.model_type, {})
    return {**row.defaults.get("", {}), **own}


def keys_of(row: Architecture, defaults: Mapping[str, Any]) -> Iterator[Key]:
    """The row's keys, the vocabulary's size, then plain config.json keys that the row names in its defaults only."""
    yield from row.keys
    if not any(key.field == "vocab_size" for key in row.keys):
        yield _VOCAB
    named = {name for key in row.keys for name in key.hf} | _ELSEWHERE | {"vocab_size"}
    for name in (*defaults, *KEPT):
        if name not in named:
            named.add(name)
            yield Key("", (name,), via="")


def lookup(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, bool]:
    """(value, whether it is there) of the first spelling that is not null; "a.b" is b of object a."""
    found = False
    for name in names:
        here: Any = config
        for part in (name,) if name in config else name.split("."):
            if not isinstance(here, Mapping) or part not in here:
                break
            here = here[part]
        else:
            found = True
            if here is not None:
                return here, True
    return None, found


def read(h: Hyperparams, row: Architecture, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Fills in every key of a config.json that the row knows. Raises CorruptError for what is no number."""
    sides = [Side(h, row, key, defaults=defaults) for key in keys_of(row, defaults)]
    for key in (side.key for side in sides):
        value, found = lookup(config, key.hf)
        if not found:
            value, _ = lookup(defaults, key.hf)
        if value is None and key.constant is not None:
            value = key.constant
        _put(h, key, value, defaults)
    for side in sides:
        settle = _converter(side.key).settle
        if settle is not None and (value := settle(_value(h, side.key), side)) is not DEFAULT:
            _take(side, value)
    _fill(sides)


def _fill(sides: Sequence[Side]) -> None:
    """Numbers that follow from others."""
    for side in sides:
        if (
            side.key.field
            and (fill := _converter(side.key).fill) is not None
            and _value(side.h, side.key) is None
        ):
            _put(side.h, side.key, fill(side), side.defaults)
    derive(sides[0].h)
    for side in sides:
        if (fill := _converter(side.key).fill) is not None and _value(side.h, side.key) is None:
            _put(side.h, side.key, fill(side), side.defaults)


def derive(h: Hyperparams) -> None:
    """As many key-value heads as heads, and heads of equal size, where nothing else is said."""
    if h.num_kv_heads is None:
        h.num_kv_heads = h.num_heads
    if h.head_dim is None:
        h.head_dim = plain_head_dim(h)


def _value(h: Hyperparams, key: Key) -> Any:
    """What the hyper-parameters hold for a key."""
    value = getattr(h, key.field) if key.field else None
    return value if value is not None or not key.hf else h.extra.get(key.hf[0])


def _put(h: Hyperparams, key: Key, value: Any, defaults: Mapping[str, Any]) -> None:
    """Sets a key's value. A list for a number is kept as it is; the number is what all its items are, if any."""
    name = key.hf[0] if key.hf else key.field
    if not name:
        return
    if not key.field:
        if value is not None or (name and lookup(defaults, key.hf)[0] is not None):
            h.extra[name] = value
        return
    number = as_float if BY_NAME[key.field].is_float else as_int
    if isinstance(value, list):
        items = [number(item, name) for item in value]
        h.extra[name] = items
        value = items[0] if items and all(item == items[0] for item in items) else None
    setattr(h, key.field, number(value, name))
    check_layers(h)


def check_layers(h: Hyperparams) -> None:
    """Raises LimitError for more layers than lists may be made for."""
    if h.num_layers is not None and h.num_layers > MAX_LAYERS:
        raise LimitError(f"{h.num_layers} layers are more than the {MAX_LAYERS} that a network may have")


def from_gguf(
    h: Hyperparams,
    row: Architecture,
    kv: Mapping[str, Any],
    names: Collection[str],
    defaults: Mapping[str, Any],
) -> None:
    """Fills in what a GGUF's keys and tensors say about every key of the row. Raises CorruptError."""
    needs = _needs(row, names)
    sides = [Side(h, row, key, kv, names, defaults) for key in keys_of(row, defaults)]
    # Sizes first: what is counted in heads or layers needs them.
    for side in sides:
        if side.key.field:
            _take_gguf(side, needs)
    derive(h)
    for side in sides:
        if not side.key.field:
            _take_gguf(side, needs)
    _fill(sides)


def _take_gguf(side: Side, needs: Mapping[str, bool]) -> None:
    key = side.key
    name = _full(side.row, key.gguf)
    if key.constant is not None:
        value: Any = key.constant
    elif key.hf and key.hf[0] in needs:
        value = needs[key.hf[0]]
    else:
        raw = side.kv.get(name) if key.gguf else None
        if key.via:
            value = checked(name, key.kind, raw)
        else:
            value = listed(name, raw)
            value = untyped(name, key.kind, value if key.kind.endswith("[]") else _of_all(value))
        value = _converter(key).from_gguf(value, side)
    _take(side, value)


def _of_all(value: Any) -> Any:
    """What every layer has, where a list says the same for all of them; else the value as it is."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _full(row: Architecture, suffix: str) -> str:
    """A GGUF key in full: behind the architecture's name, but for those of the tokenizer and of the file."""
    return suffix if suffix.startswith(("tokenizer.", "general.")) else f"{row.gguf}.{suffix}"


def _converter(key: Key) -> Converter:
    return CONVERTERS[key.via] if key.via else _PLAIN


def _take(side: Side, value: Any) -> None:
    """Sets what a converter gave back."""
    key, h, defaults = side.key, side.h, side.defaults
    if isinstance(value, dict):
        by_name = {name: known for known in side.row.keys for name in known.hf}
        for name, item in value.items():
            _put(h, by_name.get(name, Key("", (name,))), item, defaults)
        return
    if value is DEFAULT:
        # A number of the network that a GGUF does not tell is unknown, whatever transformers would take it for;
        # what another key has told stays.
        known = (key.field and key.gguf) or (key.hf and key.hf[0] in h.extra)
        value = None if known else lookup(defaults, key.hf)[0]
        if value is None:
            return
    _put(h, key, value, defaults)


def _needs(row: Architecture, names: Collection[str]) -> dict[str, bool]:
    """Config flag -> whether the tensors are there that need it; {} where the tensors are unknown."""
    if not names:
        return {}
    present = {_LAYER.sub(".{n}.", name, count=1) for name in names}
    flags: dict[str, bool] = {}
    for tensor in row.tensors:
        if tensor.need not in (REQUIRED, OPTIONAL, HEAD):
            flags[tensor.need] = flags.get(tensor.need, False) or any(name in present for name in tensor.gguf)
    return {
        key.hf[0]: flags[key.hf[0]]
        for key in row.keys
        if key.hf and key.hf[0] in flags and key.kind == "bool" and not key.gguf
    }


def complete(h: Hyperparams, row: Architecture, defaults: Mapping[str, Any]) -> None:
    """Fills in what an .apr leaves out: what transformers takes absent keys for. No window is none."""
    check_layers(h)
    sides = [Side(h, row, key, defaults=defaults) for key in keys_of(row, defaults)]
    for key in (side.key for side in sides):
        if not key.field and key.hf and key.via not in _STRUCTURAL and key.hf[0] not in h.extra:
            value = None if key.via == "window" else lookup(defaults, key.hf)[0]
            _put(h, key, key.constant if value is None else value, defaults)
    _fill(sides)


def to_gguf(
    h: Hyperparams, row: Architecture, defaults: Mapping[str, Any], file_type: int | None, complete: bool
) -> list[GgufKey]:
    """The row's GGUF keys in its order; `general.file_type` behind the sizes of a head, else last.

    Raises RefusedError for what has no GGUF form; with `complete` False that is left out.
    """
    out: dict[str, GgufKey] = {}
    late = [("general.file_type", "UINT32", file_type)] if file_type is not None else []
    for key in row.keys:
        try:
            pairs = _pairs(Side(h, row, key, defaults=defaults))
        except RefusedError:
            if complete:
                raise
            continue
        for suffix, (kind, value) in pairs.items():
            name = _full(row, suffix)
            out.setdefault(name, typed_key(name, kind, value))
        if key.via == "head_dim":
            out |= {name: (name, kind, value) for name, kind, value in late}
            late = []
    return [*out.values(), *late]


def _pairs(side: Side) -> dict[str, tuple[str, Any]]:
    """{suffix: (kind, value)} of one key."""
    key = side.key
    if key.constant is not None:
        _check_constant(side)
        return {key.gguf: (key.kind, key.constant)} if key.gguf else {}
    value = _value(side.h, key)
    if key.via:
        value = CONVERTERS[key.via].to_gguf(value, side)
        # An object of a config.json has no tuples.
        if isinstance(value, dict) and all(isinstance(item, tuple) for item in value.values()):
            return value
    return {key.gguf: (key.kind, value)} if value is not None and key.gguf else {}


_SAME = {"swish": "silu"}


def _check_constant(side: Side) -> None:
    """Raises RefusedError where the config gives a key another value than the family's GGUFs stand for."""
    key, value = side.key, _value(side.h, side.key)
    if value is not None and _SAME.get(str(value), value) != key.constant:
        raise RefusedError(
            f"{key.hf[0]} is {value!r:.40}; a GGUF of architecture {side.row.gguf!r} always means {key.constant!r}"
        )


def to_hf(h: Hyperparams, row: Architecture, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The row's config.json keys and everything else in `extra`.

    A key that is null though its absence means something is written as null.
    """
    config: dict[str, Any] = {}
    done = {"rope_scaling", "rope_layers", "partial_rotary_factor", "text_of", "head_dim"}
    put = partial(_put_path, config)
    for key in keys_of(row, defaults):
        if not key.hf or key.via in ("rope", "rotary_dim"):
            continue
        name = key.hf[0]
        value = h.extra.get(name)
        value = value if isinstance(value, list) or not key.field else getattr(h, key.field)
        if key.via == "head_dim" and not head_dim_is_named(Side(h, row, key, defaults=defaults)):
            continue
        done.add(name)
        told = name in h.extra or lookup(defaults, key.hf)[0] is not None
        if value is not None or (told and not key.field):
            put(name, value)
    for name, value in h.extra.items():
        if name not in done:
            put(name, value)
    if any(key.via == "rope" for key in row.keys):
        config |= rope.to_hf(h, row, defaults)
    return config


def _put_path(config: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value
