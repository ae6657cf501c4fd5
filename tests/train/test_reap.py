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
from torch import Tensor
from train_corpora import functions, write_jsonl
from train_models import Maker, error, load, our_logits
from train_runs import weights

import aprfmt
from aprfmt.errors import AprError, CorruptError, RefusedError, UsageError
from aprtrain.budget import plan
from aprtrain.models import make_student
from aprtrain.network import decoder as decoder_module
from aprtrain.network.decoder import Block, Decoder
from aprtrain.network.experts import choose_experts
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.reap import FILE, saliency_of
from aprtrain.run import run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Maker:
    pytest.importorskip("transformers")
    return Maker(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "code.jsonl", functions(120))


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


@pytest.mark.parametrize(
    ("case", "how", "kind", "words"),
    [
        ("llama", "experts:2", RefusedError, "has no experts"),
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
