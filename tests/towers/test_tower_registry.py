"""The table of towers against what llama.cpp's converter registers, and against itself."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from registry_sources import CONVERTER, tower_classes, towers_without_row
from tower_models import all_tower_cases
from tower_report import PAGE, cases_of, is_computed, is_equal, page_of

from aprfmt.arch.grammar import dims_of, parse_condition, parse_order, size_words
from aprfmt.arch.row import Tower
from aprfmt.arch.table import TOWERS
from aprfmt.arch.tower_table import missing_keys
from aprfmt.arch.wrappers import WRAPPERS
from aprfmt.canonical.derived_tensors import MADE

WITHOUT_ROW: dict[str, str] = {}
"""Classes whose towers the converter writes and the table does not know, and what they need."""


@pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs llama.cpp's converter")
def test_classes_of_the_converter_have_rows() -> None:
    assert len(tower_classes()) >= 67
    assert towers_without_row(tower_classes()) == sorted(WITHOUT_ROW)


@pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs llama.cpp's converter")
def test_the_page_says_how_each_class_is_verified() -> None:
    """`python tools/towers.py --docs` writes it; what it says of a case, the case must show (test_towers)."""
    assert page_of(tower_classes()) in PAGE.read_text()
    verified = [name for name in tower_classes() if any(is_equal(c) or is_computed(c) for c in cases_of(name))]
    assert len(verified) >= 60


def test_a_class_that_nobody_knows_turns_up() -> None:
    assert towers_without_row(("Gemma3ForConditionalGeneration", "NobodyKnows")) == ["NobodyKnows"]


def test_towers_with_a_row_lack_nothing() -> None:
    rows = {name for row in TOWERS.values() for name in row.hf_classes}
    assert [wrapper.hf_class for wrapper in WRAPPERS if wrapper.lacks and wrapper.hf_class in rows] == []


def test_ids_and_cases_occur_once() -> None:
    ids = [row.id for row in TOWERS.values()]
    assert len({*ids}) == len(ids)
    assert {case.row for case in all_tower_cases()} == {*ids}


@pytest.mark.parametrize("row", TOWERS.values(), ids=lambda row: str(row.id))
def test_what_a_row_names_exists(row: Tower) -> None:
    assert row.gguf == "clip"
    assert row.hf_class in row.hf_classes
    assert row.model_type in row.model_types
    paths = {name for key in row.keys for name in key.hf}
    words = {name.rpartition(".")[2] for name in paths} | {path.replace("-", "_") for path in paths} | {"hidden"}
    for part in row.tensors:
        assert not part.gguf or len(part.gguf_dims) in (0, len(part.gguf)), part
        used = [*part.dims, *part.gguf_dims, *(part.depth for _ in part.hf if "{n}" in part.hf[0])]
        for size in (size for dims in used for size in dims_of(dims)):
            assert {word for word in size_words(size) if not word.startswith("any_")} <= words, (part.hf, size)
        for order in (*part.order, *part.columns):
            assert all(size_words(size) <= words for size in parse_order(order)[1]), (part.hf, order)
        if part.need not in ("required", "optional"):
            assert {word for facts in parse_condition(part.need) for word, _, _ in facts} <= paths, part
    for recipe in row.made.values():
        assert recipe.partition(":")[0] in MADE


@pytest.mark.parametrize("row", TOWERS.values(), ids=lambda row: str(row.id))
def test_no_two_rows_take_one_gguf(row: Tower) -> None:
    """Rows of one projector ask for different things, or stand beside different language models."""
    for a, b in combinations([other for other in TOWERS.values() if other.when == row.when], 2):
        assert not {*a.hf_classes} & {*b.hf_classes}, (a.id, b.id)


@pytest.mark.parametrize("row", TOWERS.values(), ids=lambda row: str(row.id))
def test_names_are_of_a_gguf_of_towers(row: Tower) -> None:
    for name in (name for part in row.tensors for name in part.gguf):
        assert re.match(r"(v|a|mm|s|resampler|adapter)\.", name), name
        assert len(name) < 64, name


def test_missing_keys_are_named() -> None:
    from aprfmt.arch.hyperparams import Hyperparams

    row = TOWERS["gemma3_vision"]
    assert missing_keys(Hyperparams(), row)[0] == "vision_config.image_size"
