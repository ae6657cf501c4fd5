"""Every field of the schema has an effect: on what is learnt, on the files, or on the plan."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import lines, weights

import aprfmt
from aprfmt.errors import AprError
from aprtrain.budget import plan
from aprtrain.config import schema

Distil = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs of this file read: a run of three steps needs no more."""
    return train_runs.write_corpus(tmp_path_factory.mktemp("small") / "small.jsonl", documents=40)


@pytest.fixture
def distil(distil: Distil, small_corpus: Path) -> Distil:
    """Runs a short distillation on the small corpus."""
    return partial(distil, data=small_corpus)


def observe(distil: Distil, tmp_path: Path, given: dict[str, Any], to: str) -> dict[str, Any]:
    """What a run of three steps shows: weights, metrics, scores, files, the plan."""
    said = io.StringIO()
    try:
        summary = distil(to, **({"steps": 3, "save_every": 0, "stream": said} | given))
    except AprError as error:
        return {"error": error.message}
    folder = tmp_path / to
    if not folder.exists():
        return {"files": []}
    return {
        "weights": weights(folder / "model.apr"),
        "losses": [(line["loss"], line["grad_norm"]) for line in lines(folder)],
        "scores": [line | {"time": None} for line in lines(folder, "evaluation")],
        "files": sorted(path.name for path in folder.iterdir()),
        "checkpoints": summary["checkpoints"],
        "said": [line.split()[1] for line in said.getvalue().splitlines() if line.startswith("step ")],
        "examined": "qa" in summary,
    }


_USUAL: dict[str, Any] = {}


def usual(distil: Distil, tmp_path: Path) -> dict[str, Any]:
    """What the run shows in which nothing is changed; it is run once."""
    if not _USUAL:
        _USUAL.update(observe(distil, tmp_path, {}, "before"))
    return _USUAL


_LARGE = {"tokens_per_step": 1024, "micro_tokens": 1024}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "student_init": ({}, {"student_init": "layers:1,"}),
    "kd_weight": ({}, {"kd_weight": 0.2}),
    "temperature": ({}, {"temperature": 3.0}),
    "loss": ({}, {"loss": "reverse"}),
    "beta": ({"loss": "jsd"}, {"loss": "jsd", "beta": 0.2}),
    "qat": ({}, {"qat": "q8_0"}),
    "qat_dampening": ({"qat": "q4_0", "qat_dampening": 0.0}, {"qat": "q4_0", "qat_dampening": 0.5}),
    "qat_every": ({"qat": "q4_k_m", "qat_every": 1}, {"qat": "q4_k_m", "qat_every": 2}),
    "lr": ({}, {"lr": 1e-3}),
    "lr_final": ({"warmup_steps": 0}, {"warmup_steps": 0, "lr_final": 0.5}),
    "warmup_steps": ({}, {"warmup_steps": 2}),
    "optimizer": ({}, {"optimizer": "muon"}),
    "beta1": ({}, {"beta1": 0.5}),
    "beta2": ({}, {"beta2": 0.5}),
    "eps": ({}, {"eps": 1e-2}),
    "weight_decay": ({}, {"weight_decay": 1.0}),
    "clip": ({}, {"clip": 0.01}),
    "steps": ({}, {"steps": 2}),
    "total_steps": ({}, {"total_steps": 30}),
    "epochs": (
        {"steps": None, "repeat": False, "epochs": 1, **_LARGE},
        {"steps": None, "repeat": False, "epochs": 2, **_LARGE},
    ),
    "repeat": ({"steps": 6, **_LARGE}, {"steps": 6, **_LARGE, "repeat": False}),
    "seq_len": ({}, {"seq_len": 16}),
    "tokens_per_step": ({}, {"tokens_per_step": 64}),
    "held_out": ({}, {"held_out": 0.3}),
    "eval_data": ({}, {"eval_data": "OTHER", "held_out": None}),
    "seed": ({}, {"seed": 1}),
    "save_every": ({}, {"save_every": 1}),
    "save_minutes": ({}, {"save_minutes": 1e-6}),
    "save_epochs": (
        {"steps": None, "repeat": False, "epochs": 2, **_LARGE},
        {"steps": None, "repeat": False, "epochs": 2, "save_epochs": 1, **_LARGE},
    ),
    "qa": ({}, {"qa": True}),
    "keep": ({"save_every": 1}, {"save_every": 1, "keep": 2}),
    "save_dtype": ({}, {"save_dtype": "bf16"}),
    "eval_every": ({}, {"eval_every": 1}),
    "patience": ({"eval_every": 1, "lr": 1e-12}, {"eval_every": 1, "lr": 1e-12, "patience": 1}),
    "target_val_loss": ({"eval_every": 1}, {"eval_every": 1, "target_val_loss": 99.0}),
    "eval_tokens": ({}, {"eval_tokens": 64}),
    "log_every": ({"steps": 4}, {"steps": 4, "log_every": 3}),
    "smoke": ({}, {"smoke": 1}),
    "teacher_residency": ({}, {"teacher_residency": "q4k"}),
    "device": ({}, {"device": "cuda:77"}),
    "shard": ({}, {"shard": "weights"}),  # refused by one process; test_sharding has several
}
"""Field -> what is given before and after a change that a run must show."""


@pytest.mark.turns
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_field_changes_what_a_run_does(distil: Distil, tmp_path: Path, name: str) -> None:
    before, after = ({**given} for given in CHANGES[name])
    if "eval_data" in after:
        after["eval_data"] = str(train_runs.write_corpus(tmp_path / "other.jsonl", documents=20, seed=5))
    one = observe(distil, tmp_path, before, "before") if before else usual(distil, tmp_path)
    two = observe(distil, tmp_path, after, "after")
    assert one != two
    assert "error" not in one
    assert ("error" in two) is (name in ("repeat", "device", "teacher_residency", "shard"))


def test_two_runs_of_the_same_options_show_the_same(distil: Distil, tmp_path: Path) -> None:
    """Else every field would seem to have an effect."""
    assert observe(distil, tmp_path, {}, "after") == usual(distil, tmp_path)


@pytest.mark.parametrize(
    "change", [{"micro_tokens": 32}, {"chunk": 16}, {"recompute": "block"}, {"deterministic": False}]
)
def test_how_it_is_computed_does_not_change_what_is_learnt(
    distil: Distil, tmp_path: Path, change: dict[str, Any]
) -> None:
    distil("before", steps=3)
    distil("after", steps=3, **change)
    with aprfmt.open(tmp_path / "before/model.apr") as a, aprfmt.open(tmp_path / "after/model.apr") as b:
        for name, tensor in a.tensors.items():
            assert torch.allclose(tensor.torch(), b.tensors[name].torch(), atol=2e-5), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_tokens", 32),
        ("chunk", 16),
        ("recompute", "block"),
        ("logits", "fp32"),
        ("compile", "on"),
        ("teacher_residency", "fp8"),
    ],
)
def test_a_field_changes_the_plan(corpus_file: Path, teacher_file: Path, name: str, value: Any) -> None:
    how: dict[str, Any] = {"teacher": str(teacher_file), "student_init": "layers:0,", "steps": 4, "device": "cuda"}

    def rows(**given: Any) -> dict[str, Any]:
        body = plan("distill", train_runs.options("distill", corpus_file, None, smoke=1, **{**how, **given}))
        return {key: body[key] for key in ("memory", "compiled")}

    changed = rows(**{name: value})
    if name == "compile":
        assert rows(compile="off") != changed
    else:
        assert rows() != changed


def test_no_field_is_left_out() -> None:
    elsewhere = {"teacher", "student", "init", "like", "shape", "data", "output", "resume", "allow_changed"}
    elsewhere |= {"allow_same_arch", "allow_weaker_teacher", "deadline", "vocab_policy", "teacher_logprobs", "top_k"}
    elsewhere |= {"log_to", "text_field", "strict"}  # test_bad_input has them
    elsewhere |= {
        "step_deadline",
        "min_utilization",
        "samples",
        "lora",
        "lora_base",
        "router_aux_loss",
        "hidden_weight",
        "hidden_loss",
        "hidden_layers",
        "on_policy",
        "prompts",
        "new_tokens",
        "sample_every",
    }  # test_guards, _lora, _live, _families, _hidden
    planned = {"micro_tokens", "chunk", "recompute", "logits", "compile", "deterministic"}
    assert set(schema()) == set(CHANGES) | elsewhere | planned
