"""Pages in a browser: no host is asked, nothing complains, text can be read, at any width, by keys, on paper."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import browser
import pytest
import sample_pages

import aprfmt
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.fast import load

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium, as Debian's chromium-headless-shell")

WIDTHS = (1280, 768, 360)
LEAST_CONTRAST = 4.5


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sample_pages.write_all(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("name", sample_pages.NAMES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_can_be_read_at_any_width(
    chromium: browser.Browser, pages: dict[str, Path], name: str, dark: bool
) -> None:
    for width in WIDTHS:
        chromium.open(pages[name], width=width, dark=dark)
        ratio, words = chromium.run(browser.CONTRAST)
        assert ratio >= LEAST_CONTRAST, f"{words!r} at {width} px"
        assert chromium.run("document.documentElement.scrollWidth") <= width, "the page itself never scrolls sideways"
        assert chromium.asked == [pages[name].resolve().as_uri()]
        assert chromium.complaints == []


def test_no_table_scrolls_on_a_phone(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    wide = "$all('.card').filter(e => e.scrollWidth > e.clientWidth + 1).length"
    for name in sample_pages.NAMES:
        chromium.open(pages[name], width=360)
        assert chromium.run(wide) == 0, name


def test_a_search_on_a_phone_shows_titled_cells_of_what_it_finds(chromium: browser.Browser, tmp_path: Path) -> None:
    from aprfmt.html.page import page, table

    rows = [[f"blk.{i}.ffn_up.weight", str(i)] for i in range(9)]
    grid = table(["tensor", "n"], rows, right="n", search="tensors", shown=5, stack=True)
    (tmp_path / "many.html").write_text(page("t", [grid]))
    chromium.open(tmp_path / "many.html", width=360)
    chromium.run("document.querySelector('input').focus()")
    chromium.write("blk.7.")
    assert chromium.run("$all('tbody tr').filter(e => e.offsetHeight).map(e => e.textContent)") == [
        "blk.7.ffn_up.weight7"
    ]
    assert chromium.run("$all('tbody tr:last-child td').map(e => e.dataset.title)") == ["tensor", "n"]


def test_the_checker_sees_what_cannot_be_read(chromium: browser.Browser, tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    pale = "<body style='background:#fff'><p style='color:#999'>pale</p><p>black</p><img src='http://127.0.0.1:9/x'>"
    (tmp_path / "bad.html").write_text(f"<!doctype html>{pale}<script>missing()</script>")
    chromium.open(tmp_path / "bad.html")
    ratio, words = chromium.run(browser.CONTRAST)
    assert (round(ratio, 1), words) == (2.8, "pale")
    assert len(chromium.asked) == 2
    assert chromium.complaints


@pytest.mark.parametrize("name", sample_pages.NAMES)
def test_paper_cuts_nothing(chromium: browser.Browser, pages: dict[str, Path], name: str) -> None:
    """No scroll bar, nothing wider than the sheet, no row of a map or of a table in two parts."""
    chromium.open(pages[name], width=720, media="print", dark=True)
    wide = "$all('.card,figure,svg,table').filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert chromium.run(f"{wide} + (document.documentElement.scrollWidth > innerWidth)") == 0
    scrolls = "$all('*').filter(e => /auto|scroll/.test(getComputedStyle(e).overflowX)).length"
    assert chromium.run(scrolls) == 0
    whole = "$all('tr,.row,.tile,figure').every(e => getComputedStyle(e).breakInside == 'avoid')"
    assert chromium.run(whole)
    assert chromium.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)", "dark ink, whatever the theme"
    assert chromium.run(browser.CONTRAST)[0] >= LEAST_CONTRAST
    chromium.open(pages[name])
    assert chromium.pdf().startswith(b"%PDF")


def test_the_box_finds_tensors(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["model"])
    shown = "[...$all('.sortable tbody')[0].rows].map(r => r.cells[0].textContent)"
    every = chromium.run(shown)
    chromium.run("document.querySelector('input[type=search]').focus()")
    chromium.write("ffn_up blk.1")
    found = chromium.run(shown)
    assert found == [name for name in every if "ffn_up" in name and "blk.1" in name] != []
    assert chromium.run("document.querySelector('.search output').textContent") == f"{len(found)} found"


def test_the_box_finds_what_the_document_does_not_show(chromium: browser.Browser, tmp_path: Path) -> None:
    from aprfmt.html.page import page, table

    rows = [[f"blk.{i}.ffn_up.weight", str(i)] for i in range(3000)]
    (tmp_path / "many.html").write_text(page("t", [table(["tensor", "n"], rows, right="n", search="tensors", shown=5)]))
    chromium.open(tmp_path / "many.html")
    count = "document.querySelectorAll('tbody tr:not([hidden])').length"
    assert chromium.run(count) == 5
    chromium.run("document.querySelector('input').focus()")
    chromium.write("blk.2999.")
    assert chromium.run("document.querySelector('tbody tr:not([hidden])').textContent") == "blk.2999.ffn_up.weight2999"
    chromium.run("const i = document.querySelector('input'); i.value = 'ffn'; i.dispatchEvent(new Event('input'))")
    assert chromium.run("document.querySelector('.search output').textContent") == "3,000 found, the first 200 shown"
    chromium.run("i.value = ''; i.dispatchEvent(new Event('input'))")
    assert chromium.run(count) == 5
    button = "document.querySelector('button.more')"
    chromium.run(f"{button}.click()")
    assert (chromium.run(count), chromium.run(f"{button}.textContent")) == (205, "Show 200 more")
    assert chromium.run("document.querySelector('.search output').textContent") == "205 of 3,000 shown"


def test_a_title_sorts_what_the_document_does_not_show(chromium: browser.Browser, tmp_path: Path) -> None:
    from aprfmt.html.page import page, table

    rows = [[f"t{i}", str(i)] for i in range(500)]
    words = page("t", [table(["tensor", "n"], rows, right="n", search="tensors", shown=3, sortable=True)])
    (tmp_path / "many.html").write_text(words)
    chromium.open(tmp_path / "many.html")
    chromium.run("$all('th')[1].click()")
    assert chromium.run("$all('tbody tr').map(r => r.cells[0].textContent)") == ["t499", "t498", "t497"]
    chromium.run("$all('th')[1].click()")
    assert chromium.run("$all('tbody tr').map(r => r.cells[0].textContent)") == ["t0", "t1", "t2"]


def test_keys_move_along_a_curve_and_over_a_map(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["run"])
    chromium.run("document.querySelector('figure[data-chart] svg').focus()")
    said = "document.activeElement.closest('figure').querySelector('output').textContent"
    chromium.press("End")
    last = chromium.run(said)
    chart = json.loads(chromium.run("document.querySelector('figure[data-chart]').dataset.chart"))
    assert re.fullmatch(rf"tokens [\d.]+( [KMB])?   {chart['s'][0]['n']} [\d.]+.*", last)
    chromium.press("ArrowLeft")
    assert chromium.run(said) != last
    chromium.press("Escape")
    assert chromium.run(said) == ""
    chromium.open(pages["model"])
    chromium.run("document.querySelectorAll('figure.map')[1].querySelector('svg').focus()")
    chromium.press("ArrowRight")
    first = chromium.run(said)
    assert first.startswith("layer 0 ")
    chromium.press("ArrowRight")
    assert chromium.run(said).startswith("layer 1 ")
    chromium.press("ArrowDown")
    assert chromium.run(said).split(" ", 2)[2] != first.split(" ", 2)[2]


def test_what_is_drawn_is_told_to_who_does_not_see_it(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    for path in pages.values():
        chromium.open(path)
        assert chromium.run("document.documentElement.lang") == "en"
        unnamed = "$all('svg[role=img],input').filter(e => !e.ariaLabel).length"
        assert chromium.run(unnamed) == 0
        assert chromium.run("document.querySelectorAll('h1').length") == 1
        assert chromium.run("$all('th').every(e => e.scope)")


def test_a_column_is_sorted_by_sizes_not_by_letters(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["model"])
    chromium.run("$all('.sortable th').find(e => e.textContent == 'size').focus()")
    chromium.press("Enter")
    sizes = chromium.run("[...$all('.sortable tbody')[0].rows].map(r => r.cells[3].textContent)")
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    values = [float(n.replace(",", "")) * units[unit] for n, unit in (size.split() for size in sizes)]
    assert values == sorted(values, reverse=True)


def test_a_page_tokenizes_what_is_typed(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["model"])
    said = "document.querySelector('.explorer output').textContent"
    _wait(lambda: "tokens" in chromium.run(said))
    chromium.run("const field = document.querySelector('textarea'); field.value = ''; field.focus()")
    chromium.write("the<|im_end|> and\u00e9")
    shown = "$all('.tokens span').map(e => [+e.dataset.id, e.textContent])"
    _wait(lambda: ", 18 characters" in chromium.run(said))
    ids = [i for i, _ in chromium.run(shown)]
    with aprfmt.open(pages["model"].parent / "m.gguf") as model:
        assert model.tokenizer is not None
        wanted = load(tokenizer_json(model.tokenizer)).encode(["the<|im_end|> and\u00e9"])[0].ids
    assert ids == wanted
    words = [words for _, words in chromium.run(shown)]
    assert "<|im_end|>" in words
    assert words[-2:] == ["\\xc3", "\\xa9"], "half a character is shown as its byte"


def test_the_slider_adds_the_cache(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["model"])
    said = "document.querySelector('.memory output').textContent"
    assert chromium.run(said).startswith("256 tokens: ")
    assert "KV cache 64.0 KiB" in chromium.run(said), "256 positions x 2 layers x 64 values x 2 bytes"
    change = "const k = document.querySelector('.memory select'); k.value = 'f32'; k.dispatchEvent(new Event('input'))"
    chromium.run(change)
    assert "KV cache 128 KiB" in chromium.run(said)


def test_the_page_of_a_model_is_short_on_a_phone(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["model"], width=390)
    assert chromium.run("document.documentElement.scrollHeight") < 5000
    chromium.run("$all('details').forEach(e => e.open = true)")
    assert chromium.run("document.documentElement.scrollWidth") <= 390
    assert chromium.run("$all('.tree details').length") > 0


def _wait(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)
