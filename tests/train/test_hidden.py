"""The loss between hidden states: transformers' in float64, runs that learn and resume, options."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from train_models import Maker, error, load
from train_runs import lines, load_state, options, weights

import aprfmt
from aprfmt.errors import UsageError
from aprfmt.texts.sequences import IGNORED
from aprtrain.hidden import PROJECTION, HiddenStates
from aprtrain.models import match_layers
from aprtrain.network.weights import open_network
from aprtrain.optim.rules import ADAMW, Settings
from aprtrain.world import World

Distil = Callable[..., dict[str, Any]]
PAIRS = [(0, 0), (1, 1)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Maker:
    return Maker(tmp_path_factory.mktemp("hidden"))


def outputs(model: Any, ids_NT: Tensor) -> list[Tensor]:
    """The outputs of the layers of a transformers model; the last of its hidden states is normalized."""
    last: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
    states = model(ids_NT, use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    torch.testing.assert_close(model.model.norm(last[0]), states[-1])
    return [*states[1:-1], last[0]]


@pytest.mark.parametrize("distance", ["cosine", "mse"])
@pytest.mark.parametrize("has_projection", [False, True])
def test_value_and_gradients_are_those_of_transformers_states(distance: str, has_projection: bool, tiny: Maker) -> None:
    student, teacher = tiny("llama"), tiny("qwen3")
    ours, theirs = (load(each.folder, torch.float64) for each in (student, teacher))
    theirs.requires_grad_(False)
    world = World(torch.device("cpu"))
    hidden = HiddenStates(ours, theirs, PAIRS, distance, ADAMW, Settings(), world, 1)
    assert hidden.projection is None
    matrix = torch.eye(64)
    if has_projection:
        matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
        hidden.projection = matrix.clone().requires_grad_()
    ids_NT = student.ids_NT[:, :24]
    labels_N = ids_NT.flatten().clone()
    labels_N[5:9] = IGNORED
    kept_P = (labels_N >= 0).nonzero()[:, 0]
    found = []
    for kept in (None, kept_P):
        ours.zero_grad()
        with hidden.recording():
            with torch.inference_mode():
                theirs(ids_NT)
            ours(ids_NT)
        value = hidden.loss(labels_N, kept, len(kept_P))
        value.backward()  # type: ignore[no-untyped-call]
        assert isinstance(ours.embed.grad, Tensor)
        found.append((value.detach(), ours.embed.grad.clone()))
    reference, wanted = copy.deepcopy(student.reference).double(), copy.deepcopy(teacher.reference).double()
    with torch.no_grad():
        y = [states[0][kept_P] for states in outputs(wanted, ids_NT)]
    x = [states[0][kept_P] @ matrix.double().t() for states in outputs(reference, ids_NT)]
    if distance == "cosine":
        each = [(1 - functional.cosine_similarity(a, b, dim=1)).mean() for a, b in zip(x, y, strict=True)]
    else:
        each = [((a - b).square().sum(1) / b.square().sum(1)).mean() for a, b in zip(x, y, strict=True)]
    expected = torch.stack(each).mean()
    (gradient,) = torch.autograd.grad(expected, [reference.model.embed_tokens.weight])
    for value, embedding in found:
        assert error(value, expected.detach()) < 1e-5
        assert error(embedding, gradient) < 1e-5
    if has_projection:
        assert hidden.projection is not None
        before = hidden.projection.detach().clone()
        hidden.step(1e-2, torch.tensor(float("nan")))
        assert torch.equal(hidden.projection, before)
        hidden.projection.grad = torch.ones_like(matrix)
        hidden._updates = type(hidden._updates)([hidden.projection.detach()], [True], Settings(), [ADAMW])
        hidden.step(1e-2, torch.tensor(1.0))
        assert not torch.equal(hidden.projection, before)


def test_a_student_comes_closer_to_its_teacher(distil: Distil, tmp_path: Path) -> None:
    for name, weight in (("off", 0.0), ("on", 2.0)):
        loss = {"hidden_loss": "mse"} if weight else {}
        distil(name, steps=16, student_init="layers:1,", hidden_weight=weight, **loss)
    found = lines(tmp_path / "on")
    assert found[-1]["hidden"] < 0.8 * found[0]["hidden"]
    assert found[-1]["kl1"] < found[0]["kl1"]
    assert "hidden" not in lines(tmp_path / "off")[0]
    first, plain = found[0], lines(tmp_path / "off")[0]
    assert first["loss"] == pytest.approx(plain["loss"] + 2 * first["hidden"], rel=1e-5)
    assert weights(tmp_path / "on" / "model.apr") != weights(tmp_path / "off" / "model.apr")


def test_a_projection_learns_resumes_and_is_not_exported(distil: Distil, tmp_path: Path) -> None:
    given = {"student_init": "width:hidden=32", "hidden_weight": 1.0, "save_every": 3, "total_steps": 6}
    distil("whole", steps=6, **given)
    distil("parts", steps=3, **given)
    distil("parts", steps=6, resume=True, **given)
    whole, parts = (load_state(tmp_path / name / "ckpt-step-000006.state")[0] for name in ("whole", "parts"))
    assert {name for name in whole if name.endswith(PROJECTION)} == {
        f"{kind}.{PROJECTION}" for kind in ("master", *ADAMW.states)
    }
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name])
    before = load_state(tmp_path / "parts" / "ckpt-step-000003.state")[0]
    assert not torch.equal(before[f"master.{PROJECTION}"], whole[f"master.{PROJECTION}"])
    assert whole[f"master.{PROJECTION}"].shape == (64, 32)
    with aprfmt.open(tmp_path / "whole" / "model.apr") as model:
        assert not [name for name in model.tensors if "hidden" in name]
    found = lines(tmp_path / "whole")
    assert found[-1]["hidden"] < found[0]["hidden"]
    distil("parts", steps=6, resume=3, allow_changed=("hidden_weight",), **given | {"hidden_weight": 0.0})


def test_layers_are_matched_by_their_origin_or_depth(tiny: Maker, corpus_file: Path) -> None:
    with open_network(tiny("llama").folder) as network:
        shape = network.shape

    def matched(init: str | None, n: int, of: int, **given: Any) -> list[tuple[int, int]]:
        from types import SimpleNamespace

        who = {"student_init": init} if init else {"student": "s.apr"}
        config = options("distill", corpus_file, None, smoke=1, teacher="t.apr", hidden_weight=1.0, **who, **given)
        sizes: Any = (SimpleNamespace(n_layers=n), SimpleNamespace(n_layers=of))
        return match_layers(config, *sizes)

    assert shape.n_layers == 2
    assert matched("layers:0,3,4", 3, 6) == [(0, 0), (1, 3), (2, 4)]
    assert matched("width:hidden=32+layers:2", 2, 6) == [(0, 0), (1, 5)]
    assert matched(None, 3, 6) == [(0, 0), (1, 2), (2, 5)]
    assert matched(None, 4, 2, hidden_layers="1,3") == [(1, 0), (3, 1)]
    with pytest.raises(UsageError, match="layer"):
        matched(None, 3, 6, hidden_layers="3")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": None, "teacher_logprobs": "probs"}, "needs a loaded teacher"),
        ({"teacher": "http://localhost:1/v1"}, "needs a loaded teacher"),
        ({"vocab_policy": "aligned"}, "mutually exclusive"),
        ({"hidden_weight": 0.0, "hidden_loss": "mse"}, "--hidden-loss needs --hidden-weight"),
        ({"hidden_weight": 0.0, "hidden_layers": "1"}, "--hidden-layers needs --hidden-weight"),
    ],
)
def test_what_has_no_hidden_states_is_refused(given: dict[str, Any], message: str, corpus_file: Path) -> None:
    how: dict[str, Any] = {"teacher": "t.apr", "student": "s.apr", "hidden_weight": 1.0, "smoke": 1, **given}
    with pytest.raises(UsageError, match=message):
        options("distill", corpus_file, None, **how)
