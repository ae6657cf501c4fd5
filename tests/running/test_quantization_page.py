"""apr quantize --report: the front, the presets and the maps of types, on one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import ExistsError, UsageError
from aprfmt.running.quantization_page import quantization_html
from aprfmt.running.quantization_report import FrontPoint, PresetPoint, QuantizationReport, TypedTensor

pytestmark = pytest.mark.llama


def cells(page: str, title: str) -> list[str]:
    """The words of the squares of a map."""
    figure = next(part for part in page.split("<figure") if f"<b>{title}</b>" in part)
    return re.findall(r"<rect[^>]*><title>([^<]*)</title>", figure)


def test_a_page_shows_every_tensor_and_preset(tiny_gguf: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "t.gguf", tmp_path / "t.html"
    report = aprfmt.quantize_model(tiny_gguf, out, target_bpw=6.5, report=page)
    words = page.read_text()
    with aprfmt.open(out) as model:
        types = {name: tensor.dtype for name, tensor in model.tensors.items() if len(tensor.shape) > 1}
    after = cells(words, "Bits per value, after")
    assert {line.partition(",")[0] for line in after} == {f"{name}: {dtype}" for name, dtype in types.items()}
    before = cells(words, "Bits per value, before")
    assert len(before) == len(after)
    assert all("F32, 32.00 bits" in line or "16.00 bits" in line for line in before)
    assert len(cells(words, "Share of the predicted KL")) == len(types)
    # A preset's size is that of the file that it writes; it is never better than the best types within its size.
    written = aprfmt.quantize_model(tiny_gguf, tmp_path / "q.gguf", "q5_0").output_bytes
    cell = r"<td[^>]*>([\w.+% −–-]+)</td>"
    rows = re.findall(rf"<tr>{cell}{cell}{cell}{cell}{cell}</tr>", words)
    presets = {name: (size, float(kl), best) for name, size, kl, best, _ in rows}
    assert aprfmt.text.format_bytes(written) == presets["q5_0"][0]
    assert len(presets) > 8
    assert all(best == "\N{EN DASH}" or float(best) <= kl * 1.001 for _, kl, best in presets.values())
    assert f"{report.predicted_kl:.4g}" in words
    assert "rough estimate" in words


def test_a_preset_and_a_plan_have_a_page(tiny_gguf: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    plan = aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", "q4_0", report=pages[0], plan=True)
    assert run(["quantize", str(tiny_gguf), "q4_0", "-o", str(tmp_path / "t.gguf"), "--report", str(pages[1])]) == 0
    for page in pages:
        words = page.read_text()
        assert sum("Q4_0" in line for line in cells(words, "Bits per value, after")) > 4
        assert "this file" in words
    assert "Plan of the quantization" in pages[0].read_text()
    assert plan.plan


def test_a_page_replaces_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "t.gguf", tmp_path / "t.html"
    page.write_text("mine")
    with pytest.raises(ExistsError):
        aprfmt.quantize_model(tiny_gguf, out, "q4_0", report=page)
    for given in ({"report": tmp_path / "t.txt"}, {"report": page, "recipe_out": page}):
        with pytest.raises(UsageError):
            aprfmt.quantize_model(tiny_gguf, out, "q4_0", force=True, **given)  # type: ignore[arg-type]
    assert page.read_text() == "mine"
    assert not out.exists()


def test_values_of_zero_and_missing_figures_are_drawn(tiny_gguf: Path, tmp_path: Path) -> None:
    report = aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", "q8_0", plan=True)
    report.measured_kl = 0.125
    tensors = [TypedTensor("blk.0.ffn_up.weight", "BF16", "BF16", 16.0, 16.0, 0.0, 0.0)]
    presets = [PresetPoint("q8_0", 900, 0.0, None), PresetPoint("iq1_s", 100, 4.0, 2.0)]
    found = QuantizationReport(report, FrontPoint(500, 0.0), tensors, [], [FrontPoint(400, 1.0)], presets, True)
    words = quantization_html(found)
    assert "0.125" in words
    assert "\N{MINUS SIGN}50 %" in words
    assert "llama.cpp measured" in words
