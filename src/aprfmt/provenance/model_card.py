"""Model cards: the front matter of README.md, its mapping to `general.*` keys, and writing a card.

A card is untrusted text, so it is parsed within limits, and problems become warnings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from aprfmt.errors import CorruptError, LimitError, NotFoundError, UnknownFormatError
from aprfmt.io.source import Source
from aprfmt.text import CONTROLS

CARD = "README.md"
MAX_CARD_BYTES = 1 << 20
MAX_FRONT_MATTER_BYTES = 64 << 10
MAX_DEPTH = 16


CardFields: TypeAlias = tuple[dict[str, object], dict[str, object]]
"""Typed APR fields, and untyped ones (`general`, see provenance)."""

HUB = "https://huggingface.co/"

ENTRY_FIELDS = (*("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url"),)
MAX_ENTRIES = 4096
"""Maximum number of base models, data sets, tags or languages; a longer list is refused."""

# Typed field or name in `general` -> card keys in the order in which llama.cpp reads them.
_CARD_INFO = {
    "name": ("name", "model_name"), "author": ("author", "model_author", "model_creator"),
    "version": ("version", "model_version"), "description": ("description", "model_description"),
    "source": ("url", "model_url"), "data_source": ("data_source",), "data_license": ("data_license",),
}  # fmt: skip
_CARD_GENERAL = {
    "license.name": ("license_name",),
    "license.link": ("license_link",),
    "organization": ("organization", "model_organization"),
    "finetune": ("finetune", "model_finetune"),
    "basename": ("basename", "model_basename", "model_type"),
    "size_label": ("size_label", "model_size_label"),
    "source.doi": ("doi", "model_doi"),
    "source.uuid": ("uuid", "model_uuid"),
    "source.repo_url": ("repo_url", "model_repo_url"),
}
_CARD_ENTRIES = {
    "base_models": ("base_model", "base_models", "base_model_sources"),
    "datasets": ("datasets", "dataset", "dataset_sources"),
}

# Tasks of text models: the last tag that is one of them is a card's pipeline_tag.
_TASKS = (
    *("text-generation", "text2text-generation", "image-text-to-text", "feature-extraction"),
    *("fill-mask", "sentence-similarity", "text-classification", "text-ranking"),
)

_REPO = re.compile(r"(?P<org>[\w][\w.-]*)/(?P<name>[\w][\w.-]*)", re.ASCII)
_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_UNTOUCHED = re.compile(r"v\d+(\.\d+)*|\d.*")

_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(f"[{CONTROLS}]")
_MARKUP = re.compile(r"[\\`\[\]<>|]|&(?=#?\w+;)|:(?=//)|(?<=www)\.", re.IGNORECASE)
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", ":": "&#58;", ".": "&#46;"}
_FENCE = "---"
_NULLS = ("", "~", "null", "Null", "NULL")


def read_card(folder: Path) -> tuple[dict[str, object], list[str]]:
    """The front matter of the card in `folder`, and a warning if it cannot be read.

    Values are str, list and dict only: `no` is the language, `1.0` the version as typed. Raises StorageError: a license
    must not get lost because a disk failed.
    """
    try:
        with Source.open(folder / CARD) as source:
            data = source.read(0, min(source.size, MAX_CARD_BYTES + 1))
    except NotFoundError:
        return {}, []
    except UnknownFormatError as error:
        return {}, [f"{CARD} cannot be read: {error.message}"]
    return parse_card(data)


def parse_card(data: bytes) -> tuple[dict[str, object], list[str]]:
    """Parses the bytes of a card."""
    try:
        return front_matter(data), []
    except (CorruptError, LimitError) as error:
        return {}, [f"{CARD} is ignored for provenance: {error.message}"]


def front_matter(data: bytes) -> dict[str, object]:
    """Front matter of the card `data`, {} without any. Raises LimitError, CorruptError."""
    if len(data) > MAX_CARD_BYTES:
        raise LimitError(f"a model card is limited to {MAX_CARD_BYTES} bytes")
    if not data.removeprefix(b"\xef\xbb\xbf").startswith(_FENCE.encode()):
        return {}
    try:
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptError(f"not valid UTF-8 at byte {error.start}") from error
    if lines[0].rstrip() != _FENCE:
        return {}
    ends = (i for i, line in enumerate(lines) if i and line.rstrip() == _FENCE)
    end = next(ends, None)
    if end is None:
        raise CorruptError("its front matter is not closed")
    # YAML forbids tabs as indentation, yet cards in use have them.
    text = "\n".join(lines[1:end]).replace("\t", "  ")
    if len(text.encode()) > MAX_FRONT_MATTER_BYTES:
        raise LimitError(f"front matter is limited to {MAX_FRONT_MATTER_BYTES} bytes")
    return _load(text)


def _load(text: str) -> dict[str, object]:
    """Parses YAML to str, list and dict; no aliases, no object tags, limited depth."""
    import yaml

    try:
        _check_events(text)
        value = yaml.load(text, Loader=yaml.BaseLoader)  # constructs only str, list and dict
    except (CorruptError, LimitError):
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise CorruptError(f"its front matter is not valid YAML: {problem}") from error
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise CorruptError("its front matter is not a mapping")
    return {key: item for key, item in value.items() if isinstance(key, str) and not _is_null(item)}


def _check_events(text: str) -> None:
    """Refuses anchors, aliases and deep nesting before anything is built: a few bytes can expand to gigabytes."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if getattr(event, "anchor", None) is not None:
            raise CorruptError("its front matter uses anchors or aliases")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise LimitError(f"its front matter is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value in _NULLS


def render_card(front: Mapping[str, object], title: str | None, text: str | None) -> bytes:
    """A README.md with `front` as its front matter, then a heading and a paragraph."""
    import yaml

    matter = yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True, width=10_000)
    body = [f"# {heading}\n"] if title and (heading := markdown(title)) else []
    body += ["\n".join(map(markdown, text.strip().split("\n"))) + "\n"] if text and text.strip() else []
    return (f"{_FENCE}\n{matter}{_FENCE}\n" + "".join(f"\n{part}" for part in body)).encode()


def with_front_matter(card: bytes, key: str, value: object) -> bytes:
    """The card with another value of one key of its front matter; None removes the key.

    Other lines keep their bytes. A card without front matter gets one. Raises CorruptError, LimitError where the front
    matter cannot be read.
    """
    import yaml

    if value == front_matter(card).get(key):
        return card
    text = "" if value is None else str(yaml.safe_dump({key: value}, allow_unicode=True, width=1 << 20))
    lines = re.split(r"(?<=\n)", card.decode("utf-8", "surrogateescape"))
    if lines[0].lstrip("\ufeff").rstrip() != _FENCE:
        fenced = f"{_FENCE}\n{text}{_FENCE}\n"
        return fenced.encode() + (b"\n" + card if card else b"")
    end = next(i for i, line in enumerate(lines) if i and line.rstrip() == _FENCE)
    start = next((i for i in range(1, end) if re.match(rf"{re.escape(key)}\s*:", lines[i])), end)
    stop = start + 1 if start < end else end
    while stop < end and (lines[stop][:1] in " \t-" or not lines[stop].strip()):
        stop += 1
    new = "".join([*lines[:start], text, *lines[stop:]]).encode("utf-8", "surrogateescape")
    if front_matter(new).get(key) != value:
        raise CorruptError(f"its front matter cannot be edited: {key!r}")
    return new


def yaml_line(key: str, value: str) -> str:
    """A line of front matter, escaping any value."""
    import yaml

    one_line = " ".join(_CONTROL.sub(" ", value).split())
    return str(yaml.safe_dump({key: one_line}, allow_unicode=True, width=1 << 20))


def markdown(value: str) -> str:
    """`value` as a line of plain text: HTML, code, headings, lists, rules and table cells are escaped.

    So are links: renderers link bare web addresses unless an entity hides the `://` or `www.`.
    """
    line = " ".join(_CONTROL.sub(" ", value).split())
    line = _MARKUP.sub(lambda found: _ENTITIES.get(found[0]) or f"\\{found[0]}", line)
    return f"\\{line}" if line.startswith(("#", "-", "+", "*", "=", "~~~")) else line


def markdown_code(value: str) -> str:
    """`value` as inline code in a line of Markdown or a table cell."""
    words = " ".join(_CONTROL.sub(" ", value).split()).replace("<!--", "<! --")
    return f"`{words.replace('`', chr(39)).replace('|', chr(92) + '|')}`"


# --- what the keys mean ---


def text(value: object) -> str | None:
    """Printable text: undecodable bytes of a GGUF become replacement characters."""
    if not isinstance(value, str) or not value:
        return None
    return _SURROGATES.sub("\ufffd", value)


def texts(value: object) -> list[str]:
    """The strings of a list, without empty ones."""
    items = value[:MAX_ENTRIES] if isinstance(value, list) else []
    return [item for raw in items if (item := text(raw)) is not None]


def entries(value: object) -> list[dict[str, str]]:
    """Base models or data sets with the fields that have GGUF keys; empty fields are omitted."""
    items = value[:MAX_ENTRIES] if isinstance(value, list) else []
    rows = (
        {name: item for name in ENTRY_FIELDS if (item := text(raw.get(name))) is not None}
        for raw in items
        if isinstance(raw, Mapping)
    )
    return [row for row in rows if row]


def title(name: str) -> str:
    """A repository's name as words: "tiny-llama-1.1b-v1.0" -> "Tiny Llama 1.1b v1.0"."""
    words = name.replace("-", " ").split()
    return " ".join(w if not w.islower() or _UNTOUCHED.fullmatch(w) else w.title() for w in words)


def _entry(value: object) -> dict[str, object]:
    """A base model or data set of a card, an id or a URL, as the fields of its GGUF keys."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str) or not value.strip():
        return {}
    if re.match(r"(https?|ssh)://", value):
        match = re.fullmatch(r"https?://huggingface\.co/([^/]+)/([^/]+)", value)
        found: dict[str, object] = {"name": title(match[2]), "organization": title(match[1])} if match else {}
        return found | {"repo_url": value}
    if " " in value:
        return {"name": value}
    org, slash, name = value.partition("/")
    if not slash or not org or org.startswith("."):
        return {"name": title(name or org)}
    return {"name": title(name), "organization": title(org), "repo_url": HUB + value}


def _id(value: str) -> str:
    """The id of a card's data set, also if the card has its URL."""
    inner = value.removeprefix(HUB).removeprefix("datasets/")
    return inner if _REPO.fullmatch(inner) else value


def hub_id(row: Mapping[str, object]) -> str | None:
    """The repository id in the URL of a base model or data set, else the URL itself."""
    url = row.get("repo_url")
    return _id(url) if isinstance(url, str) else None


def _first(card: Mapping[str, object], keys: tuple[str, ...]) -> str | None:
    return next((value for key in keys if isinstance(value := card.get(key), str)), None)


def _card_key(keys: tuple[str, ...]) -> str:
    """The card key of a field: with the prefix `model_` if that exists."""
    return keys[:2][-1]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def from_card(card: Mapping[str, object]) -> CardFields:
    """Converts the front matter of a card."""
    info: dict[str, object] = {name: value for name, keys in _CARD_INFO.items() if (value := _first(card, keys))}
    if licenses := [item for item in _list(card.get("license")) if isinstance(item, str)]:
        info["license"] = ",".join(licenses)
    general: dict[str, object] = {name: value for name, keys in _CARD_GENERAL.items() if (value := _first(card, keys))}
    for name, keys in _CARD_ENTRIES.items():
        given = next((card[key] for key in keys if key in card), None)
        items = [item for item in _list(given) if _entry(item)]
        if items:
            general[name] = [_entry(item) for item in items]
        if name == "datasets" and "data_source" not in info:
            info["data_source"] = ",".join(_id(item) for item in items if isinstance(item, str))
    general["tags"] = _list(card.get("tags")) + _list(card.get("pipeline_tag"))
    general["languages"] = _list(card.get("languages")) + _list(card.get("language"))
    return info, general


def from_name_or_path(config: Mapping[str, object]) -> CardFields:
    """config.json's `_name_or_path`, if it is a repository id and not a local path."""
    value = config.get("_name_or_path")
    match = _REPO.fullmatch(value) if isinstance(value, str) else None
    return ({"name": title(match["name"])}, {"organization": title(match["org"])}) if match else ({}, {})


def from_location(folder: Path) -> CardFields:
    """Fields inferred from a folder's location: its name, in the hub's cache the repository."""
    folder = folder.absolute()
    if _SNAPSHOT.fullmatch(folder.name) and folder.parent.name == "snapshots":
        org, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
        if name and _REPO.fullmatch(f"{org}/{name}"):
            return {"name": title(name), "source": f"{HUB}{org}/{name}"}, {"organization": title(org)}
    return ({"name": title(folder.name) or folder.name}, {}) if folder.name else ({}, {})


def is_location(source: object, name: object) -> bool:
    """Whether `source` is what `from_location` infers for a folder of the hub's cache called `name`."""
    repo = _REPO.fullmatch(source.removeprefix(HUB)) if isinstance(source, str) else None
    return repo is not None and source != repo[0] and title(repo["name"]) == name


def to_card(
    info: Mapping[str, str], general: Mapping[str, object] | None, *, named_by_folder: bool = False
) -> bytes | None:
    """A README.md with the known fields, None without any.

    With `named_by_folder`, name, size and location were inferred from the source folder: these alone make no card.
    """
    general = general or {}
    tags = texts(general.get("tags"))
    task = tags.pop() if tags and tags[-1] in _TASKS else None
    bases = _ids(general, "base_models")
    sets = _dataset_ids(info, general)
    front: dict[str, object] = {
        "license": info.get("license"), "license_name": general.get("license.name"),
        "license_link": general.get("license.link"), "language": general.get("languages"),
        "base_model": bases[0] if len(bases) == 1 else bases, "datasets": sets, "pipeline_tag": task, "tags": tags,
    }  # fmt: skip
    if info.get("data_source") != ",".join(sets):
        front["data_source"] = info.get("data_source")
    front |= {
        _card_key(_CARD_INFO[name]): info.get(name) for name in ("data_license", "author", "version", "description")
    }
    front = {key: value for key, value in front.items() if value}
    if not front and named_by_folder:
        return None
    front |= {_card_key(_CARD_INFO[name]): info[name] for name in ("name", "source") if info.get(name)}
    front |= {_card_key(keys): general[name] for name, keys in _CARD_GENERAL.items() if general.get(name)}
    if not front:
        return None
    return render_card(front, info.get("name"), info.get("description"))


def _dataset_ids(info: Mapping[str, str], general: Mapping[str, object]) -> list[str]:
    """The data sets' ids; spelled as in `data_source` if it lists the same ones."""
    stated = info.get("data_source", "").split(",")
    return stated if [_entry(item) for item in stated] == general.get("datasets") else _ids(general, "datasets")


def _ids(general: Mapping[str, object], name: str) -> list[str]:
    """Ids or URLs of the base models or data sets; names that cannot be ids are omitted."""
    found = (hub_id(row) or row.get("name") for row in entries(general.get(name)))
    return [item for item in found if item and ("://" in item or _ID.fullmatch(item))]
