"""Runs with a teacher that has another tokenizer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import pytest
import train_runs

from aprfmt.errors import RefusedError, UsageError

Distil = Callable[..., dict[str, Any]]
OTHER = ("a t", "Ġ a", "t h", "Ġ th", "Ġth e", "e r", "h e", "o g", "Ġ d", "Ġd og", "i n", "Ġ h", "n d")


def student(path: Path, merges: tuple[str, ...] = OTHER) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "MERGES", merges)
        patch.setattr(demo_model, "N_TOKENS", 260 + len(merges))
        demo_model.build(path)
    return str(path)


def test_with_the_same_tokenizer_it_is_the_usual_run(distil: Distil, tmp_path: Path) -> None:
    given: dict[str, Any] = {"student_init": None, "student": student(tmp_path / "s.gguf", demo_model.MERGES)}
    given |= {"allow_same_arch": True, "allow_weaker_teacher": True}
    runs = [distil(policy, **given, vocab_policy=policy) for policy in ("shared", "aligned")]
    for name in ("ce", "kl", "agreement", "teacher_ce"):
        assert runs[1]["last"][name] == pytest.approx(runs[0]["last"][name], rel=1e-5), name
    losses = [[step["loss"] for step in train_runs.lines(tmp_path / policy)] for policy in ("shared", "aligned")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert {step["aligned"] for step in train_runs.lines(tmp_path / "aligned")} == {1.0}


def test_a_student_learns_from_another_tokenizer_and_resumes_exactly(distil: Distil, tmp_path: Path) -> None:
    given: dict[str, Any] = {"student_init": None, "student": student(tmp_path / "s.gguf"), "steps": 30}
    stream = io.StringIO()
    aligned = distil("aligned", stream, **given, vocab_policy="aligned", save_every=20)
    assert aligned["last"]["kl"] < 0.5 * aligned["first"]["kl"]
    assert "tokens; 9" in stream.getvalue()
    steps = train_runs.lines(tmp_path / "aligned")
    assert all(0.8 < step["aligned"] <= 1 for step in steps)
    resumed = distil("aligned", stream, **given, vocab_policy="aligned", save_every=20, resume=20)
    assert "token shards in" in stream.getvalue()
    assert resumed["last"] == aligned["last"]
    alone = distil("labels", **given, vocab_policy="aligned", kd_weight=0.0)
    uld = distil("uld", **given, vocab_policy="uld")
    assert aligned["last"]["kl"] < min(alone["last"]["kl"], uld["last"]["kl"])
    first = [train_runs.lines(tmp_path / name)[0] for name in ("aligned", "uld", "labels")]
    assert first[0]["kl1"] == pytest.approx(first[1]["kl1"]) == pytest.approx(first[2]["kl1"])
    assert 0 < first[1]["loss"] < first[0]["loss"], "an L1 distance of at most 2"


def test_answers_alone_are_compared(distil: Distil, tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"the dog {i}"}, {"role": "assistant", "content": f"a cat {i} ran"}]}
        for i in range(60)
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    distil(
        "chats", data=data, student_init=None, student=student(tmp_path / "s.gguf"), vocab_policy="aligned",
        allow_weaker_teacher=True, seq_len=64,
    )  # fmt: skip
    assert all(0.5 < step["aligned"] <= 1 for step in train_runs.lines(tmp_path / "chats"))


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"student_init": "layers:1"}, "needs --student", "add --student FILE"),
        ({"on_policy": 0.5, "prompts": "x"}, "--on-policy and --vocab-policy aligned", "leave out --on-policy"),
        ({"vocab_policy": "uld", "loss": "jsd"}, "a loss of its own", "use --vocab-policy aligned"),
        ({"teacher": None, "teacher_logprobs": "x"}, "--vocab-policy needs a loaded teacher", "leave out"),
        ({"teacher": "http://localhost:1"}, "--vocab-policy needs a loaded teacher", "leave out"),
    ],
)
def test_what_cannot_be_combined_is_refused(given: dict[str, Any], message: str, hint: str, distil: Distil) -> None:
    own = {"student": None} if "student_init" in given else {"student": "s.gguf", "student_init": None}
    with pytest.raises(UsageError, match=message) as caught:
        distil(**{"vocab_policy": "aligned", **own, **given})
    assert hint in str(caught.value.hint)


def test_texts_that_cannot_be_compared_are_refused(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.texts.parallel.LONGEST_SPAN", 0)
    with pytest.raises(RefusedError, match="no label is aligned") as caught:
        distil(student_init=None, student=student(tmp_path / "s.gguf"), vocab_policy="aligned")
    assert "tokenizers that they were trained with" in str(caught.value.hint)
