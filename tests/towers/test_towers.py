"""Every row of the table of towers: a model through a `clip` GGUF and back, and llama.cpp's converter beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from converter_peer import ConverterError, ConverterPeer
from llama_peer import LlamaPeer
from tower_models import all_tower_cases
from tower_steps import STEPS, Found, TowerBench, tokenizer_folder

from aprfmt.arch.table import TOWERS

CASES = {case.id: case for case in all_tower_cases()}
Run = Callable[[str], dict[str, Found]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, llama_cpp_converter: Path) -> Iterator[Run]:
    """Gives what came out of every step of a case."""
    pytest.importorskip("transformers")
    work = tmp_path_factory.mktemp("towers")
    done: dict[str, dict[str, Found]] = {}
    with LlamaPeer() as llama:
        bench = TowerBench(tokenizer_folder(work), ConverterPeer(), llama if find_spec("llama_cpp") else None)

        def get(case_id: str) -> dict[str, Found]:
            if case_id not in done:
                place = work / case_id.replace("/", "-")
                place.mkdir()
                done[case_id] = bench.run(CASES[case_id], place)
            return done[case_id]

        yield get


def test_every_row_has_a_case() -> None:
    assert sorted({case.row for case in CASES.values()}) == sorted(row.id for row in TOWERS.values())


@pytest.mark.turns(by="case_id", rows=True)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case_id", CASES)
def test_case(run: Run, case_id: str, step: str) -> None:
    assert run(case_id)[step].wrong == ""


@pytest.mark.parametrize(("module", "text"), [("step3", "never written there"), ("step3", "class ")])
def test_a_patch_needs_its_place(llama_cpp_converter: Path, tmp_path: Path, module: str, text: str) -> None:
    """One that another converter has not, or in several places, must not compare what nobody meant."""
    with pytest.raises(ConverterError, match=r"step3\.py has \d+ times"):
        ConverterPeer().convert_once(tmp_path, tmp_path / "out.gguf", "f16", patches=((module, text, ""),))
