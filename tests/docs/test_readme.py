"""The README: its lines run as they stand, its picture and its figures are true."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import pytest
from doc_pages import Block, blocks, commands, run_page

import first_minute

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture
def demo_output(tmp_path: Path, smollm2_gguf: Path) -> Path:
    """What `make demo` leaves, as far as the tour needs it."""
    shutil.copy(smollm2_gguf, tmp_path / smollm2_gguf.name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.llama
@pytest.mark.turns(first=False, of=4)
def test_every_line_after_the_first_commands_runs(demo_output: Path) -> None:
    first = blocks(README)[0]
    assert [line.split("  #")[0].strip() for line in first.text.splitlines()] == first_minute.commands()
    page = demo_output / "first.md"
    page.write_text(f"```sh\n{first_minute.commands()[-1]}\n```\n")
    assert run_page(page, demo_output, {}) == 1
    assert run_page(README, demo_output, {}, skip=1) >= 10


def test_a_page_that_says_something_else_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("$ echo a\nb", "$ printf 'a\\nb\\n'\na", "$ false", "$ printf 'a\\nb\\nc\\n'\na\n…\nd"):
        page.write_text(f"```console\n{text}\n```\n")
        with pytest.raises(AssertionError, match=r"page\.md:2: "):
            run_page(page, tmp_path, {})
    page.write_text("```console\n$ printf 'a\\n1.5 s, x\\nc\\n'\na\n20 ms, …\n…\n```\n")
    assert run_page(page, tmp_path, {}) == 1


def test_the_first_commands_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    demo, activate, run = first_minute.commands()
    assert demo == "make demo"
    assert re.search(r"^demo:", makefile, re.MULTILINE)
    assert activate == ". .venv/bin/activate && cd demo-output"
    assert 'cp "$$model" demo-output/' in makefile
    assert run.startswith("apr run SmolLM2-135M-Instruct.Q4_1.gguf ")


@pytest.mark.slow
@pytest.mark.llama
@pytest.mark.turns(first=False, of=4)
def test_the_picture_shows_what_the_commands_print(demo_output: Path) -> None:
    drawn = re.findall(r"<text[^>]*>(.*?)</text>", (ROOT / "docs/tour.svg").read_text())
    lines = [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in drawn]
    page = demo_output / "picture.md"
    page.write_text("```console\n" + "\n".join(lines) + "\n```\n")
    assert len(list(commands(Block("console", "", "\n".join(lines), 1)))) >= 4
    run_page(page, demo_output, {})


def test_the_figures_of_the_comparison_stand_in_the_performance_page() -> None:
    section = README.read_text().partition("## Comparison\n")[2].partition("\n## ")[0]
    measured = (ROOT / "docs/performance.md").read_text()
    figures = [
        figure
        for row in section.splitlines()
        if row.startswith("| ")
        for figure in re.findall(r"[\d.]+(?= (?:s|ms|MB|GB)\b)", row)
    ]
    assert len(figures) >= 20
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", measured)] == []


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
