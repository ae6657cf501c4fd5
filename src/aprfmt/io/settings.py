"""Settings files: a table of options as TOML, YAML or JSON, and YAML with line numbers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import NotFoundError, UsageError, storage_errors
from aprfmt.limits import MAX_SETTINGS_BYTES, MAX_SETTINGS_DEPTH
from aprfmt.types import PathLike

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True, slots=True)
class SettingsNode:
    """A value of a YAML file and its line number; 0 if it does not come from a file."""

    value: object
    line: int = 0

    def error(self, message: str, hint: str | None = None) -> UsageError:
        """A UsageError about this value."""
        return UsageError(f"line {self.line}: {message}" if self.line else message, hint=hint)

    def mapping(self, what: str) -> dict[str, SettingsNode]:
        """Its entries. Raises UsageError unless it is a mapping."""
        if not isinstance(self.value, dict):
            raise self.error(f"{what} must be a mapping, not {shown(self.value)}")
        return self.value

    def items(self, what: str) -> list[SettingsNode]:
        """Its items. Raises UsageError unless it is a list with items."""
        if not isinstance(self.value, list) or not self.value:
            raise self.error(f"{what} must be a list with items, not {shown(self.value)}")
        return self.value

    def plain(self) -> object:
        """The value without line numbers."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value


def shown(value: object) -> str:
    """The value, abbreviated."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
    return f"{value!r:.40}"


def read_settings(path: PathLike) -> dict[str, object]:
    """Reads the table in a .toml, .yaml or .json file; an empty file is an empty table.

    Raises NotFoundError, StorageError; UsageError for another suffix, anything but a table, a duplicate key, and more
    than MAX_SETTINGS_BYTES or MAX_SETTINGS_DEPTH levels.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (".yaml", ".yml"):
        found = read_yaml(path).plain() or {}
    elif suffix in (".toml", ".json"):
        text = read_text(path)
        try:
            found = tomllib.loads(text) if suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"not valid {suffix[1:].upper()}: {str(error)[:200]}", path=path) from error
    else:
        raise UsageError("the option file must be .toml, .yaml or .json", path=path)
    if not isinstance(found, dict):
        raise UsageError(f"expected a table of options, not {shown(found)}", path=path)
    return found


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r:.40}")
    return found


def read_text(path: PathLike, what: str = "file") -> str:
    """Reads a small text file, which errors call `what`. Raises NotFoundError, StorageError, UsageError."""
    with storage_errors(path):
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_SETTINGS_BYTES + 1)
        except FileNotFoundError:
            raise NotFoundError(f"{what} not found", path=path) from None
    if len(data) > MAX_SETTINGS_BYTES:
        raise UsageError(f"a {what} is limited to {MAX_SETTINGS_BYTES} bytes", path=path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not valid UTF-8 at byte {error.start}", path=path) from error


def read_yaml(path: PathLike, what: str = "file") -> SettingsNode:
    """Reads a small YAML file, None if it is empty. Raises as `read_text`, and UsageError with the line."""
    import yaml

    text = read_text(path, what)
    try:
        _check_events(text)
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        return SettingsNode(None) if tree is None else _node(tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise UsageError(f"{where}not valid YAML: {problem}", path=path) from error
    except UsageError as error:
        raise UsageError(error.message, path=path, hint=error.hint) from None


def _check_events(text: str) -> None:
    """Refuses aliases and deep nesting before anything is built: a few bytes of them can expand to gigabytes."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if getattr(event, "anchor", None) is not None:
            raise UsageError(
                f"line {line}: anchors and aliases are not supported", hint="write the value in place of the alias"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_SETTINGS_DEPTH:
            raise UsageError(f"line {line}: nested deeper than {MAX_SETTINGS_DEPTH} levels")


def _node(tree: yaml.Node) -> SettingsNode:
    import yaml

    line = tree.start_mark.line + 1
    if isinstance(tree, yaml.MappingNode):
        out: dict[str, SettingsNode] = {}
        for key, value in tree.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"line {line}: a key must be a plain string")
            if key.value in out:
                raise UsageError(f"line {key.start_mark.line + 1}: duplicate key {key.value!r:.40}")
            out[key.value] = _node(value)
        return SettingsNode(out, line)
    if isinstance(tree, yaml.SequenceNode):
        return SettingsNode([_node(item) for item in tree.value], line)
    loader = yaml.SafeLoader("")
    try:
        return SettingsNode(loader.construct_object(tree), line)
    except ValueError as error:
        raise UsageError(f"line {line}: {error}") from error
    finally:
        loader.dispose()
