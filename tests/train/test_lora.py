"""LoRA students: pairs beside frozen matrices learn, are saved as PEFT and GGUF, and merge to the model of the run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_models import Maker, error, load, our_logits
from train_quantized import write_gguf
from train_runs import lines, load_state, weights

import aprfmt
from aprfmt.errors import AprError, UsageError
from aprfmt.formats import open as open_model
from aprtrain.config_sources import build
from aprtrain.lora_spec import LoraSpec, parse_lora
from aprtrain.network.decoder import Block, Decoder
from aprtrain.network.lora import add_lora, lora_params, merged
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.teacher.teacher import BlocksDecoder

Distil = Callable[..., dict[str, Any]]
SPEC = LoraSpec(4, 8.0)


def masters(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in decoder.named_parameters() if p.requires_grad}


def grad(decoder: Decoder, name: str) -> torch.Tensor:
    found = decoder.get_parameter(name).grad
    assert found is not None
    return found


def with_random_pairs(decoder: Decoder, spec: LoraSpec = SPEC) -> Decoder:
    add_lora(decoder, spec, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, p in decoder.named_parameters():
        if name.endswith("_lora_b"):
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return decoder


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("lora-models"))


@pytest.mark.parametrize("case", ["llama/biases", "qwen2", "phi3", "starcoder2", "gemma2"])
def test_pairs_compute_what_the_merged_weights_do_and_so_do_their_gradients(maker: Maker, case: str) -> None:
    """Of fused and plain matrices, with biases, with and without gates: dB = s dW A^T and dA = s B^T dW."""
    tiny = maker(case)
    ids_NT = tiny.ids_NT[:, :24]
    decoder = with_random_pairs(load(tiny.folder, torch.float64))
    pairs = masters(decoder)
    other = load(tiny.folder, torch.float64)
    for name, part in merged(decoder, pairs):
        other.hf_tensors()[name].copy_(part)
    spread = torch.randn(other.shape.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found, wanted = (each(ids_NT) for each in (decoder, other))
    assert error(found.detach(), wanted.detach()) < 1e-6, "merged weights are float32"
    (found @ spread).sum().backward()
    (wanted @ spread).sum().backward()
    assert sum(p.numel() for p in pairs.values()) == lora_params(decoder.shape, SPEC)
    names = [name.removesuffix("_lora_b") for name in pairs if name.endswith("_lora_b")]
    assert len(names) == len(decoder.blocks) * 4
    for name in names:
        a, b = pairs[f"{name}_lora_a"], pairs[f"{name}_lora_b"]
        owner, _, parameter = name.rpartition(".")
        block = decoder.get_submodule(owner)
        assert isinstance(block, Block)
        sizes = list(block.lora[parameter][0])
        parts = zip(torch.split(grad(other, name), sizes), a.chunk(len(sizes)), torch.split(b, sizes), strict=True)
        grads_b, grads_a = zip(*((2 * g @ a.T, 2 * b.T @ g) for g, a, b in parts), strict=True)
        assert error(grad(decoder, f"{name}_lora_b"), torch.cat(grads_b)) < 1e-5
        assert error(grad(decoder, f"{name}_lora_a"), torch.cat(grads_a)) < 1e-5
    assert all(p.grad is None for p in decoder.parameters() if not p.requires_grad)


def test_a_base_of_blocks_gives_the_gradients_of_its_decoded_weights(tmp_path: Path) -> None:
    """The scratch that layers share is decoded again for the backward pass."""
    with open_network(write_gguf(tmp_path / "b.gguf")) as network:
        blocks, plain = BlocksDecoder(network, torch.device("cpu")), load_decoder(network, torch.bfloat16)
        assert {name.split(".")[0] for name in blocks.stored} >= {"blocks"}
    ids_NT = torch.arange(40)[None] % 320
    spread = torch.randn(blocks.shape.d_model, generator=torch.Generator().manual_seed(3)).bfloat16()
    for decoder in (blocks, plain):
        (with_random_pairs(decoder)(ids_NT) @ spread).float().sum().backward()
    for name in masters(blocks):
        assert torch.equal(grad(blocks, name), grad(plain, name)), name
    whole = [dict(merged(decoder, masters(decoder))) for decoder in (blocks, plain)]
    assert all(torch.equal(whole[0][name].float(), part.float()) for name, part in whole[1].items())


@pytest.fixture(scope="module")
def student(teacher_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "s.apr"
    aprfmt.prune_model(teacher_file, path, keep_layers=[0])
    return path


def adapt(distil: Distil, student: Path, to: str, **given: Any) -> dict[str, Any]:
    how = {"student": str(student), "student_init": None, "lora": "r=4", "lr": 2e-2, "steps": 6}
    return distil(to, **{**how, **given})


def test_a_run_learns_pairs_alone_and_saves_them_in_every_form(distil: Distil, tmp_path: Path, student: Path) -> None:
    summary = adapt(distil, student, "run")
    assert summary["last"]["kl"] < 0.9 * summary["first"]["kl"]
    run = tmp_path / "run"
    state, _ = load_state(run / "ckpt-step-000006.state")
    assert {name.rpartition("_")[2] for name in state if name.startswith("master.")} == {"a", "b"}
    with aprfmt.open(student) as base, aprfmt.open(run / "model.apr") as model:
        changes = {
            name: model.tensors[name].torch().double() - tensor.torch().double()
            for name, tensor in base.tensors.items()
        }
    changed = {name for name, change in changes.items() if change.any()}
    assert len(changed) == 7
    for name in changed:
        assert torch.linalg.matrix_rank(changes[name], atol=1e-5) <= 4
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, "s.apr")
    ids_NT = torch.arange(30)[None]
    ours = our_logits(load(run / "model.apr"), ids_NT)
    for form in ("adapter", "adapter.gguf"):
        aprfmt.merge_adapter(student, run / form, tmp_path / f"{form}.merged.apr")
        assert error(our_logits(load(tmp_path / f"{form}.merged.apr"), ids_NT), ours) < 1e-5, form
    aprfmt.export_model(student, tmp_path / "base", format="hf")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base_model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for peft
        theirs = PeftModel.from_pretrained(base_model, str(run / "adapter"))
    with torch.no_grad():
        assert error(ours, theirs(ids_NT).logits) < 1e-4


def test_an_adapter_of_another_base_is_refused(distil: Distil, tmp_path: Path, student: Path, maker: Maker) -> None:
    adapt(distil, student, "run", steps=1)
    for form in ("adapter", "adapter.gguf"):
        with pytest.raises(AprError):
            aprfmt.merge_adapter(maker("qwen2").folder, tmp_path / "run" / form, tmp_path / "m.apr")


def test_a_run_of_pairs_goes_on_as_if_it_had_not_stopped(distil: Distil, tmp_path: Path, student: Path) -> None:
    adapt(distil, student, "whole", steps=4)
    adapt(distil, student, "part", steps=2, total_steps=4)
    adapt(distil, student, "part", steps=4, total_steps=4, resume=True)
    assert weights(tmp_path / "whole/model.apr") == weights(tmp_path / "part/model.apr")
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()
    with pytest.raises(AprError, match="lora was 'r=4'"):
        adapt(distil, student, "part", steps=5, resume=True, lora="r=2")


def test_a_quantized_base_learns_and_its_blocks_stay(distil: Distil, tmp_path: Path, student: Path) -> None:
    aprfmt.convert_model(student, tmp_path / "q.gguf", dtype="q8_0")
    made = []
    with pytest.MonkeyPatch.context() as patch:

        def blocks(*given: Any) -> BlocksDecoder:
            made.append(BlocksDecoder(*given))
            return made[-1]

        patch.setattr("aprtrain.models.BlocksDecoder", blocks)
        summary = adapt(distil, tmp_path / "q.gguf", "run")
    assert len(made) == 1
    assert made[0].stored
    assert summary["last"]["kl"] < 0.9 * summary["first"]["kl"]
    with open_model(tmp_path / "run/model.apr") as model:
        assert not any(tensor.dtype == "Q8_0" for tensor in model.tensors.values())
    assert lines(tmp_path / "run", "evaluation")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": "r=0"}, "is not valid"),
        ({"lora": "16"}, "is not valid"),
        ({"lora": "r=4,targets=heads"}, "is not valid"),
        ({"lora": "r=4,dropout=1"}, "is not valid"),
        ({"lora": "r=4", "student": None, "student_init": "layers:1"}, "needs the file"),
        ({"lora": "r=4", "shard": "weights"}, "mutually exclusive"),
        ({"lora_base": "q4k"}, "--lora-base needs --lora"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    base = {"teacher": "t", "student": "s", "data": "d", "output": "o", "steps": 1}
    with pytest.raises(UsageError, match=words):
        build("distill", base | change)


def test_a_rank_above_a_matrix_is_refused(distil: Distil, student: Path) -> None:
    with pytest.raises(UsageError, match=r"exceeds \d+, the smaller side of"):
        adapt(distil, student, "run", lora="r=100000")


def test_the_scale_is_that_of_peft() -> None:
    assert parse_lora("r=16") == LoraSpec(16, 32.0, "all")
    assert parse_lora("r=8,alpha=4,targets=mlp").scale == 0.5
    assert train_runs.SIZES["seq_len"] == 32
