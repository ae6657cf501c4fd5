"""Provenance of a model that was made from another one."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.canonical.model import Canonical
from aprfmt.provenance.model_card import entries


def with_base_model(c: Canonical, note: str, tag: str) -> Canonical:
    """`c` with its source as the base model, a `note` in its description, and a `tag`."""
    general = dict(c.general or {})
    base = {name: value for name in ("author", "version", "organization", "repo_url") if (value := general.get(name))}
    base = {**({"name": c.info["name"]} if c.info.get("name") else {}), **base}
    if base:
        general["base_models"] = entries([base])
    tags = general.get("tags")
    general["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else []), tag]))
    before = c.info.get("description")
    return replace(c, general=general, info=c.info | {"description": f"{before} {note}" if before else note})
