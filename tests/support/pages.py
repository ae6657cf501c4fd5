"""Reads an HTML page as strictly as a test needs: every element closed in order, nothing fetched, its words."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "img", "link", "input", "hr"}
_FETCHING = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}


class Page(HTMLParser):
    """`words` of the body, `titles` of its figures, `charts` by title, `tags` that occur; fails on what is broken."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.titles: list[str] = []
        self.charts: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, list[dict[str, str | None]]] = {}
        self._open: list[str] = []
        self._data: str | None = None
        assert text.startswith("<!doctype html>")
        self.feed(text)
        self.close()
        assert self._open == [], "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.setdefault(tag, []).append(found)
        for name in _FETCHING & found.keys():
            assert (found[name] or "").startswith("data:"), f"{tag} fetches {found[name]}"
        if tag == "figure":
            self._data = found.get("data-chart")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-2:] == ["figcaption", "b"]:
            self.titles.append(data)
            if self._data:
                self.charts[data] = json.loads(self._data)
        if self._open and self._open[-1] not in ("style", "script") and data.strip():
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        """All words, joined by spaces."""
        return " ".join(self.words)
