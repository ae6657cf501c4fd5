"""The metadata of a model, key by key, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from aprfmt import formats
from aprfmt.canonical.read import canonical
from aprfmt.convert.folder_edit import folder_metadata
from aprfmt.convert.gguf_edit import name_hint
from aprfmt.convert.stamp import StampReport, gguf_pairs, stamp
from aprfmt.errors import NotFoundError, RefusedError, UsageError
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.formats.stored_keys import StoredKey, stored_keys
from aprfmt.io.pipe import StartProgress
from aprfmt.model import Model
from aprfmt.text import first_few
from aprfmt.tokenizer.chat import Message
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.tokenizer.template_check import is_template_key, template_for
from aprfmt.types import PathLike

TEMPLATE_KEY = "tokenizer.chat_template"
"""The chat template's key in every container; a folder keeps it in a file."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata keys of a model.

    Attributes:
        file: the path as given.
        format: the container, such as "GGUF v3".
        keys: every key with its type and value; long lists are cut.
    """

    file: str
    format: str
    keys: Sequence[StoredKey]

    def to_json(self) -> dict[str, object]:
        """{file, format, count, keys[{key, type, count, value}]}."""
        return {"file": self.file, "format": self.format, "count": len(self.keys), "keys": [*map(asdict, self.keys)]}


@dataclass(frozen=True, slots=True)
class MetadataChange:
    """One edited key; None: not set."""

    key: str
    old: object
    new: object


@dataclass(frozen=True, slots=True)
class MetadataEdit:
    """The result of `edit_metadata`: the changes, and what was written."""

    changes: Sequence[MetadataChange]
    report: StampReport

    def to_json(self) -> dict[str, object]:
        """The object of `apr stamp --json`, with changes[{key, old, new}]."""
        return self.report.to_json() | {"changes": [asdict(change) for change in self.changes]}


def metadata(path: PathLike) -> Metadata:
    """The metadata keys of a model, as `edit_metadata` takes them.

    Keys of an `.apr`, key-value pairs of a GGUF, `__metadata__` of a safetensors file. Of a folder: config.json, the
    other configuration files as `generation_config.KEY`, and the front matter of README.md.
    """
    with formats.open(path) as model:
        return Metadata(str(path), model.label, stored_keys(model, _values(model)))


def metadata_value(path: PathLike, key: str) -> object:
    """The whole value of one key. Raises NotFoundError if it is not set.

    The keys of a GGUF also work on an `.apr`.
    """
    with formats.open(path) as model:
        found = _value(model, key)
        if found is None:
            hint = name_hint(key, [*_values(model)]) or f"list all keys: apr meta list {path}"
            raise NotFoundError(f"the key {key!r} is not set", path=model.path, hint=hint)
        return found


def edit_metadata(
    path: PathLike,
    values: Mapping[str, object],
    dst: PathLike | None = None,
    *,
    types: Mapping[str, str] | None = None,
    plan: bool = False,
    force: bool = False,
    follow_links: bool = False,
    progress: StartProgress | None = None,
) -> MetadataEdit:
    """Sets metadata keys of a model in place, or in a copy `dst`; a value of None removes the key.

    Args:
        path: an `.apr`, a GGUF, a safetensors file or a folder.
        values: the new values by key.
        dst: the copy; None: replace the model's own file, atomically.
        types: types of new GGUF keys that llama.cpp does not know: "u32", "str", ...
        plan: check and report, without writing.
        force: replace an existing `dst`.
        follow_links: copy files that symlinks refer to outside the folder.
        progress: called with the total bytes of a file that is written again.

    Raises:
        UsageError: an unknown key, a value of another type.
        RefusedError: a value with which the model could not be loaded; a chat template that does not render.
    """
    with formats.open(path) as model:
        if model.native_as(SafetensorsNative) is not None and any(map(is_template_key, values)):
            raise UsageError(
                "a safetensors file holds no chat template",
                path=model.path,
                hint=f"edit its folder: apr meta template set {model.path.parent} FILE.jinja",
            )
        before = {key: _value(model, key) for key in values}
        for key, value in values.items():
            if value is None and before[key] is None:
                raise UsageError(f"unknown key {key!r}", path=model.path, hint=name_hint(key, [*_values(model)]))
    report = stamp(
        path, dst, set=values, types=types, in_place=dst is None, plan=plan, force=force, follow_links=follow_links,
        progress=progress,
    )  # fmt: skip
    if plan:
        after = {
            key: value if value is None or not isinstance(value, str) else str(value) for key, value in values.items()
        }
    else:
        with formats.open(report.output) as model:
            after = {key: _value(model, key) for key in values}
    return MetadataEdit([MetadataChange(key, before[key], after[key]) for key in values], report)


def chat_template(path: PathLike, name: str | None = None) -> str:
    """The source of a model's chat template, or of its template `name`. Raises NotFoundError without one."""
    with formats.open(path) as model:
        return _template(model, name)


def render_chat(
    path: PathLike,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    name: str | None = None,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """A conversation as text, by a model's chat template or by the source `template`, with the model's special tokens.

    Args:
        path: the model.
        messages: [{"role": "user", "content": "..."}, ...].
        template: a Jinja template to use instead of the model's.
        name: the model's template of this name.
        add_generation_prompt: whether the beginning of an answer follows.
        variables: further variables of the template, such as tools.

    Raises:
        NotFoundError: the model has no chat template.
        RefusedError, UnsupportedError: the template rejects the conversation, or cannot be rendered.
    """
    with formats.open(path) as model:
        source = _template(model, name) if template is None else template
        made = template_for(source, model.tokenizer)
    return made.render(messages, add_generation_prompt=add_generation_prompt, **variables)


def _template(model: Model, name: str | None) -> str:
    tokenizer = model.tokenizer
    named = {} if tokenizer is None else tokenizer.chat_templates
    source = named.get(name) if name is not None else _default(tokenizer)
    if source is not None:
        return source
    if named:
        hint = f"choose one with --name: {first_few(named, 8)}"
    else:
        hint = f"set one: apr meta template set {model.path} chat_template.jinja"
    raise NotFoundError("the model has no chat template" + (f" {name!r}" if name else ""), path=model.path, hint=hint)


def _default(tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.chat_template


def _values(model: Model) -> Mapping[str, object]:
    native = model.native_as(HfNative)
    if native is None:
        return model.metadata
    if native.alone:
        raise RefusedError(
            "a single file of a folder has no metadata of its own", path=model.path, hint=f"name {native.folder}"
        )
    return folder_metadata(model)


def _value(model: Model, key: str) -> object:
    values = _values(model)
    if key in values:
        return values[key]
    if is_template_key(key):
        tokenizer = model.tokenizer
        name = key.removeprefix(TEMPLATE_KEY + ".") if key.startswith(TEMPLATE_KEY + ".") else None
        return tokenizer.chat_templates.get(name) if tokenizer and name else _default(tokenizer)
    if model.native_as(HfNative) is not None:
        return _inner(values, key)
    if model.convention == "apr":
        found = {name: value for name, _, value in gguf_pairs(canonical(model, allow_unmapped=True))}
        return found.get(key)
    return None


def _inner(values: Mapping[str, object], key: str) -> object:
    """The value of a dotted key in nested objects."""
    found: object = values
    for step in key.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
