"""Update rules beside torch's optimizers, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from torch import Tensor, nn

from aprfmt.errors import UsageError
from aprtrain import plugins
from aprtrain.config import resolve
from aprtrain.models import load_student, open_pair
from aprtrain.network.names import hf_names
from aprtrain.optim import rules
from aprtrain.optim.flat import FlatOptimizer
from aprtrain.optim.rules import ADAMW, MUON, Settings, UpdateRule, orthogonalize
from aprtrain.optim.states import load_states, states
from aprtrain.run import run
from aprtrain.world import World

SETTINGS = Settings(clip=0.0, weight_decay=0.1)
WRITTEN_OUT = UpdateRule(ADAMW.states, ADAMW.accumulate)
"""AdamW by torch's operations, as rules of other packages are computed."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(11, 6), "wide": nn.Linear(6, 9), "tall": nn.Linear(9, 4, bias=False)})


def grow(optimizer: FlatOptimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.clear()
        for name, shape in optimizer.shapes.items():
            optimizer.grad_of(name).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(step)))
        optimizer.step(0.03)


def values(optimizer: FlatOptimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in states(optimizer)}


def test_adamw_written_out_is_the_fused_one() -> None:
    one, two = FlatOptimizer(network(), SETTINGS), FlatOptimizer(network(), SETTINGS, rule=WRITTEN_OUT)
    for optimizer in (one, two):
        grow(optimizer, 4)
    a, b = values(one), values(two)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_CHUNK", 20)
    layers = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False))
    peer = {name: p.detach().clone().requires_grad_() for name, p in layers.named_parameters()}
    theirs = torch.optim.Muon(
        list(peer.values()), lr=0.03, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = FlatOptimizer(layers, SETTINGS, rule=MUON)
    for step in range(4):
        optimizer.clear()
        for name, parameter in peer.items():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            optimizer.grad_of(name).copy_(parameter.grad)
        optimizer.step(0.03)
        theirs.step()  # type: ignore[no-untyped-call]
    for name, parameter in layers.named_parameters():  # torch orthogonalizes in bfloat16
        assert torch.allclose(parameter, peer[name], atol=4e-3), name


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (3, 16, 16)])
def test_singular_values_become_alike(shape: tuple[int, ...]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    size = torch.linalg.svdvals(orthogonalize(update) / (0.2 * max(shape[-2:]) ** 0.5))
    assert float(size.min()) > 0.3
    assert float(size.max()) < 1.3


def test_muon_leaves_embeddings_head_convolutions_and_vectors_to_adamw() -> None:
    kinds = {name.rpartition(".")[0] or name: MUON.kinds(name, shape) for name, shape in (
        ("embed", (9, 4)), ("head", (9, 4)), ("blocks.0.norm", (4,)), ("blocks.0.out", (4, 4)),
    )}  # fmt: skip
    assert kinds["embed"] == kinds["head"] == ("master", "mean", "square")
    assert MUON.kinds("blocks.0.conv", (9, 4)) == MUON.kinds("blocks.0.norm", (4,)) == ("master", "mean", "square")
    assert MUON.kinds("blocks.0.out", (4, 4)) == ("master", "mean")


@pytest.mark.parametrize("rule", [WRITTEN_OUT, MUON], ids=["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(rule: UpdateRule) -> None:
    optimizer = FlatOptimizer(network(), SETTINGS, rule=rule)
    grow(optimizer, 2)
    before = values(optimizer)
    optimizer.clear()
    optimizer.grad_of("wide.weight")[0, 0] = float("inf")
    assert not torch.isfinite(optimizer.step(0.03))
    after = values(optimizer)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_states_of_muon_go_on_bit_by_bit() -> None:
    whole, first, then = (FlatOptimizer(network(), SETTINGS, rule=MUON) for _ in range(3))
    grow(whole, 4)
    grow(first, 4)
    load_states(then, values(first))
    for optimizer in (whole, then):
        grow(optimizer, 2)
    a, b = values(whole), values(then)
    assert "square.wide.weight" not in a
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_muon_orients_the_matrices_of_the_checkpoint(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the decoder fuses for speed: q, k and v are three."""
    config = resolve(
        train_runs.options(
            "distill",
            corpus_file,
            tmp_path,
            teacher=str(teacher_file),
            student_init="layers:0,",
            optimizer="muon",
            steps=1,
        )
    )
    seen: list[tuple[int, ...]] = []

    def see(update: Tensor) -> Tensor:
        seen.append(tuple(update.shape))
        return update

    monkeypatch.setitem(rules.RULES, "muon", UpdateRule(MUON.states, MUON.accumulate, see))
    with open_pair("distill", config) as pair:
        _, optimizer, _ = load_student(config, pair, World(torch.device("cpu")))
        names = hf_names(pair.student.shape)
        wanted = [size for name, (_, _, size) in names.items() if len(size) > 1 and "layers.0" in name]
        optimizer.clear()
        optimizer.step(1e-3)
    assert sorted(seen) == sorted(wanted)


def lion(
    grad: Tensor, states: Mapping[str, Tensor], count: Tensor, settings: Settings
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Chen et al. 2023, arXiv:2302.06675."""
    b1, b2 = settings.betas
    mean = states["mean"]
    return mean.lerp(grad, 1 - b1).sign(), {"mean": mean.lerp(grad, 1 - b2)}


LION = UpdateRule(("mean",), lion)


def test_a_package_adds_an_optimizer(
    teacher_file: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("lion", f"{__name__}:LION", plugins.OPTIMIZERS.group)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == plugins.OPTIMIZERS.group else [])
    plugins._installed.cache_clear()
    try:
        how: dict[str, Any] = {
            "teacher": str(teacher_file),
            "student_init": "layers:0,",
            "optimizer": "lion",
            "lr": 1e-3,
        }
        for steps in (3, 6):
            config = train_runs.options(
                "distill", corpus_file, tmp_path / "run", steps=steps, total_steps=6, resume=steps > 3, **how
            )
            run("distill", config, stream=None)
        losses = [line["loss"] for line in train_runs.lines(tmp_path / "run")]
        state, _ = train_runs.load_state(tmp_path / "run" / "ckpt-step-000006.state")
    finally:
        plugins._installed.cache_clear()
    assert losses[-1] < losses[0]
    assert {name.split(".")[0] for name in state} == {"master", "mean", "step", "rng"}


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="unknown optimizer 'sgd': use adamw, muon"):
        rules.rule_of("sgd")
