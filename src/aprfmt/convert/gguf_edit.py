"""Edits the keys of a GGUF without moving the tensor data."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from aprfmt.arch.gguf_keys import key_problems
from aprfmt.arch.row import Architecture
from aprfmt.arch.scopes import full_key, keys_of
from aprfmt.arch.table import find_gguf
from aprfmt.canonical.checks import check_before_writing
from aprfmt.canonical.read import canonical
from aprfmt.errors import AprError, OutOfMemoryError, RefusedError, StorageError, UsageError
from aprfmt.formats.gguf import GgufNative, GgufPart, model_of, read_pairs
from aprfmt.formats.gguf_fields import GgufType, KvMapping
from aprfmt.formats.gguf_write import ValueType, encode_kv
from aprfmt.io.overwrite import overwrite
from aprfmt.io.pipe import FileLayout, Literal, Stream, WriteOptions, Zeros, source_jobs, write_file
from aprfmt.io.source import padding
from aprfmt.model import Model
from aprfmt.provenance.provenance import TEXT_LISTS, TEXT_NAMES
from aprfmt.tokenizer import ggml

TYPES: dict[str, GgufType] = {
    "u8": GgufType.UINT8, "i8": GgufType.INT8, "u16": GgufType.UINT16, "i16": GgufType.INT16,
    "u32": GgufType.UINT32, "i32": GgufType.INT32, "u64": GgufType.UINT64, "i64": GgufType.INT64,
    "f32": GgufType.FLOAT32, "f64": GgufType.FLOAT64, "bool": GgufType.BOOL, "str": GgufType.STRING,
}  # fmt: skip
"""Command-line names of types; with the suffix `[]`, an array."""

# Keys that cannot be edited alone: data offsets, and those tied to rows of tensors.
_FIXED = {
    "general.alignment": "sets where the tensor data begins",
    "split.no": "is the index of this part of a split model",
    "split.count": "is the number of parts",
    "split.tensors.count": "is the number of tensors of all parts",
}
# For every family with rotary positions, though no row names them.
_ROPE = {
    **dict.fromkeys(("rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor"), "f32"),
    **{"rope.scaling.type": "str", "rope.scaling.original_context_length": "u32", "rope.scaling.finetuned": "bool"},
}
_INTEGERS = {
    kind: (-(1 << bits - 1) * signed, (1 << bits - signed) - 1)
    for kind, bits, signed in (
        *((kind, 8 << i, 0) for i, kind in enumerate((TYPES["u8"], TYPES["u16"], TYPES["u32"], TYPES["u64"]))),
        *((kind, 8 << i, 1) for i, kind in enumerate((TYPES["i8"], TYPES["i16"], TYPES["i32"], TYPES["i64"]))),
    )
}


class Text(str):
    """A value as typed, to be parsed as the type of its key: `7`, `true`, `some text`, `[1, 2]`."""

    __slots__ = ()


def edit(
    model: Model,
    patch: Mapping[str, object],
    types: Mapping[str, str],
    target: str,
    options: WriteOptions,
    *,
    in_place: bool,
    plan: bool,
) -> int:
    """Writes the GGUF `model` as `target` with the keys of `patch`, None for removed ones; returns the bytes written.

    With `plan` they are only counted.

    With `in_place` a single sector of the header is overwritten if nothing else differs, otherwise a copy replaces the
    file.
    Existing keys keep type and position; `types` gives those of new ones (see TYPES).

    Raises UsageError for a key that llama.cpp does not know, or a value of the wrong type; RefusedError if llama.cpp
    would refuse the result.
    """
    native = model.native_as(GgufNative)
    assert native is not None
    if len(native.parts) > 1:
        raise RefusedError(
            f"the model is split into {len(native.parts)} files",
            path=model.path,
            hint="join them first: apr convert FILE -o ONE.gguf",
        )
    part = native.parts[0]
    head = _edited(model, part, patch, types)
    _check(model, part, head, patch)
    n_padding = padding(len(head), part.alignment)
    if in_place and len(head) + n_padding == part.data_start:
        start, changed = difference(part.source.read(0, part.data_start), head + bytes(n_padding))
        if len(changed) <= SECTOR:
            if changed and not plan:
                model.check_unchanged()
                overwrite(target, start, changed)
            return len(changed)
    n_rest = part.source.size - part.data_start
    rest = Stream(n_rest, lambda: source_jobs(part.source, part.data_start, n_rest))
    layout = FileLayout(os.path.basename(target), [Literal(head), Zeros(n_padding), rest])
    if not plan:
        write_file(target, layout, options)
    return layout.n_bytes


def _edited(model: Model, part: GgufPart, patch: Mapping[str, object], types: Mapping[str, str]) -> bytes:
    """The header with the keys of `patch`, without trailing padding."""
    row = find_gguf(part.kv, [tensor.name for tensor in part.tensors])
    entries = {key: bytes(part.kv.raw(key)) for key in part.kv}
    for key, value in patch.items():
        if key in _FIXED:
            raise UsageError(f"{key!r} cannot be edited: it {_FIXED[key]}", path=model.path)
        if value is None:
            if entries.pop(key, None) is None:
                raise UsageError(f"unknown key {key!r}", path=model.path, hint=name_hint(key, list(entries)))
            continue
        kind = _type_of(key, part.kv, row, types)
        entries[key] = encode_kv(key, kind, _read(key, kind, value))
    if not set(types) <= set(patch):
        raise UsageError(f"a type was given for {min(set(types) - set(patch))!r}, which is not set")
    infos = part.source.read(part.infos[0], part.infos[1] - part.infos[0])
    return b"".join(
        (b"GGUF", struct.pack("<IQQ", part.version, len(part.tensors), len(entries)), *entries.values(), infos)
    )


# --- types and values ---


def _type_of(key: str, kv: KvMapping, row: Architecture | None, types: Mapping[str, str]) -> ValueType:
    """The given type, else that of the existing key, else llama.cpp's. Raises UsageError."""
    if key in types:
        return parse_type(types[key])
    if key in kv.entries:
        entry = kv.entries[key]
        if entry.elem_type is GgufType.ARRAY:
            raise UsageError(f"{key!r} is an array of arrays, which cannot be set")
        return entry.type if entry.elem_type is None else (GgufType.ARRAY, entry.elem_type)
    return _type_by_name(key, row, f"to set it anyway, add its type: --set '{key}:str=...'", kv)


def _type_by_name(key: str, row: Architecture | None, hint: str, others: Collection[str] = ()) -> ValueType:
    """The type as which llama.cpp reads a key. Raises UsageError if it does not read it."""
    known = dict(_known(row))
    if key in known:
        return known[key]
    if key.startswith(("general.base_model.", "general.dataset.")):
        return GgufType.UINT32 if key.endswith(".count") else GgufType.STRING
    if key.startswith("tokenizer.chat_template."):
        return GgufType.STRING
    raise UsageError(
        f"{key!r} has no effect: llama.cpp does not read it", hint=name_hint(key, [*known, *others]) or hint
    )


def read_value(key: str, value: object, row: Architecture | None) -> object:
    """`value` as a GGUF of the family stores it under `key`. Raises UsageError."""
    return _read(key, _type_by_name(key, row, "list the keys with apr inspect --metadata"), value)


def parse_type(word: str) -> ValueType:
    """The type of that name, as in TYPES. Raises UsageError."""
    kind = TYPES.get(word.removesuffix("[]"))
    if kind is None:
        raise UsageError(f"unknown type {word!r}", hint=f"types: {', '.join(TYPES)}, and arrays such as u32[]")
    return (GgufType.ARRAY, kind) if word.endswith("[]") else kind


def _known(row: Architecture | None) -> Iterator[tuple[str, ValueType]]:
    """Keys that llama.cpp reads, or that its converter writes for every model, and their types."""
    yield from ((f"general.{name}", GgufType.STRING) for name in (*TEXT_NAMES, "architecture", "type"))
    yield from ((key, (GgufType.ARRAY, GgufType.STRING)) for key in TEXT_LISTS.values())
    yield from ((f"general.{name}", GgufType.UINT32) for name in ("file_type", "quantization_version"))
    for name, kind in ggml.known_keys():
        yield name, parse_type(kind)
    if row is not None:
        yield from ((full_key(row, suffix), parse_type(kind)) for suffix, kind in _ROPE.items())
        yield from ((full_key(row, key.gguf), parse_type(key.kind)) for key in keys_of(row, {}) if key.gguf)


def name_hint(key: str, known: list[str]) -> str | None:
    """A hint with the most similar key of the same kind."""
    kind, _, name = key.rpartition(".")
    names = {other.removeprefix(kind + "."): other for other in known if other.startswith(kind + ".")}
    near = get_close_matches(name, list(names), 1, 0.7)
    return f"did you mean {names[near[0]]}?" if near else None


def _read(key: str, kind: ValueType, value: object) -> object:
    """`value` converted to the type. Raises UsageError."""
    if isinstance(value, Text):
        value = _parsed(kind, value)
    if isinstance(kind, tuple):
        if not isinstance(value, list | tuple):
            raise UsageError(f"{key!r} is a list, not {value!r:.40}", hint=f"--set '{key}=[...]'")
        return [_read(key, kind[1], item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        fits = isinstance(value, int) and is_number and low <= value <= high
    elif kind in (GgufType.FLOAT32, GgufType.FLOAT64):
        fits = is_number
    else:
        fits = isinstance(value, bool if kind is GgufType.BOOL else str)
    if not fits:
        hint = "set another type with KEY:TYPE="
        raise UsageError(f"{value!r:.40} is not of type {kind.name}, the type of {key!r}", hint=hint)
    return value


def _parsed(kind: ValueType, text: str) -> object:
    """Parses typed text as JSON; for string keys the text itself, unless it is a JSON string."""
    value = parse_text(text)
    return value if kind is not GgufType.STRING or isinstance(value, str) else str(text)


def parse_text(text: str) -> object:
    """Parses typed text as JSON, or returns it unchanged. Raises UsageError for invalid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if text[:1] in ('"', "{", "["):
            raise UsageError(
                f"neither JSON nor plain text: {text!r:.60}", hint="write a string without quotes"
            ) from None
        return str(text)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


# --- what the file then is ---


def _check(model: Model, part: GgufPart, head: bytes, patch: Mapping[str, object]) -> None:
    """Refuses keys that contradict the tensors, unless the existing ones already do."""
    row = find_gguf(part.kv, [tensor.name for tensor in part.tensors])
    own = ("general.architecture", f"{row.gguf}." if row is not None else "split.")
    of_network = any(key.startswith(own) for key in patch)
    of_vocabulary = any(key in ggml.VOCABULARY_KEYS for key in patch)
    if not (of_network or of_vocabulary):
        return
    after = replace(part, kv=read_pairs(head, str(model.path)))
    found: list[set[str]] = []
    for state in (part, after):
        network = _network_problems(model, state) if of_network else ()
        found.append({*network, *(_vocabulary_problems(state) if of_vocabulary else ())})
    if appeared := found[1] - found[0]:
        raise RefusedError(
            f"llama.cpp would not load the GGUF: {min(appeared)}", path=model.path, hint="the tensors do not match it"
        )


def _network_problems(model: Model, part: GgufPart) -> Iterator[str]:
    shapes = {tensor.name: tensor.shape for tensor in part.tensors}
    # The vocabulary, whose lists take longest to read, does not matter.
    kv = part.kv.without(lambda key: key.startswith("tokenizer."))
    row = find_gguf(kv, list(shapes))
    if row is None:
        yield "general.architecture names an unknown architecture"
        return
    try:
        check_before_writing(canonical(model_of(model.path, [replace(part, kv=kv)])), False)
    except (StorageError, OutOfMemoryError):
        raise
    except AprError as error:
        yield error.message
    yield from (f"{key} {problem}" for key, problem in key_problems(row, kv, shapes))


def _vocabulary_problems(part: GgufPart) -> Iterator[str]:
    rows = next((tensor.shape[0] for tensor in part.tensors if tensor.name == "token_embd.weight"), None)
    word = str(part.kv.get("general.architecture"))
    yield from (f"{key} {problem}" for key, problem in ggml.key_problems(part.kv, word, rows))


SECTOR = 512
"""Bytes that a disk writes at once, or not at all."""


def difference(old: bytes, new: bytes) -> tuple[int, bytes]:
    """The first difference of two headers of equal length, in whole sectors, and the new content up to the last one."""
    starts = [
        start for start in range(0, len(new), SECTOR) if old[start : start + SECTOR] != new[start : start + SECTOR]
    ]
    return (starts[0], new[starts[0] : starts[-1] + SECTOR]) if starts else (0, b"")
