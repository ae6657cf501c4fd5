"""Every architecture there and back: transformers' logits in llama.cpp, the same tensors bit by bit on the way back.

Runs each row's base case and, by turns, a sixteenth of the variants; with APR_FULL=1 every one. The tokenizers are cut
short to save time. `make conformance` does the same with whole tokenizers, and with llama.cpp's converter beside ours;
here that is done for two rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from arch_models import ArchCase, all_cases, find_case, relative_error, top1_equal
from conformance_steps import Bench, Step
from turns import in_turn, turn

from conformance_report import Result, matrix, verified_text, without_case
from conformance_results import digest, keep, kept

VOCABULARY = 512
TURNS = 16


def chosen() -> list[ArchCase]:
    """The cases of this run."""
    return in_turn(all_cases(), lambda case: case.base, turn(), of=TURNS)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path, llama_cpp_models: Path) -> Iterator[Bench]:
    """The running llama.cpp; the fixtures stand for the tokenizers that the cases take from the cache."""
    pytest.importorskip("torch").set_num_threads(1)
    with Bench(tmp_path_factory.mktemp("conformance"), peer=False, vocabulary=VOCABULARY) as bench:
        yield bench


@pytest.mark.llama
@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.id)
def test_there_and_back(case: ArchCase, bench: Bench) -> None:
    result = Result(case, bench.run(case))
    assert result.ok or result.excused, "\n".join(result.reasons())


@pytest.mark.llama
@pytest.mark.turns(first=False, of=8)
@pytest.mark.parametrize("case_id", ["llama", "mixtral"])
def test_beside_the_converter(case_id: str, tmp_path: Path, smollm2_gguf: Path, llama_cpp_converter: Path) -> None:
    """The same keys, and the same tensors in F32, F16 and BF16; and the converter's GGUF comes back."""
    pytest.importorskip("torch").set_num_threads(1)
    with Bench(tmp_path) as bench:
        result = Result(find_case(case_id), bench.run(find_case(case_id)))
    assert result.ok, "\n".join(result.reasons())
    assert result.peer_ok, "\n".join(result.reasons())
    assert result.passed("keys", "tensors", "peer_back")


def test_every_row_has_a_case() -> None:
    assert without_case(all_cases()) == []


def test_every_case_names_a_row() -> None:
    from aprfmt.arch.table import ARCHITECTURES

    assert sorted({case.row for case in all_cases()} - set(ARCHITECTURES)) == []


def test_what_counts_as_wrong() -> None:
    """The judge itself: one missing or failed step is enough, and an excuse covers only what llama.cpp computes."""
    names = ("build", "apr", "gguf", "loads", "logits", "top1", "back_bits", "back_logits", "direct")
    steps = {name: Step(True) for name in names}
    case = ArchCase("x", "x", "X", "X")
    excused = ArchCase("x", "x", "X", "X", llama_cpp_cannot="no such graph")
    assert Result(case, steps).ok
    for name in names:
        assert not Result(case, {key: step for key, step in steps.items() if key != name}).ok
        wrong = Result(excused, steps | {name: Step(False)})
        assert not wrong.ok
        assert wrong.excused == (name in ("loads", "logits", "top1"))
    assert "ours 1 of 2" in matrix([Result(case, steps), Result(case, {})])


def test_a_run_of_some_cases_keeps_the_results_of_the_others(tmp_path: Path) -> None:
    right = {name: Step(True, 1e-6) for name in ("build", "apr", "gguf", "loads", "logits", "top1")}
    right |= {name: Step(True) for name in ("back_bits", "back_logits", "direct", "peer_converts", "peer_loads")}
    wrong = right | {"loads": Step(False, None, "it | broke"), "peer_logits": Step(False, 0.123456, "")}
    first, second, third = (ArchCase(row, row, "X", "X") for row in ("arcee", "olmo", "gemma"))
    path = tmp_path / "results.jsonl"
    assert kept((first,), path) == {}
    before = [Result(first, right), Result(second, wrong)]
    keep(before, path)
    known = kept((third, second, first), path)
    assert list(known) == ["olmo", "arcee"]
    assert known["olmo"].steps["peer_logits"] == Step(False, 0.12, "")
    assert known["arcee"].ok and not known["olmo"].ok  # noqa: PT018
    assert known["olmo"].reasons() == ["loads: it | broke", "peer_logits: error 1.2e-01"]
    assert verified_text(list(known.values())) == verified_text(before)
    with path.open("a") as file:  # what a merge that keeps both sides leaves
        file.write(path.read_text().splitlines()[0].replace("arcee", "olmo").replace(digest(first), digest(second)))
    assert kept((second,), path)["olmo"].ok
    assert kept((replace(second, config={"vocab_size": 7}),), path) == {}


def test_measures() -> None:
    np = pytest.importorskip("numpy")
    a = np.array([[1.0, 2.0], [3.0, 1.0]], dtype=np.float32)
    assert relative_error(a, a) == 0.0
    assert relative_error(a + np.float32(0.1), a) == pytest.approx(0.2 / 15**0.5, rel=1e-5)
    assert relative_error(a[:1], a) == float("inf")
    assert relative_error(a * np.nan, a) == float("inf")
    assert top1_equal(a, a * 2)
    assert not top1_equal(a[:, ::-1], a)
