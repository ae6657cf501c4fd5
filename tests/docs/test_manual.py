"""The manual: built without a warning, with every command, option and public name; nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

import aprfmt
import manual
from aprfmt.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        message = "mkdocs and mkdocs-material are not installed"
        (pytest.fail if os.environ.get("APR_REQUIRE_MATERIAL") == "1" else pytest.skip)(message)
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manual") / "site"
    done = build(folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert [line for line in said.splitlines() if line and not line.startswith("INFO ")] == []
    return folder


class _Page(HTMLParser):
    """What a page refers to, and what can be referred to on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a":
            self.links.append(values.get("href", ""))
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source"):
            self.loads.append(values.get("src", ""))


def test_links_and_anchors_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 60
    for path, page in pages.items():
        for link in page.links:
            place, _, anchor = link.partition("#")
            if re.match(r"\w+:", place) or path.name == "404.html":
                continue
            target = (path.parent / place).resolve() if place else path
            assert target.exists(), f"{path}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path}: {link}"
        assert [load for load in page.loads if re.match(r"(\w+:)?//", load)] == []


@pytest.mark.turns(first=False)
def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    for name in ("docs", "tools", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", *manual.ROOT_PAGES):
        shutil.copy(ROOT / name, tmp_path / name)
    with open(tmp_path / "docs/faq.md", "a", encoding="utf-8") as page:
        page.write("\n[nowhere](no-such-page.md)\n")
    done = build(tmp_path / "site", tmp_path)
    assert done.returncode != 0
    assert "no-such-page.md" in done.stdout + done.stderr


def test_the_reference_has_every_command_and_option() -> None:
    pages = manual.generated()
    commands = manual.commands()
    assert commands.keys() == COMMANDS.keys()
    for name, command in commands.items():
        text = pages[f"reference/{name}.md"]
        assert f"\napr {name}" in text, "an example"
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
        assert len(options) >= 2
        assert [option for option in options if f"`{option}`" not in text] == []


def test_the_reference_has_every_public_name_with_words_about_it() -> None:
    text = manual.python_page()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    assert {name for name in aprfmt.__all__ if not name.startswith("_")} == sections.keys()
    for name, section in sections.items():
        words = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
        assert len(words.split()) >= 1, f"{name} has no docstring"
    assert " at 0x" not in text
    assert "dtype: str = 'keep'" in sections["convert_model"]
    assert "* `verify`: Load the result in llama.cpp" in sections["convert_model"]
