"""Edits the JSON files, the model card and the chat template of a folder, and the metadata of a safetensors file.

KEY                       of config.json; dots lead into objects: rope_scaling.factor
generation_config.KEY     of generation_config.json, and so for every JSON file of the folder
chat_template             chat_template.jinja, or the field of tokenizer_config.json that holds it
license, data_source, ... front matter of README.md
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

from aprfmt import formats
from aprfmt.canonical.checks import check_before_writing
from aprfmt.canonical.read import canonical
from aprfmt.convert.gguf_edit import SECTOR, Text, difference, name_hint, parse_text
from aprfmt.errors import AprError, OutOfMemoryError, RefusedError, StorageError, UsageError, storage_errors
from aprfmt.formats.hf_files import parse_object
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.safetensors import METADATA_KEY
from aprfmt.io.overwrite import overwrite
from aprfmt.io.pipe import FileLayout, Literal, Stream, WriteOptions, source_jobs, write_file, write_layout
from aprfmt.io.sink import AtomicFile, AtomicFolder
from aprfmt.io.source import Source, padding, unwatched
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.provenance.model_card import CARD, from_card, front_matter, to_card, with_front_matter
from aprfmt.tokenizer.template_check import is_template_key
from aprfmt.trust.signature import FOLDER_SIGNATURE
from aprfmt.types import Json, JsonObject

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_MAIN = (_CONFIG, "adapter_config.json", "params.json")
_ARCHITECTURE = {"hf_architecture": "architectures", "hf_model_type": "model_type", "architecture": "model_type"}


def folder_metadata(model: Model) -> dict[str, object]:
    """The keys of a folder as they are edited: those of config.json, then of the other JSON files and the card."""
    native = model.native_as(HfNative)
    assert native is not None
    found: dict[str, object] = {}
    for name in _json_files(native):
        prefix = "" if name == _main(native) else name.removesuffix(".json") + "."
        found |= {prefix + key: value for key, value in _read_json(native, name).items()}
    if (raw := native.text_file(_TEMPLATE)) is not None:
        found["chat_template"] = raw.decode("utf-8", "replace")
    if (card := native.text_file(CARD)) is not None:
        found |= {f"README.{key}": value for key, value in front_matter(card).items()}
        known = provenance.card_fields(card)
        found |= {key: known[key] for key in provenance.FLAGS if key in known and key not in found}
    return found


def _json_files(native: HfNative) -> list[str]:
    """The files whose keys can be edited, the main configuration first; no vocabularies and no indexes."""
    names = [path.as_posix() for path in native.other_files]
    names = [name for name in names if name.endswith("config.json") and "/" not in name]
    main = _main(native)
    return [*([main] if main in names else []), *(name for name in names if name != main)]


def _main(native: HfNative) -> str:
    names = {path.as_posix() for path in native.other_files}
    return next((name for name in _MAIN if name in names), _CONFIG)


def _read_json(native: HfNative, name: str) -> JsonObject:
    raw = native.text_file(name)
    return {} if raw is None else parse_object(raw, str(native.folder / name), "the file", unique=False)


def edit_folder(
    model: Model, patch: Mapping[str, object], target: str, options: WriteOptions, *, in_place: bool, plan: bool
) -> int:
    """Writes the folder of `model` as `target` with the keys of `patch`, None for removed ones; returns its bytes.

    All changed files appear together. Raises UsageError for an unknown key or a value of another type; RefusedError if
    the edited config.json contradicts the tensors.
    """
    native = model.native_as(HfNative)
    assert native is not None
    changed = _edited_files(model, native, patch)
    _check_config(model, native, changed)
    n_bytes = sum(len(data) for data in changed.values() if data is not None)
    if plan:
        return n_bytes
    with ExitStack() as stack:
        layouts = [FileLayout(name, [Literal(data)]) for name, data in changed.items() if data is not None]
        if not in_place:
            layouts += list(_copies(native, changed, stack))
        gone = [name for name, data in changed.items() if data is None] if in_place else []
        _publish(target, layouts, gone, options, is_whole=not in_place)
        return sum(layout.n_bytes for layout in layouts)


def _publish(target: str, layouts: list[FileLayout], gone: list[str], options: WriteOptions, *, is_whole: bool) -> None:
    with AtomicFolder(target, force=options.force, stale=gone, last=_CONFIG) as folder:
        for layout in layouts:
            path = folder / layout.name
            with storage_errors(path.parent):
                os.makedirs(path.parent, exist_ok=True)
            with AtomicFile(path, force=True, n_bytes=layout.n_bytes, fsync=options.fsync) as sink:
                write_layout(layout, sink, None, options.flow)
        if is_whole:
            options.confirm(str(folder))


def _copies(native: HfNative, changed: Mapping[str, object], stack: ExitStack) -> Iterator[FileLayout]:
    for name in (*native.own_names(), *native.further_files()):
        if name not in changed and name != FOLDER_SIGNATURE:  # it does not cover what is changed
            yield FileLayout(name, [_whole(stack.enter_context(Source.open(native.folder / name)))])


def _whole(source: Source, start: int = 0) -> Stream:
    n_bytes = source.size - start
    return Stream(n_bytes, lambda: source_jobs(source, start, n_bytes))


# --- the edited files ---


def _edited_files(model: Model, native: HfNative, patch: Mapping[str, object]) -> dict[str, bytes | None]:
    """The changed files by name; None for one that is removed."""
    documents: dict[str, JsonObject] = {}
    changed: dict[str, bytes | None] = {}
    card = {key: value for key, value in patch.items() if key in provenance.FLAGS}
    for key, value in patch.items():
        if key in card:
            continue
        if is_template_key(key):
            _set_template(native, value, documents, changed)
            continue
        name, path = _place_of(native, _ARCHITECTURE.get(key, key))
        document = documents.setdefault(name, _read_json(native, name))
        listed = [value] if key == "hf_architecture" else value
        _set(document, path, listed, key, model)
    for name, document in documents.items():
        changed[name] = _dumped(document, native.text_file(name))
    if card:
        changed[CARD] = _edited_card(native.text_file(CARD) or b"", card)
    return {name: data for name, data in changed.items() if data is None or data != native.text_file(name)}


def _place_of(native: HfNative, key: str) -> tuple[str, list[str]]:
    """The file that holds a key, and the path in its object."""
    stem, dot, rest = key.partition(".")
    name = f"{stem}.json"
    if dot and (name in _json_files(native) or name == _GENERATION):
        return name, _path(_read_json(native, name), rest)
    if dot and stem.endswith("config"):
        raise UsageError(f"the folder has no {name}", path=native.folder)
    main = _main(native)
    return main, _path(_read_json(native, main), key)


def _path(document: JsonObject, key: str) -> list[str]:
    """A dotted key as keys of nested objects; a key that has the dots itself is one."""
    first, dot, _ = key.partition(".")
    return key.split(".") if dot and key not in document and isinstance(document.get(first), dict) else [key]


def _set(document: JsonObject, path: list[str], value: object, key: str, model: Model) -> None:
    """Sets or removes a value. Raises UsageError for an unknown key to remove, and for another type."""
    for step in path[:-1]:
        inner = document.get(step)
        if not isinstance(inner, dict):
            raise UsageError(f"unknown key {key!r}", path=model.path)
        document = inner
    last = path[-1]
    if value is None:
        if document.pop(last, None) is None:
            raise UsageError(f"unknown key {key!r}", path=model.path, hint=name_hint(key, list(folder_metadata(model))))
        return
    old = document.get(last)
    new = parse_text(value) if isinstance(value, Text) else value
    if isinstance(old, str) and isinstance(value, Text):
        new = str(value)
    if old is not None and _kind(old) != _kind(new):
        raise UsageError(
            f"{key!r} is {_kind(old)}, not {_kind(new)}: {new!r:.40}",
            path=model.path,
            hint="to change its type, remove it first: apr meta unset",
        )
    document[last] = float(new) if isinstance(old, float) and isinstance(new, int) else cast("Json", new)


def _kind(value: object) -> str:
    names: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "true or false"), ((int, float), "a number"), (str, "a string"), ((list, tuple), "a list"),
    )  # fmt: skip
    return next((name for kind, name in names if isinstance(value, kind)), "an object")


def _dumped(document: JsonObject, old: bytes | None) -> bytes:
    """The object as JSON in the style of the old file."""
    text = (old or b"{\n  }\n").decode("utf-8")
    margin = re.match(r"\{\s*\n([ \t]+)", text)
    indent = None if margin is None else margin[1] if "\t" in margin[1] else len(margin[1])
    escaped = old is not None and text.isascii() and "\\u" in text
    return _encoded(document, indent, escaped=escaped) + (b"\n" if text.endswith("\n") else b"")


def _encoded(
    values: Mapping[str, object],
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    *,
    escaped: bool = False,
) -> bytes:
    """JSON in UTF-8; with escapes if asked for, or if a text is not valid Unicode."""
    with suppress(UnicodeEncodeError):
        return json.dumps(values, indent=indent, ensure_ascii=escaped, separators=separators).encode()
    return json.dumps(values, indent=indent, separators=separators).encode()


def _set_template(
    native: HfNative, value: object, documents: dict[str, JsonObject], changed: dict[str, bytes | None]
) -> None:
    """Puts a chat template where the folder has it, else in a file of its own."""
    settings = documents.get(_TOKENIZER) or _read_json(native, _TOKENIZER)
    if native.text_file(_TEMPLATE) is None and isinstance(settings.get("chat_template"), str):
        if value is None:
            del settings["chat_template"]
        else:
            settings["chat_template"] = str(value)
        documents[_TOKENIZER] = settings
        return
    if value is None and native.text_file(_TEMPLATE) is None:
        raise UsageError("the folder has no chat template", path=native.folder)
    changed[_TEMPLATE] = None if value is None else str(value).encode()


def _edited_card(card: bytes, fields: Mapping[str, object]) -> bytes:
    """README.md with other provenance in its front matter."""
    stated = {key: str(value) for key, value in fields.items() if value is not None}
    general = from_card({"datasets": stated["data_source"].split(",")})[1] if "data_source" in stated else None
    made = front_matter(to_card(stated, general) or b"") if stated else {}
    removed = {"license": ("license", "license_name", "license_link"), "data_source": ("datasets", "data_source")}
    for key in fields:
        for name in removed.get(key, (key,)):
            card = with_front_matter(card, name, made.get(name))
    return card


def _check_config(model: Model, native: HfNative, changed: Mapping[str, bytes | None]) -> None:
    """Refuses a configuration that contradicts the tensors, unless the old one does already."""
    if _CONFIG not in changed:
        return
    with tempfile.TemporaryDirectory(prefix="apr-") as scratch, unwatched():
        names = {*native.own_names()} - {*changed}
        for name in sorted(names):
            place = Path(scratch, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to((native.folder / name).absolute())
        for name, data in changed.items():
            if data is not None:
                Path(scratch, name).write_bytes(data)
        with formats.open(scratch) as after:
            problem = _problem(after)
    if problem is not None and problem != _problem(model):
        raise RefusedError(f"the edited config.json does not fit the tensors: {problem}", path=model.path)


def _problem(model: Model) -> str | None:
    try:
        check_before_writing(canonical(model), False)
    except (StorageError, OutOfMemoryError):
        raise
    except AprError as error:
        return f"{error.tensor}: {error.message}" if error.tensor else error.message
    return None


# --- safetensors ---


def edit_safetensors(
    model: Model, patch: Mapping[str, object], target: str, options: WriteOptions, *, in_place: bool, plan: bool
) -> int:
    """Writes the safetensors file of `model` as `target` with other `__metadata__`; returns the bytes written.

    One sector of the header is overwritten where no other one differs, else a copy takes the file's place.
    """
    (source,) = model.sources
    old_bytes = int.from_bytes(source.read(0, 8), "little")
    header = parse_object(source.read(8, old_bytes), source.path, "the header")
    stated = dict(cast("dict[str, str]", header.get(METADATA_KEY) or {}))
    for key, value in patch.items():
        if value is not None:
            stated[key] = value if isinstance(value, str) else json.dumps(value)
        elif stated.pop(key, None) is None:
            raise UsageError(f"unknown key {key!r}", path=model.path, hint=name_hint(key, list(stated)))
    others = {key: value for key, value in header.items() if key != METADATA_KEY}
    first, rest = _compact({METADATA_KEY: stated} if stated else {}), _compact(others)
    comma = b"," if stated and others else b""
    length = 2 + len(first) + len(comma) + len(rest)
    n_bytes = old_bytes if in_place and length <= old_bytes else length + padding(length, 8)
    # Blanks stand behind the metadata, so that a later edit does not move the rest of the header.
    new = n_bytes.to_bytes(8, "little") + b"{" + first + b" " * (n_bytes - length) + comma + rest + b"}"
    if n_bytes == old_bytes and in_place:
        start, sectors = difference(source.read(0, 8 + old_bytes), new)
        if len(sectors) <= SECTOR:
            if sectors and not plan:
                model.check_unchanged()
                overwrite(target, start, sectors)
            return len(sectors)
    layout = FileLayout(os.path.basename(target), [Literal(new), _whole(source, 8 + old_bytes)])
    if not plan:
        write_file(target, layout, options)
    return layout.n_bytes


def _compact(values: Mapping[str, object]) -> bytes:
    """The inside of a JSON object, without blanks."""
    return _encoded(values, separators=(",", ":"))[1:-1]
