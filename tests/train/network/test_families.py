"""A student of every family is trained, saved, continued and exported; a teacher with experts teaches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from arch_models import find_case
from draft_models import DRAFTED, write_drafted
from safetensors.torch import load_file, save_file
from train_blocks import resident_bytes
from train_models import Maker, error, load, our_logits, same_winners
from train_runs import lines, weights

import aprfmt
from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer.alignment import align
from aprtrain.network.shape import FAMILIES
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.run import run
from aprtrain.teacher.teacher import Teacher, estimate_bytes

ROUTED = tuple(row for row, words in FAMILIES.items() if "routed" in words)
TEACHERS = ("deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "lfm2_moe", "minimax_m2")
"""Their routers have a selection bias."""
STUDENTS = tuple(row for row in FAMILIES if row not in TEACHERS)


def trained(command: str, data: Path, folder: Path, steps: int, **given: Any) -> Path:
    how = {"steps": steps, "total_steps": 3, "save_every": 2, "lr": 3e-3, **given}
    model = run(command, train_runs.options(command, data, folder, **how), stream=None)["model"]
    assert model is not None
    return Path(model)


def exported(model: Path, folder: Path) -> Path:
    """The model as a GGUF, under a name that has nothing of its family: llama.cpp reads the name of a Phi-3."""
    aprfmt.import_model(model, folder / "model.apr", force=True)
    aprfmt.stamp(folder / "model.apr", folder / "named.apr", set={"name": "tiny"})
    out = folder / "tiny.gguf"
    aprfmt.export_model(folder / "named.apr", out)
    return out


@pytest.mark.turns(by="row")
@pytest.mark.parametrize("row", STUDENTS)
def test_a_student_is_trained_continued_and_exported(row: str, tiny: Maker, data: Path, tmp_path: Path) -> None:
    folder = tiny(row).folder
    whole = trained("pretrain", data, tmp_path / "whole", 3, init=str(folder))
    trained("pretrain", data, tmp_path / "parts", 2, init=str(folder))
    parts = trained("pretrain", data, tmp_path / "parts", 3, init=str(folder), resume=True)
    assert weights(whole) == weights(parts)
    assert [line["loss"] for line in lines(tmp_path / "whole")] == [line["loss"] for line in lines(tmp_path / "parts")]
    before, after = weights(folder), weights(whole)
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    ids_NT = tiny(row).ids_NT
    logits = our_logits(load(whole), ids_NT)
    gguf = exported(whole, tmp_path)
    assert error(our_logits(load(gguf), ids_NT), logits) < 1e-6


@pytest.mark.turns(by="row")
@pytest.mark.llama
@pytest.mark.parametrize("row", [row for row in FAMILIES if not find_case(row).llama_cpp_cannot])
def test_llama_cpp_gives_the_same_score(row: str, tiny: Maker, data: Path, tmp_path: Path) -> None:
    gguf = exported(tiny(row).folder, tmp_path)
    ours = aprfmt.evaluate(gguf, data, seq_len=32, limit=256, engine="torch", device="cpu")
    theirs = aprfmt.evaluate(gguf, data, seq_len=32, limit=256, engine="llama")
    assert ours.ce == pytest.approx(theirs.ce, rel=1e-3)


@pytest.mark.turns(by="row")
@pytest.mark.parametrize("row", ROUTED)
def test_a_teacher_with_experts_teaches(row: str, tiny: Maker, data: Path, tmp_path: Path) -> None:
    student = tiny("llama").folder
    given = {"teacher": str(tiny(row).folder), "student": str(student), "allow_weaker_teacher": True}
    model = trained("distill", data, tmp_path / "run", 6, total_steps=6, **given)
    kl = [line["kl1"] for line in lines(tmp_path / "run")]
    assert kl[-1] < kl[0]
    with open_network(model) as network:
        assert network.shape.architecture == "llama"


def test_the_routers_of_a_student_are_balanced(tiny: Maker, data: Path, tmp_path: Path) -> None:
    """Only with the loss does its weight matter; a student made of the layers of a MoE has experts."""
    made = {}
    for name, weight in (("off", 0.0), ("on", 1.0)):
        given = {"teacher": str(tiny("qwen3_moe").folder), "student_init": "layers:1", "router_aux_loss": weight}
        made[name] = weights(trained("distill", data, tmp_path / name, 2, allow_weaker_teacher=True, **given))
    changed = {name for name in made["on"] if made["on"][name] != made["off"][name]}
    assert any("mlp.gate.weight" in name for name in changed)


@pytest.mark.parametrize("name", [name for name, d in DRAFTED.items() if find_case(d.case).row in FAMILIES])
def test_draft_layers_are_left_aside(name: str, tmp_path: Path) -> None:
    """They stand behind the network's layers and are no part of it."""
    pytest.importorskip("transformers")
    write_drafted(name, tmp_path / "model")
    with open_network(tmp_path / "model") as network:
        decoder, first = load_decoder(network), network.shape.n_layers
        assert any(f"layers.{first}." in name or name.startswith("mtp.") for name in network.model.tensors)  # type: ignore[union-attr]
    assert bool(our_logits(decoder, torch.arange(24)[None]).isfinite().all())


def test_a_tensor_that_no_decoder_has_is_refused(tiny: Maker, tmp_path: Path) -> None:
    """Llama's config says that there is no bias, and a bias is there."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama").folder, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.1.mlp.up_proj.bias": torch.ones(96)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match="an unsupported tensor") as error, open_network(folder):
        pass
    assert error.value.tensor == "model.layers.1.mlp.up_proj.bias"


def test_what_chooses_experts_is_never_rounded(tiny: Maker) -> None:
    folder = tiny("deepseek_v3").folder
    narrow, wide = load(folder, torch.bfloat16), load(folder)
    name = "blocks.1.choice_bias"
    assert torch.equal(narrow.get_parameter(name), wide.get_parameter(name))
    assert narrow.get_parameter("blocks.1.router").dtype == torch.bfloat16


def test_unused_keys_and_values_are_left_aside(tiny: Maker, tmp_path: Path) -> None:
    """Published checkpoints have some in layers that use those of an earlier one."""
    folder, case = tmp_path / "model", tiny("gemma4_text/sharing")
    shutil.copytree(case.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.{}.self_attn.k_proj.weight"
    save_file(tensors | {name.format(2): tensors[name.format(0)].clone()}, folder / "model.safetensors")
    assert torch.equal(our_logits(load(folder), case.ids_NT), our_logits(load(case.folder), case.ids_NT))


@pytest.mark.parametrize(
    "row", ["mixtral", "qwen3_moe", "deepseek_v3", "gemma4_text/sharing", "qwen3_5_text", "qwen3_next"]
)
def test_experts_stay_blocks(row: str, tiny: Maker, tmp_path: Path) -> None:
    """In a GGUF the matrices of all experts are one tensor, and each is a slice of its blocks."""
    gguf = tmp_path / "q8.gguf"
    aprfmt.quantize_model(exported(tiny(row).folder, tmp_path), gguf, "q8_0")
    ids_NT, rows = tiny(row).ids_NT, 1000
    with open_network(gguf) as network:
        vocabulary = align(network.tokenizer, network.tokenizer, rows, rows)
        kept = Teacher(network, vocabulary, "q4k", "cpu")
        wide = Teacher(network, vocabulary, "bf16", "cpu")
        assert resident_bytes(kept.decoder) == estimate_bytes(network, "q4k") < estimate_bytes(network, "bf16")
    assert torch.equal(kept.hidden(ids_NT), wide.hidden(ids_NT))
    assert same_winners(kept.decoder.logits(kept.hidden(ids_NT)), wide.decoder.logits(wide.hidden(ids_NT)))
