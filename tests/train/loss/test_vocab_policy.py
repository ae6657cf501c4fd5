"""A teacher with more tokens than its student: refused, or its distribution is taken over the shared ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import pytest
import train_runs

import aprfmt
from aprfmt.errors import RefusedError, RunError, UsageError
from aprtrain.network.weights import open_network

Distil = Callable[..., dict[str, Any]]
UNUSED = ("q q", "z z", "x x", "j j")
"""Merges of which the text has none."""


def demo(path: Path, merges: tuple[str, ...]) -> Path:
    """The demo model with these merges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "MERGES", merges)
        patch.setattr(demo_model, "N_TOKENS", 260 + len(merges))
        demo_model.build(path)
    return path


@pytest.fixture(scope="module")
def wide_teacher(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Path:
    """Has learnt the corpus with four tokens more than the demo model."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "MERGES", demo_model.MERGES + UNUSED)
        patch.setattr(demo_model, "N_TOKENS", 304)
        return train_runs.make_teacher(folder, corpus_file)


def test_the_shared_tokens_alone_are_learnt_and_the_rest_is_told(
    distil: Distil, tmp_path: Path, wide_teacher: Path
) -> None:
    given: dict[str, Any] = {"teacher": str(wide_teacher), "student_init": None, "steps": 30}
    given["student"] = str(demo(tmp_path / "s.gguf", demo_model.MERGES))
    with pytest.raises(RefusedError, match="the teacher's tokenizer has 4 tokens that the student's lacks"):
        distil("refused", **given)
    summary = distil("run", **given, vocab_policy="renormalise")
    assert summary["last"]["kl"] < 0.8 * summary["first"]["kl"]
    assert 0 < summary["first"]["dropped_mass"] < 1e-3
    assert summary["last"]["dropped_mass"] == summary["first"]["dropped_mass"], "the teacher stays what it is"
    described = json.loads((tmp_path / "run/distillation_metadata.json").read_text())
    assert described["resolved"]["vocab_policy"] == "renormalise"
    with open_network(summary["model"]) as network:
        assert network.shape.vocab_rows == 300
    asked: dict[str, Any] = {"teacher": given["teacher"], "device": "cpu", "seq_len": 32}
    model, data = summary["model"], tmp_path / "run/tokens"
    with pytest.raises(RefusedError, match="4 tokens that the student's lacks") as refusal:
        aprfmt.evaluate(model, tmp_path / "not read yet", **asked)
    assert "--vocab-policy renormalise" in (refusal.value.hint or "")
    scored = aprfmt.evaluate(model, data, **asked, vocab_policy="renormalise")
    assert scored.dropped_mass == pytest.approx(summary["last"]["dropped_mass"], rel=0.2), "of all, not some"
    with pytest.raises(UsageError, match="needs a teacher"):
        aprfmt.evaluate(model, data, device="cpu", vocab_policy="renormalise")


def test_a_teacher_that_uses_its_other_tokens_stops_the_run(
    distil: Distil, tmp_path: Path, teacher_file: Path, corpus_file: Path
) -> None:
    given: dict[str, Any] = {"teacher": str(teacher_file), "student_init": None}
    given["student"] = str(demo(tmp_path / "s.gguf", demo_model.MERGES[:-4]))
    with pytest.raises(RunError, match=r"assigns \d+\.\d+% of its probability to tokens that the student") as caught:
        distil("run", **given, vocab_policy="renormalise", allow_weaker_teacher=True)
    assert caught.value.exit_code == 8
    assert "--vocab-policy aligned" in str(caught.value.hint)
    with pytest.raises(RefusedError, match="that the student's lacks") as refused:
        aprfmt.teacher(teacher_file, corpus_file, tmp_path / "probs", student=given["student"], seq_len=8, top_k=4)
    assert "--vocab-policy renormalise" not in str(refused.value.hint)  # an option of other commands
    assert not list((tmp_path / "run").glob("*.apr"))
