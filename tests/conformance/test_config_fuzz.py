"""Random configurations of every architecture: the draws, the judge, and a part of seed 1.

`make conformance-fuzz` judges as many as there is time for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import config_fuzz
import pytest
from config_draws import ACTIVATIONS, ROPE_TYPES, Draws, fields_of, with_changes
from config_fuzz import DIED, LATE, Fuzzer, Outcome, fuzzed_rows, numbered, outcome_of, row_of
from llama_peer import LlamaPeer
from odd_configs import ABORTED, CRASHED, REFUSED, RIGHT, SAID, WRONG, OddConfig, Verdict, judge, read_cases
from turns import turn

from configs_report import Tally

ROOT = Path(__file__).resolve().parents[2]


def hang(*_: object) -> None:
    """Work of a worker that never ends."""
    time.sleep(600)


def die(*_: object) -> None:
    """Work of a worker that the kernel ends."""
    os.kill(os.getpid(), signal.SIGKILL)


def draws_of(row: str) -> Draws:
    return Draws(fuzzed_rows()[row][0], 280)


def test_every_row_of_transformers_has_its_turn() -> None:
    rows = [*fuzzed_rows()]
    for cycle in range(2):
        assert {row_of(3, cycle * len(rows) + i, rows) for i in range(len(rows))} == {*rows}
    assert [row_of(3, i, rows) for i in range(9)] != [row_of(4, i, rows) for i in range(9)]


def test_few_heads_of_indexers_whose_scores_tie_are_not_drawn() -> None:
    pytest.importorskip("torch")
    assert min(draws_of("deepseek_v32")._values("index_n_heads", Random(1))) >= 16
    assert 2 in draws_of("minimax_m3")._values("index_n_heads", Random(1))


def test_a_number_is_the_same_case_again() -> None:
    pytest.importorskip("torch")
    first, again = (numbered(5, 17, "llama")[0] for _ in range(2))
    assert first == again
    assert first != numbered(5, 18, "llama")[0]


def test_draws_reach_every_field_of_the_class() -> None:
    pytest.importorskip("torch")
    import transformers

    draws, rng = draws_of("llama"), Random(0)
    seen: dict[str, list[object]] = {}
    for _ in range(1500):
        for key, value in draws.change(rng).items():
            seen.setdefault(key, []).append(value)
    assert {*fields_of(transformers.LlamaConfig)} - {*seen} == set()
    assert {rope["rope_type"] for rope in seen["rope_parameters"] if isinstance(rope, dict)} == {*ROPE_TYPES}
    assert {*seen["hidden_act"]} == {*ACTIVATIONS} - {"silu"}
    assert None in seen["head_dim"]


def test_draws_of_lists_by_layer() -> None:
    pytest.importorskip("torch")
    draws, rng = draws_of("gemma3_text"), Random(0)
    changes = [draws.change(rng) for _ in range(400)]
    assert {len({*change["layer_types"]}) for change in changes if change.get("layer_types")} == {1, 2}
    longer = with_changes({"num_hidden_layers": 2, "layer_types": ["a", "b"]}, {"num_hidden_layers": 5})
    assert longer == {"num_hidden_layers": 5, "layer_types": ["a", "b", "a", "b", "a"]}


def test_what_counts_as_wrong() -> None:
    fine = {"apr": Verdict(RIGHT), "to_gguf": Verdict(SAID, 0.1), "from_gguf": Verdict(REFUSED)}
    assert outcome_of(fine) == REFUSED
    assert outcome_of({**fine, "from_gguf": Verdict(RIGHT)}) == SAID
    assert outcome_of({**fine, "to_gguf": Verdict(CRASHED)}) == CRASHED
    tally = Tally(1)
    for outcome in (WRONG, ABORTED, REFUSED, RIGHT):
        tally.add(Outcome(0, "llama", outcome, {"to_gguf": (outcome, 1e-4, "factor is 3.5")}))
    assert [find.outcome for find in tally.finds] == [WRONG, ABORTED]
    assert tally.counts == {"llama": Counter({WRONG: 1, ABORTED: 1, REFUSED: 1, RIGHT: 1})}
    assert tally.needless == {"factor is #": 1}
    assert tally.sentence(5) == "seed 1, 4 of 5 configurations; right: 1; said: 0; refused: 1; found: 2"


def test_a_line_is_the_case(tmp_path: Path) -> None:
    case = OddConfig("llama", "LlamaForCausalLM", {"hidden_size": 8}, "bf16", why="narrow", gguf_dtype="q8_0")
    (tmp_path / "cases").write_text(f"{case.line()}\n")
    assert [*read_cases(tmp_path / "cases")] == [case]


@pytest.mark.llama
def test_the_judge_sees_other_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF whose logits differ in the third digit is wrong, and the same one is right with a tolerance for it."""
    pytest.importorskip("torch")
    draws = draws_of("llama")
    case = OddConfig(draws.made_type, draws.case.model_class, draws.arguments, like=draws.case.id)
    computed = LlamaPeer.logits
    monkeypatch.setattr(LlamaPeer, "logits", lambda *given: computed(*given) * 1.005)
    with LlamaPeer() as llama:
        found = [judge(case, tmp_path / str(loose), llama, loose=loose)["to_gguf"].outcome for loose in (1.0, 5.0)]
    assert found == [WRONG, RIGHT]


def test_a_plain_row_comes_back_and_its_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right without llama.cpp; wrong where a config.json of its hyper-parameters has another value."""
    pytest.importorskip("torch")
    from aprfmt.arch import hparams

    base = fuzzed_rows(plain=True)["opt"][0]
    draws = Draws(base, 280)
    case = OddConfig(draws.made_type, base.model_class, draws.arguments, like=base.id)
    with LlamaPeer() as llama:
        assert outcome_of(judge(case, tmp_path / "right", llama)) == RIGHT
        built = hparams.to_hf_config
        monkeypatch.setattr(hparams, "to_hf_config", lambda *given, **more: built(*given, **more) | {"ffn_dim": 7})
        found = judge(case, tmp_path / "wrong", llama)
    assert outcome_of(found) == WRONG
    assert "ffn_dim is 7 instead of" in found["to_gguf"].text


@pytest.mark.parametrize(("outcome", "work"), [(LATE, hang), (DIED, die)])
def test_a_worker_that_hangs_or_dies_ends_the_run(
    outcome: str, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_fuzz, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(Fuzzer, "_work", work)
    found = [*Fuzzer(1, ["llama"], 2).run(0.1, 2)]
    assert [(one.outcome, one.found) for one in found] == [(outcome, True)]


_TURNS = 16


@pytest.mark.turns(first=False, of=_TURNS)
def test_a_part_of_seed_1(tmp_path: Path) -> None:
    """Three of the first 180 cases by the turn of the commit, in a process of their own, since it forks."""
    start = (turn() or 0) // _TURNS % 60 * 3
    command = [sys.executable, "tools/configs.py", "--fuzz", "--seed", "1", "--cases", "3", "--jobs", "1"]
    done = subprocess.run(
        [*command, "--start", str(start), "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["cases"] + summary["outcomes"].get("not built", 0) == 3
    assert summary["found"] == 0
