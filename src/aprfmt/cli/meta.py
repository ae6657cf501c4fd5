"""`apr meta`: read and edit metadata, key by key; show, set and try the chat template."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack

import typer

import aprfmt
from aprfmt.cli.inspect_text import key_table
from aprfmt.cli.options import ForceOption, PlanOption
from aprfmt.cli.output import as_text, out, printable, progress_bar, shorten, width
from aprfmt.errors import CorruptError, UsageError
from aprfmt.io.source import exists
from aprfmt.text import format_bytes, name_filter, plural

if TYPE_CHECKING:
    from aprfmt.convert.meta import MetadataEdit
    from aprfmt.tokenizer.chat import Message

_FORMS = {
    "list": "apr meta list FILE [GLOB]",
    "get": "apr meta get FILE KEY",
    "set": "apr meta set FILE KEY=VALUE ...",
    "unset": "apr meta unset FILE KEY ...",
    "template": "apr meta template FILE; apr meta template set FILE NEW.jinja; apr meta template render FILE CHAT.json",
    "diff": "apr meta diff A B",
}


ACTIONS = {
    **{name: name for name in ("list", "get", "set", "unset", "template", "diff")},
    **dict.fromkeys(("show", "ls", "dump", "keys", "print"), "list"),
    **dict.fromkeys(("read", "value"), "get"),
    **dict.fromkeys(("edit", "add", "update", "put", "write"), "set"),
    **dict.fromkeys(("delete", "remove", "rm", "del"), "unset"),
}
"""Actions of `apr meta`, and their other names."""


class _Writing(TypedDict):
    plan: bool
    force: bool
    follow_links: bool


def meta(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="list, get, set, unset, template or diff.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FILE ...", help="The model, then keys or values.")
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Write a copy; with template: write it to this file."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="With template: the model's template of this name.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With template render: render this Jinja file instead; with set: write it."),
    ] = None,
    plan: PlanOption = False,
    force: ForceOption = False,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="In a copy, follow symlinks that point outside the folder.")
    ] = False,
) -> int:
    """Read and edit metadata by key, in .apr, GGUF, safetensors files and folders; edits are made in place.

    Of a folder, keys are those of config.json, generation_config.KEY and so on, license and data_source. A value is
    JSON or text, or @FILE for the text of a file. A chat template is written only if it renders two test conversations.

    \b
    apr meta list model.gguf 'general.*'
    apr meta get model.gguf general.name
    apr meta set model.gguf general.name='My model' --plan
    apr meta set ./Qwen2.5-0.5B rope_theta=1000000
    apr meta unset model.gguf general.url
    apr meta template model.gguf
    apr meta template set model.gguf chat.jinja
    apr meta template render model.gguf chat.json
    apr meta diff old.apr new.apr
    """
    words = words or []
    action = action if exists(action) else ACTIONS.get(action, action)
    if action not in _FORMS:
        if not exists(action):
            raise UsageError(f"unknown action {action!r}", hint=f"one of: {', '.join(_FORMS)}")
        is_edit = all("=" in word for word in words) if words else bool(name or template)
        action, words = ("set" if is_edit else "get" if words else "list"), [action, *words]
    if not words:
        raise UsageError("FILE is missing", hint=_FORMS[action])
    if action in ("get", "set", "unset") and not exists(words[0]) and exists(words[-1]):
        words = [words[-1], *words[:-1]]  # the file last
    if action == "diff":
        from aprfmt.cli.compare import diff

        out.failure_exit = 2
        return diff(*_expect(action, words, 2), metadata_only=True)
    given = {"--output": output, "--name": name, "--template": template}
    if action in ("list", "get") and (unused := next((option for option, value in given.items() if value), None)):
        raise UsageError(f"meta {action} only reads, so {unused} has no effect", hint=_FORMS["set"])
    how = _Writing(plan=plan, force=force, follow_links=follow_links)
    if action == "template":
        _template(words, output, name, template, **how)
    elif action == "list":
        file, *globs = words if len(words) < 3 else _expect(action, words, 2)
        _list(file, *globs)
    elif action == "get":
        file, key = _expect(action, words, 2)
        value = aprfmt.metadata_value(file, key)
        _print({"file": file, "key": key, "value": value}, as_text(value) + "\n")
    elif action == "set" and name is not None and template is None and len(words) == 1:
        _edit(action, [*words, f"general.name={name}"], output, **how)
    elif action == "set" and template is not None:
        _template(["set", *words, template], output, name, None, **how)
    else:
        _edit(action, words, output, **how)
    return 0


def _expect(action: str, words: list[str], n: int) -> list[str]:
    if len(words) != n:
        raise UsageError(f"meta {action} takes {plural(n, 'argument')}, not {len(words)}", hint=_FORMS[action])
    return words


def _print(body: dict[str, object], text: str) -> None:
    """A value that was asked for: its text, also with --quiet, or the JSON object."""
    if out.mode == "json":
        out.json_object(body)
    else:
        out.stream(text)


def _list(file: str, glob: str | None = None) -> None:
    found = aprfmt.metadata(file)
    matches = name_filter(glob)
    keys = [key for key in found.keys if matches(key.key)]
    out.result(replace(found, keys=keys).to_json(), key_table(keys))
    if not keys:
        out.hint(f"no key matches {glob!r}" if found.keys else "the file has no metadata")


def _edit(action: str, words: list[str], output: Path | None, **how: Unpack[_Writing]) -> None:
    from aprfmt.cli.stamp import parse_assignments

    file, *items = words
    if not items:
        raise UsageError(f"{action} needs a key", hint=_FORMS[action])
    if len(items) == 2 and action == "set" and "=" not in items[0]:
        items = ["=".join(items)]
    items = [_spelled(file, item) for item in items]
    values, types = parse_assignments(items) if action == "set" else (dict.fromkeys(items), {})
    _write(file, values, types, output, **how)


_GENERAL = (
    *("name", "author", "version", "organization", "description", "license", "url", "repo_url", "basename"),
    *("finetune", "size_label", "quantized_by", "doi", "tags", "languages"),
)


def _spelled(file: str, item: str) -> str:
    """`name=X` of a GGUF as `general.name=X`; the file of a chat template as its text."""
    key, equals, value = item.partition("=")
    if key in _GENERAL and aprfmt.detect(file) == "gguf":
        key = f"general.{key}"
    is_file = key.endswith("chat_template") and value.endswith((".jinja", ".jinja2", ".j2")) and exists(value)
    return key + equals + "@" * is_file + value


def _write(
    file: str, values: dict[str, object], types: dict[str, str], output: Path | None, **how: Unpack[_Writing]
) -> None:
    with progress_bar("writing") as progress:
        done = aprfmt.edit_metadata(file, values, output, types=types, progress=progress, **how)
    for warning in done.report.warnings:
        out.warning(warning)
    out.result(done.to_json(), _changes(done, in_place=output is None))


def _changes(done: MetadataEdit, *, in_place: bool) -> Iterator[str]:
    if in_place and done.changes and all(change.old == change.new for change in done.changes):
        yield f"{out.style(printable(done.report.output), 'bold')} is unchanged: it already has these values"
        return
    verb = out.style("would edit", "cyan") if done.report.plan else out.style("edited", "green")
    yield f"{verb} {out.style(printable(done.report.output), 'bold')}"
    room = max(20, (width() - 8) // 2 if out.data_stream.isatty() else 200)
    for change in done.changes:
        yield f"  {out.style(printable(change.key), 'bold')}"
        for mark, style, value in (("-", "red", change.old), ("+", "green", change.new)):
            text = "(not set)" if value is None else shorten(printable(as_text(value)), 2 * room)
            yield f"    {out.style(mark, style)} {text}"
    yield f"  {format_bytes(done.report.output_bytes)} {'to write' if done.report.plan else 'written'}"


# --- the chat template ---

_VERBS = {"show": "", "get": "", "print": "", "apply": "render", "format": "render"}

_GREETING: list[Message] = [{"role": "user", "content": "Hello"}]
"""The conversation to render where none is named."""


def _template(
    words: list[str], output: Path | None, name: str | None, template: str | None, **how: Unpack[_Writing]
) -> None:
    verb = words[0] if len(words) > 1 else ""
    if len(words) == 2 and exists(verb) and exists(words[1]):  # FILE NEW.jinja, FILE CHAT.json
        verb = "set" if words[1].endswith(".jinja") else "render"
        words = [verb, *words]
    elif not exists(verb):
        verb = _VERBS.get(verb, verb)
        words = words[1:] if len(words) > 1 and verb == "" else words
    if verb not in ("", "set", "render"):
        raise UsageError(f"unknown action {verb!r} for a template", hint=_FORMS["template"])
    if verb == "set":
        _, file, source = _expect("template", words, 3)
        key = "tokenizer.chat_template" + (f".{name}" if name else "")
        from aprfmt.tokenizer.template_check import TemplateRefusedError

        try:
            _write(file, {key: _text_of(source)}, {}, output, **how)
        except TemplateRefusedError as error:
            error.hint = shlex.join(["apr", "meta", "template", "render", file, "--template", source])
            raise
    elif verb == "render":
        if len(words) == 2:
            words = [*words, ""]
        _, file, chat = _expect("template", words, 3)
        messages, variables = _conversation(chat) if chat else (_GREETING, {})
        reply = messages[-1:] == [] or messages[-1].get("role") != "assistant"
        text = aprfmt.render_chat(
            file, messages, template=None if template is None else _text_of(template), name=name,
            add_generation_prompt=bool(variables.pop("add_generation_prompt", reply)), **variables,
        )  # fmt: skip
        _print({"file": file, "text": text}, text + ("\n" if out.data_stream.isatty() else ""))
    else:
        _show(words[0], name, output, force=how["force"])


def _show(file: str, name: str | None, output: Path | None, *, force: bool) -> None:
    from aprfmt.io.sink import check_target, inputs_of

    if output is not None:
        check_target(output, inputs_of([file], ".jinja"), force)
    source = aprfmt.chat_template(file, name)
    if output is None:
        _print({"file": file, "name": name, "template": source}, source + ("\n" if out.data_stream.isatty() else ""))
        return
    from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file

    write_file(str(output), FileLayout(output.name, [Literal(source.encode())]), WriteOptions(force))
    out.result({"file": file, "name": name, "template": source, "output": str(output)}, [f"wrote {output}"])


def _text_of(path: str) -> str:
    """The text of a file, as it is. Raises StorageError, UsageError."""
    from aprfmt.io.source import read_whole

    try:
        return read_whole(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8 text", path=path, offset=error.start) from None


def _conversation(path: str) -> tuple[list[Message], dict[str, object]]:
    """The messages of a JSON file, and the other variables of its object."""
    try:
        value = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not JSON: {error}", path=path) from None
    variables = {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}
    messages = variables.pop("messages", value)
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages) or not messages:
        hint = '[{"role": "user", "content": "Hello"}], or {"messages": [...], "tools": [...]}'
        raise UsageError("not a conversation", path=path, hint=hint)
    return messages, variables
