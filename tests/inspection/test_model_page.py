"""The page about a model: every layer in its place, histograms that count every value, any container."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain_models
import pytest
from demo_model import build
from pages import Page

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.codecs.values import Histogram
from aprfmt.inspection.model_page import _example, html, survey

Arrays = dict[str, "np.ndarray[Any, Any]"]
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    build(path)
    return path


def test_a_histogram_counts_every_value_where_it_lies() -> None:
    histogram = Histogram()
    rng = np.random.default_rng(1)
    values = rng.normal(size=50_000).astype("f4")
    for block in np.split(values, 10):
        histogram.add(block)
    body = histogram.to_json()
    assert body is not None
    edges = np.linspace(-body["reach"], body["reach"], 129)
    expected = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    assert sum(body["counts"]) == 50_000
    assert np.abs(np.array(body["counts"]) - expected).sum() <= 20, "values on an edge may go either way"


def test_what_is_not_finite_or_far_away_breaks_no_histogram() -> None:
    histogram = Histogram()
    histogram.add(np.array([np.nan, np.inf], "f4"))
    assert histogram.to_json() is None
    histogram.add(np.zeros(4, "f4"))
    histogram.add(np.array([1e38, -1e38, np.nan], "f4"))
    body = histogram.to_json()
    assert body is not None
    assert (body["counts"][0], body["counts"][64], body["counts"][-1]) == (1, 4, 1)


def test_the_page_of_a_gguf_and_of_its_apr(tiny: Path, tmp_path: Path) -> None:
    aprfmt.import_model(tiny, tmp_path / "m.apr")
    for path, name in ((tiny, "ffn_up.weight"), (tmp_path / "m.apr", "mlp.up_proj.weight")):
        with aprfmt.open(path) as model:
            body = survey(model)
        page = Page(html(body))
        assert {name, "Dtypes"} < set(page.titles)
        for row in body.tensors:
            assert row.histogram.counts is not None
            assert row.histogram.counts.sum() == np.prod(row.tensor.shape)
        layers = body.inspection.metadata["num_layers"]
        assert isinstance(layers, int)
        assert sum(f"{name}: " in word for word in page.words) == 3 * layers, "a square a layer in each of the maps"
        assert "<|" in page.text or "special tokens" in page.text.lower()


def test_layers_stand_in_their_order_and_gaps_show(write: Write, arrays: Arrays) -> None:
    for layer in (10, 2):
        arrays[f"model.layers.{layer}.mlp.up_proj.weight"] = np.full((12, 8), layer, "f4")
    path = write(arrays)
    with aprfmt.open(path) as model:
        text = html(survey(model))
    found = re.findall(r"<title>layer (\d+) mlp.up_proj.weight: ([\d.]+), ", text)
    assert [n for n, _ in found if n != "0"] == ["2", "10", "2", "10"]
    assert ("10", "10") in found, "the largest magnitude"
    assert text.count('class="cell none"') == 3 * 2 * 8, "the other kinds are only in layer 0"


def test_experts_share_a_square(write: Write, arrays: Arrays) -> None:
    for expert, value in enumerate((1.0, 3.0)):
        arrays[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] = np.full((4, 4), value, "f4")
    with aprfmt.open(write(arrays)) as model:
        text = html(survey(model))
    assert "layer 0 mlp.experts.*.up_proj.weight: 3, 1 of" in text, "the largest magnitude of all"
    assert "layer 0 mlp.experts.*.up_proj.weight: 0, 1 of" in text, "the mean spread"


def test_values_that_are_not_finite_are_told(write: Write, arrays: Arrays) -> None:
    arrays["model.norm.weight"][0] = np.nan
    with aprfmt.open(write(arrays)) as model:
        assert "1 value is NaN or infinite" in Page(html(survey(model))).text


def test_a_tensor_that_cannot_be_read_is_told(write: Write, arrays: Arrays) -> None:
    with aprfmt.open(write(arrays)) as model:
        body = survey(model)
    assert "cannot be read" not in html(body)
    body.tensors[0] = replace(body.tensors[0], error="no <such> block")
    assert f"{body.tensors[0].tensor.name} cannot be read: no <such> block" in Page(html(body)).text


def test_drawn_bins_keep_the_counts_and_their_place() -> None:
    histogram = Histogram()
    histogram.add(np.array([1.0, 1.0, -0.5], "f4"))
    wide = np.array(histogram.rebin(2 * histogram.reach))
    assert wide.sum() == pytest.approx(3)
    assert wide[:16].sum() == wide[48:].sum() == 0
    assert wide[32:].sum() == pytest.approx(2)
    assert Histogram().bulk() == 0


def test_the_command(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "page.html"
    assert apr(["report", str(tiny), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n  GGUF v3, 20 tensors\n"
    assert "ffn_up.weight" in Page(target.read_text()).titles
    assert apr(["report", str(tiny), "-o", str(target)]) == 5
    assert apr(["report", str(tiny), "-o", str(tmp_path / "page.png")]) == 2
    assert apr(["report", str(tiny)]) == 0
    assert (tmp_path / "tiny.html").is_file()
    assert apr(["report", str(tiny)]) == 2, "the page is there"
    (tmp_path / "cut.gguf").write_bytes(tiny.read_bytes()[:200])
    assert apr(["report", str(tmp_path / "cut.gguf"), "-o", str(tmp_path / "cut.html")]) == 4
    assert not (tmp_path / "cut.html").exists()
    capsys.readouterr()
    assert apr(["report", str(tiny), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["tensors"][0]["histogram"]["counts"]


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_no_page_of_a_damaged_file(tiny: Path, tmp_path: Path, damage: str) -> None:
    aprfmt.import_model(tiny, tmp_path / "m.apr")
    data = bytearray((tmp_path / "m.apr").read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "m.apr").write_bytes(data if damage == "flip" else data[:-4])
    assert apr(["report", str(tmp_path / "m.apr"), "-o", str(tmp_path / "p.html")]) == 4
    assert not (tmp_path / "p.html").exists()


def test_no_page_shows_what_a_link_leads_to(tmp_path: Path) -> None:
    folder = plain_models.write_folder(tmp_path / "hf")
    (tmp_path / "secret").write_text("the secret text")
    (folder / "chat_template.jinja").symlink_to("../secret")
    command = ["report", str(folder), "-o", str(tmp_path / "p.html")]
    assert apr(command) == 5
    assert not (tmp_path / "p.html").exists()
    assert apr([*command, "--follow-links"]) == 0


def test_every_key_the_modules_and_a_conversation_are_shown(tiny: Path) -> None:
    with aprfmt.open(tiny) as model:
        page, keys = Page(html(survey(model))), list(model.metadata)
    assert f"{len(keys)} keys as stored" in page.text
    for key in keys:
        assert key in page.text or key in json.dumps(page.tags["div"])
    assert "blk.0\N{EN DASH}1 (2 \N{MULTIPLICATION SIGN})" in page.text
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>" in page.text
    assert page.text.count("<|im_start|>assistant") >= 2, "an answer is to follow"


def test_a_template_that_refuses_is_shown_with_its_reason(tiny: Path) -> None:
    with aprfmt.open(tiny) as model:
        assert model.tokenizer is not None
        no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        for source, words in (
            ("{{ raise_exception('none') }}", "none"),
            (f"{no_system}{{{{ messages[0].content }}}}", "What is the capital"),
            ("{% if %}", "cannot be rendered"),
        ):  # fmt: skip
            example = _example(replace(model.tokenizer, chat_template=source))
            assert example is not None
            assert words in f"{example.text}{example.error}"
        assert _example(replace(model.tokenizer, chat_template="chatml")) is None
