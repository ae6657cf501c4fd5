"""Names and ids as Hugging Face writes them, turned into what `general.*` keys say, and back into a card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.provenance.model_card import render_card

Found = tuple[dict[str, Any], dict[str, Any]]
"""Typed APR fields, and what has none (see provenance)."""

HUB = "https://huggingface.co/"

# Typed field or name in `general` -> keys of a card in the order in which llama.cpp reads them.
_CARD_INFO = {
    "name": ("name", "model_name"),
    "author": ("author", "model_author", "model_creator"),
    "version": ("version", "model_version"),
    "description": ("description", "model_description"),
    "source": ("url", "model_url"),
    "data_source": ("data_source",),
    "data_license": ("data_license",),
}
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

# Tasks of text models: the last tag, when it is one of them, is a card's pipeline_tag.
_TASKS = (
    *("text-generation", "text2text-generation", "image-text-to-text", "feature-extraction"),
    *("fill-mask", "sentence-similarity", "text-classification", "text-ranking"),
)

_REPO = re.compile(r"(?P<org>[\w][\w.-]*)/(?P<name>[\w][\w.-]*)", re.ASCII)
_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_UNTOUCHED = re.compile(r"v\d+(\.\d+)*|\d.*")


def title(name: str) -> str:
    """A repository's name as words: "tiny-llama-1.1b-v1.0" -> "Tiny Llama 1.1b v1.0"."""
    words = name.replace("-", " ").split()
    return " ".join(w if not w.islower() or _UNTOUCHED.fullmatch(w) else w.title() for w in words)


def _entry(value: Any) -> dict[str, Any]:
    """A base model or data set of a card, an id or a URL, as the fields of its GGUF keys."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str) or not value.strip():
        return {}
    if re.match(r"(https?|ssh)://", value):
        match = re.fullmatch(r"https?://huggingface\.co/([^/]+)/([^/]+)", value)
        found = {"name": title(match[2]), "organization": title(match[1])} if match else {}
        return found | {"repo_url": value}
    if " " in value:
        return {"name": value}
    org, slash, name = value.partition("/")
    if not slash or not org or org.startswith("."):
        return {"name": title(name or org)}
    return {"name": title(name), "organization": title(org), "repo_url": HUB + value}


def _id(value: str) -> str:
    """A data set of a card by its id, also where the card has its address."""
    inner = value.removeprefix(HUB).removeprefix("datasets/")
    return inner if _REPO.fullmatch(inner) else value


def hub_id(row: Mapping[str, Any]) -> str | None:
    """The repository's id of a base model or data set where its URL tells one, else the URL itself."""
    url = row.get("repo_url")
    return _id(url) if isinstance(url, str) else None


def _first(card: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((value for key in keys if isinstance(value := card.get(key), str)), None)


def _written(keys: tuple[str, ...]) -> str:
    """The key under which a field is written: with `model_` before it where that exists."""
    return keys[:2][-1]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value] if isinstance(value, str) else []


def from_card(card: Mapping[str, Any]) -> Found:
    """What the front matter of a card says."""
    info = {name: value for name, keys in _CARD_INFO.items() if (value := _first(card, keys))}
    if licenses := [item for item in _list(card.get("license")) if isinstance(item, str)]:
        info["license"] = ",".join(licenses)
    general: dict[str, Any] = {
        name: value for name, keys in _CARD_GENERAL.items() if (value := _first(card, keys))
    }
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


def named_in_config(config: Mapping[str, Any]) -> Found:
    """config.json's `_name_or_path`, when it is a repository's id and no path of somebody's machine."""
    value = config.get("_name_or_path")
    match = _REPO.fullmatch(value) if isinstance(value, str) else None
    return ({"name": title(match["name"])}, {"organization": title(match["org"])}) if match else ({}, {})


def located(folder: Path) -> Found:
    """What the place of a folder tells: its name, in the hub's cache the repository."""
    folder = folder.absolute()
    if _SNAPSHOT.fullmatch(folder.name) and folder.parent.name == "snapshots":
        org, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
        if name and _REPO.fullmatch(f"{org}/{name}"):
            return {"name": title(name), "source": f"{HUB}{org}/{name}"}, {"organization": title(org)}
    return ({"name": title(folder.name) or folder.name}, {}) if folder.name else ({}, {})


def is_place(source: Any, name: Any) -> bool:
    """Whether `source` is what `located` gives a folder of the hub's cache that it calls `name`."""
    repo = _REPO.fullmatch(source.removeprefix(HUB)) if isinstance(source, str) else None
    return repo is not None and source != repo[0] and title(repo["name"]) == name


def to_card(
    info: Mapping[str, Any], general: Mapping[str, Any] | None, *, named_by_folder: bool = False
) -> bytes | None:
    """A README.md that says what is known, None when nothing is.

    With `named_by_folder`, name, size and place are what the source folder itself told: no card for these alone.
    """
    general = general or {}
    tags = list(general.get("tags", []))
    task = tags.pop() if tags and tags[-1] in _TASKS else None
    bases = _ids(general, "base_models")
    sets = _dataset_ids(info, general)
    front: dict[str, Any] = {
        "license": info.get("license"),
        "license_name": general.get("license.name"),
        "license_link": general.get("license.link"),
        "language": general.get("languages"),
        "base_model": bases[0] if len(bases) == 1 else bases,
        "datasets": sets,
        "pipeline_tag": task,
        "tags": tags,
    }
    if info.get("data_source") != ",".join(sets):
        front["data_source"] = info.get("data_source")
    front |= {
        _written(_CARD_INFO[name]): info.get(name)
        for name in ("data_license", "author", "version", "description")
    }
    front = {key: value for key, value in front.items() if value}
    if not front and named_by_folder:
        return None
    front |= {_written(_CARD_INFO[name]): info[name] for name in ("name", "source") if info.get(name)}
    front |= {_written(keys): general[name] for name, keys in _CARD_GENERAL.items() if general.get(name)}
    if not front:
        return None
    return render_card(front, info.get("name"), info.get("description"))


def _dataset_ids(info: Mapping[str, Any], general: Mapping[str, Any]) -> list[str]:
    """The data sets' ids; `data_source` knows their spelling where it lists the same ones."""
    stated = str(info.get("data_source") or "").split(",")
    return (
        stated if [_entry(item) for item in stated] == general.get("datasets") else _ids(general, "datasets")
    )


def _ids(general: Mapping[str, Any], name: str) -> list[str]:
    """Ids or URLs of the base models or data sets; a name that cannot be an id has no place in a card."""
    found = (hub_id(row) or row.get("name") for row in general.get(name, []))
    return [item for item in found if item and ("://" in item or _ID.fullmatch(item))]
