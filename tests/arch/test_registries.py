"""The table against what llama.cpp's converter and transformers register, and against what was verified of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from arch_models import all_cases
from registries import CONVERTER, converter_classes, without_row

from aprfmt.arch.table import ARCHITECTURES
from aprfmt.arch.verified import TRANSFORMERS, verified
from conformance_report import docs_page, verified_text
from conformance_results import kept

WITHOUT_ROW: dict[str, str] = {}
"""Text classes of the converter that the table does not know, and what they need."""

needs_converter = pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs llama.cpp's converter")


@needs_converter
def test_text_classes_of_the_converter_have_rows() -> None:
    assert len(converter_classes()) >= 267
    assert without_row(converter_classes()) == sorted(WITHOUT_ROW)


def test_a_class_that_nobody_knows_turns_up() -> None:
    assert without_row(("LlamaForCausalLM", "NobodyKnowsForCausalLM")) == ["NobodyKnowsForCausalLM"]


def test_registered_classes_are_found_by_what_they_derive_from(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '@ModelBase.register("A", "B")\nclass A(TextModel): ...\n'
        '@ModelBase.register("C")\n@other\nclass C(A): ...\n'
        '@ModelBase.register("V")\nclass V(MmprojModel): ...\n'
        "class D(A): ...\n"
    )
    assert converter_classes(tmp_path) == ("A", "B", "C")


def test_every_case_has_a_result() -> None:
    """Where this fails, cases were added or changed: `python tools/conformance.py --missing --docs` runs those."""
    known = kept(all_cases())
    assert [case.id for case in all_cases() if case.id not in known] == []


@needs_converter
def test_page_and_figures_are_those_of_the_results() -> None:
    """Where this fails, `python tools/conformance.py --missing --docs` writes both again."""
    root = Path(__file__).parents[2]
    results = list(kept(all_cases()).values())
    assert (root / "docs" / "architectures.md").read_text() == docs_page(results)
    assert (root / "src" / "aprfmt" / "arch" / "verified.jsonl").read_text() == verified_text(results)


def test_every_row_says_how_it_was_verified() -> None:
    counts = Counter(case.row for case in all_cases())
    assert {row: known.cases for row, known in verified().items()} == {row: counts[row] for row in ARCHITECTURES}
    computable = {case.row for case in all_cases() if case.computable}
    assert {row for row, known in verified().items() if known.against == TRANSFORMERS} == computable
    for row, known in verified().items():
        assert known.cases == known.right + known.refused > 0, row
