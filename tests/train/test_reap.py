"""--student-init experts:N keeps the experts that matter most on the data, and nothing else changes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import train_runs
from draft_models import write_drafted
from torch import Tensor
from train_corpora import functions, write_jsonl
from train_models import Maker, error, load, our_logits
from train_runs import weights

import aprfmt
from aprfmt.canonical.expert_pruning import most_salient
from aprfmt.errors import (
    AprError,
    CorruptError,
    MissingDependencyError,
    OutOfMemoryError,
    RefusedError,
    RunError,
    UnsupportedError,
    UsageError,
)
from aprfmt.io.child import ChildDiedError
from aprtrain.budget import plan
from aprtrain.models import make_student
from aprtrain.network import decoder as decoder_module
from aprtrain.network.decoder import Block, Decoder
from aprtrain.network.experts import choose_experts
from aprtrain.network.weights import load_decoder, open_network, values
from aprtrain.rating import rate_model
from aprtrain.reap import FILE, saliency_of
from aprtrain.run import run


def only(decoder: Decoder, kept: list[list[int]], ids_NT: Tensor) -> Tensor:
    """The decoder's logits if its routers can choose only the kept experts."""
    layers = iter(kept)

    def choose(y: Tensor, router: Tensor, bias: Tensor | None, *more: Any) -> tuple[Tensor, Tensor]:
        closed = torch.full((len(router),), -math.inf)
        closed[next(layers)] = 0.0
        return choose_experts(y, router, closed if bias is None else bias + closed, *more)

    with mock.patch.object(decoder_module, "choose_experts", choose):
        return our_logits(decoder, ids_NT)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "granitemoe", "gemma4_text", "qwen3_moe/q8_0"])
def test_a_student_computes_with_the_kept_experts_only(case: str, tiny: Maker, tmp_path: Path) -> None:
    """Stored one by one, stacked, with biases and scales, and as blocks of a GGUF."""
    path, kept = tiny(case.removesuffix("/q8_0")).folder, [[0, 3], [1, 2]]
    if case.endswith("q8_0"):
        aprfmt.quantize_model(path, tmp_path / "q8.gguf", "q8_0")
        path = tmp_path / "q8.gguf"
    ids_NT = tiny(case.removesuffix("/q8_0")).ids_NT
    with open_network(path) as teacher:
        student = make_student(teacher, "experts:2")
        assert student.experts is not None
        student.experts.of_layer = kept
        assert student.shape.experts is not None
        assert student.shape.experts.n == student.hparams.num_experts == 2
        logits = our_logits(load_decoder(student), ids_NT)
    assert error(logits, only(load(path), kept, ids_NT)) < 1e-6


def test_the_saliency_of_experts_is_its_definition(tiny: Maker) -> None:
    """The mean over an expert's tokens of its router weight times the norm of its output."""
    decoder, ids_NT = load(tiny("qwen3_moe").folder).requires_grad_(False), tiny("qwen3_moe").ids_NT
    seen: list[tuple[Block, Tensor]] = []
    routed = Block._routed

    def see(block: Block, y_NTD: Tensor, router_NTD: Tensor) -> Tensor:
        seen.append((block, y_NTD.flatten(0, 1)))
        return routed(block, y_NTD, router_NTD)

    with decoder.rating_experts() as sums, mock.patch.object(Block, "_routed", see):
        our_logits(decoder, ids_NT)
    e = decoder.shape.experts
    assert e is not None
    for sums_2E, (block, y_SD) in zip(sums, seen, strict=True):
        assert sums_2E is not None
        weights_SU, chosen_SU = choose_experts(y_SD, block.router, None, None, e)
        for expert in range(e.n):
            gate, up = (y_SD @ block.experts_gate_up.view(e.n, -1, 64)[expert].T).chunk(2, -1)
            out_SD = (torch.nn.functional.silu(gate) * up) @ block.experts_down.view(e.n, 64, -1)[expert].T
            tokens, uses = torch.where(chosen_SU == expert)
            values = weights_SU[tokens, uses] * out_SD[tokens].norm(dim=-1)
            assert len(values) > 1
            assert float(saliency_of(sums_2E)[expert]) == pytest.approx(float(values.mean()), rel=1e-4)
    assert all(block.ratings is None for block, _ in seen)


def test_a_run_keeps_the_most_salient_experts_and_goes_on_with_them(tiny: Maker, data: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "teacher": str(tiny("qwen3_moe").folder), "student_init": "experts:3+layers:1", "total_steps": 3,
        "save_every": 2, "lr": 3e-3, "allow_weaker_teacher": True,
    }  # fmt: skip

    def trained(folder: Path, steps: int, **more: Any) -> dict[str, bytes]:
        model = run("distill", train_runs.options("distill", data, folder, steps=steps, **given, **more), stream=None)
        return weights(Path(str(model["model"])))

    planned = plan("distill", train_runs.options("distill", data, tmp_path / "whole", steps=3, **given))
    whole = trained(tmp_path / "whole", 3)
    with open_network(tmp_path / "whole/model.apr") as network:
        assert planned["student"]["parameters"] == network.shape.n_params
    trained(tmp_path / "parts", 2)
    found = json.loads((tmp_path / "parts" / FILE).read_bytes())
    assert found == json.loads((tmp_path / "whole" / FILE).read_bytes())
    for kept, saliency in zip(found["kept"], found["saliency"], strict=True):
        assert kept == sorted(np.argsort(saliency)[1:].tolist())
    (tmp_path / "parts" / FILE).write_text(json.dumps(found | {"kept": [[0, 1]] * 2}))
    with pytest.raises(CorruptError, match="does not list 3 experts"):
        trained(tmp_path / "parts", 3, resume=True)
    (tmp_path / "parts" / FILE).write_text(json.dumps(found))
    assert trained(tmp_path / "parts", 3, resume=True) == whole


@pytest.mark.parametrize("source", ["folder", "q8_0"])
def test_a_pruned_file_keeps_the_most_salient_experts(source: str, tiny: Maker, data: Path, tmp_path: Path) -> None:
    """Of a GGUF the blocks of the kept experts are those of the source."""
    path, out = tiny("qwen3_moe").folder, tmp_path / "out.apr"
    if source == "q8_0":
        path, out = tmp_path / "q8.gguf", tmp_path / "out.gguf"
        aprfmt.quantize_model(tiny("qwen3_moe").folder, path, "q8_0")
    report = aprfmt.prune_model(path, out, experts=3, experts_from=data, drop_layers="0")
    kept = most_salient(rate_model(str(path), [data], lambda done, of: None)[0], 3)
    gone = [min({*range(4)} - {*of}) for of in kept]
    assert f"experts dropped: layer 0: {gone[0]}; layer 1: {gone[1]}" in report.losses
    with open_network(path) as before, open_network(out) as after:
        assert after.shape.experts is not None
        assert (after.shape.experts.n, after.shape.n_layers) == (3, 1)
        name = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
        for new, old in enumerate(kept[1]):
            ours, theirs = after.tensors[name.format(0, new)], before.tensors[name.format(1, old)]
            assert ours.dtype == theirs.dtype == ("F32" if source == "folder" else "Q8_0")
            assert b"".join(map(bytes, ours.chunks())) == b"".join(map(bytes, theirs.chunks()))
        router = "model.layers.{}.mlp.gate.weight"
        before_ED = torch.cat([*values(before.tensors[router.format(1)], torch.float32)]).view(4, -1)
        after_ED = torch.cat([*values(after.tensors[router.format(0)], torch.float32)]).view(3, -1)
        assert torch.equal(after_ED, before_ED[kept[1]])
    with aprfmt.open(out) as model:
        described = model.metadata["description" if source == "folder" else "general.description"]
        assert "Kept in each layer: 3 of 4 experts." in str(described)


def test_a_plan_of_pruned_experts_runs_no_model(tiny: Maker, data: Path, tmp_path: Path) -> None:
    with mock.patch("aprfmt.convert.pruning.rate_experts", side_effect=AssertionError):
        report = aprfmt.prune_model(
            tiny("qwen3_moe").folder, tmp_path / "out.apr", experts=2, experts_from=data, plan=True
        )
    assert report.losses == ["2 of 4 experts of each layer kept: those most salient on the texts"]
    assert not (tmp_path / "out.apr").exists()


def test_experts_of_a_family_that_does_not_train_are_not_pruned(tiny: Maker, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'qwen2_moe' is not supported"):
        aprfmt.prune_model(tiny("qwen2_moe").folder, tmp_path / "out.apr", experts=2, experts_from=data)
    assert not (tmp_path / "out.apr").exists()


def test_experts_of_an_mtp_layer_are_not_pruned(data: Path, tmp_path: Path) -> None:
    """A GGUF has one number of experts for all layers."""
    write_drafted("glm4_moe", tmp_path / "m")
    with pytest.raises(RefusedError, match="the experts of an MTP layer") as error:
        aprfmt.prune_model(tmp_path / "m", tmp_path / "out.apr", experts=2, experts_from=data)
    assert "--no-mtp" in str(error.value.hint)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ({"missing": "No module named 'torch'"}, MissingDependencyError, "--experts runs the model: No module"),
        (ChildDiedError("was killed", "log\nlast"), OutOfMemoryError, "rates the experts was killed: last"),
        (ChildDiedError("took too long", "", late=True), RunError, "took too long"),
        ({"error": ["RefusedError", "no", "so"], "path": "m", "tensor": "t"}, RefusedError, "m: no .tensor 't'"),
    ],
)
def test_a_rating_that_fails_says_why(
    answer: Any, kind: type[AprError], words: str, tiny: Maker, data: Path, tmp_path: Path
) -> None:
    with mock.patch("aprfmt.convert.torch_child.Child") as child, pytest.raises(kind, match=words):  # noqa: PT012
        child.return_value.ask.side_effect = [answer]
        aprfmt.prune_model(tiny("qwen3_moe").folder, tmp_path / "out.apr", experts=2, experts_from=data)
    child.return_value.close.assert_called_once()
    assert not (tmp_path / "out.apr").exists()


@pytest.mark.parametrize(
    ("case", "given", "kind", "words"),
    [
        ("qwen3_moe", {"experts": 3}, UsageError, "together"),
        ("qwen3_moe", {"experts_from": "t"}, UsageError, "together"),
        ("qwen3_moe", {"experts": 0, "experts_from": "t"}, UsageError, "at least 1"),
        ("qwen3_moe", {"experts": 1, "experts_from": "t"}, UsageError, "has 4 and uses 2 per token"),
        ("qwen3_moe", {"experts": 2, "experts_from": "none"}, AprError, "none"),
        ("llama", {"experts": 2, "experts_from": "t"}, RefusedError, "no experts to prune: its architecture is llama"),
    ],
)
def test_experts_that_cannot_be_pruned_are_refused(
    case: str, given: dict[str, Any], kind: type[AprError], words: str, tiny: Maker, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "t", functions(2))
    given |= {"experts_from": tmp_path / str(given["experts_from"])} if "experts_from" in given else {}
    with pytest.raises(kind, match=words):
        aprfmt.prune_model(tiny(case).folder, tmp_path / "out.apr", **given)
    assert not (tmp_path / "out.apr").exists()


@pytest.mark.parametrize(
    ("case", "how", "kind", "words"),
    [
        ("llama", "experts:2", RefusedError, "no experts to prune: its architecture is llama"),
        ("qwen3_moe", "experts:4", UsageError, "has 4 and uses 2 per token"),
        ("qwen3_moe", "experts:1", UsageError, "has 4 and uses 2 per token"),
        ("qwen3_moe", "experts:few", UsageError, "not a number of experts"),
        ("qwen3_moe", "experts:2+experts:3", UsageError, "twice"),
        ("deepseek_v2/groups", "experts:2", RefusedError, "groups of experts"),
    ],
)
def test_what_cannot_be_pruned_is_refused(case: str, how: str, kind: type[AprError], words: str, tiny: Maker) -> None:
    with open_network(tiny(case).folder) as teacher, pytest.raises(kind, match=words):
        make_student(teacher, how)


@pytest.mark.parametrize(
    ("case", "more", "words"),
    [("llama", {}, "the student has no experts"), ("mixtral", {"lora": "r=2"}, "--lora trains no routers")],
)
def test_a_loss_of_routers_that_does_nothing_is_refused(
    case: str, more: dict[str, str], words: str, tiny: Maker, data: Path, tmp_path: Path
) -> None:
    config = train_runs.options(
        "pretrain", data, tmp_path / "run", init=str(tiny(case).folder), router_aux_loss=0.01, steps=1, **more
    )
    with pytest.raises(UsageError, match=f"--router-aux-loss has no effect: {words}"):
        run("pretrain", config, stream=None)
