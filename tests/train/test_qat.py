"""Quantization-aware training: the types of the export, blocks that are exact, a run that resumes, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_runs
from torch import Tensor
from train_runs import load_state, weights
from train_worlds import Threads

import aprfmt
from aprfmt.codecs import ggml
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import AprError, RefusedError, UsageError
from aprtrain import qat
from aprtrain.budget import plan
from aprtrain.config_sources import build
from aprtrain.kernels.encode import ENCODED, encode, encode_on_host, fit_steps
from aprtrain.models import new_student
from aprtrain.network.decoder import Decoder
from aprtrain.network.names import hf_names, hf_parts
from aprtrain.network.weights import fill, open_network
from aprtrain.optim import flat
from aprtrain.optim.flat import FlatOptimizer
from aprtrain.optim.rules import Settings
from aprtrain.qat import SEARCHED, Quantizer, grid_bytes, grid_of, types_of
from aprtrain.run import run
from aprtrain.world import World

Distil = Callable[..., dict[str, Any]]
EMBEDDING = "model.embed_tokens.weight"
SELF = {"student_init": "self", "kd_weight": 1.0, "lr": 1e-3, "save_every": 0}


def dtypes(path: Path) -> dict[str, str]:
    """The dtype of each quantized tensor of a file."""
    with aprfmt.open(path) as model:
        return {name: t.dtype for name, t in model.tensors.items() if DTYPES[t.dtype].is_quantized}


# --- which tensors, in which type ---


@pytest.mark.parametrize("preset", ["q4_0", "q8_0", "q4_k_m", "nvfp4", "mxfp4"])
def test_types_are_those_that_quantize_chooses(teacher_file: Path, tmp_path: Path, preset: str) -> None:
    quantized = tmp_path / "q.apr"
    aprfmt.convert_model(teacher_file, quantized, dtype=preset, pure=preset in qat.UNIFORM)
    with open_network(teacher_file) as network:
        assert types_of(network, preset) == dtypes(quantized)


@pytest.mark.parametrize(
    ("preset", "kind", "words"), [("q4_9", UsageError, "unknown"), ("iq4_xs", UsageError, "cannot train into IQ4_NL")]
)
def test_presets_that_are_refused(teacher_file: Path, preset: str, kind: type[AprError], words: str) -> None:
    with open_network(teacher_file) as network, pytest.raises(kind, match=words):
        types_of(network, preset)


def test_rows_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match="rows of 48 values are not a multiple of 32") as error:
        types_of(new_student(tmp_path, None), "q4_0")
    assert error.value.tensor is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"student_init": "self"}, "needs --qat"),
        ({"qat_every": 3}, "--qat-every needs --qat"),
        ({"qat_dampening": 0.1}, "--qat-dampening needs --qat"),
        ({"qat": "q4_0", "shard": "weights"}, "does not support --shard weights"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], words: str) -> None:
    usual = {"teacher": "t.apr", "student_init": "layers:1", "data": "d", "output": "o", "steps": 1}
    with pytest.raises(UsageError, match=words):
        build("distill", {**usual, **given})


# --- scales that are kept between two searches ---


@pytest.mark.parametrize("dtype", SEARCHED)
def test_grids_hold_the_values_of_their_blocks_and_round_to_the_nearest(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 256, generator=generator) * torch.logspace(-3, 1, 64)[:, None]
    values[7] = 0
    stored = encode_on_host(dtype, values.view(-1))
    assert np.array_equal(stored, ggml.encode(dtype, values.view(-1).numpy()))
    grid, decoded, out = (
        grid_of(dtype, stored, torch.device("cpu")),
        torch.from_numpy(ggml.decode(dtype, stored)),
        torch.empty(values.numel()),
    )
    grid.round(decoded, out)
    torch.testing.assert_close(out, decoded, rtol=1e-6, atol=1e-9)
    grid.round(values.view(-1), out)
    assert bool(((out - values.view(-1)).abs() <= (decoded - values.view(-1)).abs() * 1.00001 + 1e-6).all())


# --- dampening ---


def moved(teacher_file: Path, preset: str, pull: float) -> dict[str, tuple[str, Tensor, Tensor]]:
    """Type, master and rounded weights of each tensor after two updates without a gradient; the second pulls."""
    with open_network(teacher_file) as network:
        quantizer = Quantizer(network, types_of(network, preset), every=8)
        decoder = Decoder(network.shape)
        optimizer = FlatOptimizer(decoder, Settings(weight_decay=0), rounding=quantizer)

        def write(parameter: str, whole: Tensor) -> None:
            for name, target in hf_parts(network.shape, parameter, whole):
                fill(network, name, target)

        optimizer.load("master", write)
        for quantizer.pull in (0.0, pull):
            optimizer.clear()
            optimizer.step(1e-2)
        optimizer.search_scales()
        copies = dict(decoder.named_parameters())
        return {
            hf: (quantizer.types.get(hf, "F32"), master.clone(), rounded.detach().clone())
            for name, whole in optimizer.gather("master")
            for (hf, master), (_, rounded) in zip(
                hf_parts(network.shape, name, whole), hf_parts(network.shape, name, copies[name]), strict=True
            )
        }


@pytest.mark.parametrize("preset", ["q4_0", "nvfp4", "q4_k_m"])
def test_an_update_pulls_weights_toward_their_codes_which_stay(teacher_file: Path, preset: str) -> None:
    """Each weight goes a quarter of the way, once; with scales found on the device the network computes as before."""
    before, after = (moved(teacher_file, preset, pull) for pull in (0.0, 0.25))
    for hf, (dtype, master, rounded) in before.items():
        _, pulled, rounded_too = after[hf]
        if dtype == "F32":
            assert torch.equal(pulled, master), hf
        elif dtype in ENCODED:
            torch.testing.assert_close(pulled, torch.lerp(master, rounded, 0.25), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(rounded_too, rounded, rtol=2e-3, atol=1e-6)
        else:
            assert float((pulled - rounded).norm() / (master - rounded).norm()) < 0.9, hf


# --- a run ---


@pytest.mark.parametrize("preset", ["q4_0", "q4_k_m", "nvfp4"])
def test_the_exported_file_is_what_the_last_evaluation_scored(
    distil: Distil, teacher_file: Path, tmp_path: Path, preset: str
) -> None:
    summary = distil(qat=preset, steps=5, qat_every=2, **SELF)
    folder, gguf = tmp_path / "run", tmp_path / "out.gguf"
    aprfmt.export_model(folder / "model.apr", gguf)
    scores = aprfmt.evaluate(gguf, folder / "tokens", teacher=teacher_file, device="cpu", seq_len=32, limit=512)
    assert summary["first"]["kl"] > 0
    assert scores.kl == pytest.approx(summary["last"]["kl"], rel=1e-4)
    assert dtypes(folder / "model.apr") == dtypes(folder / "ckpt-step-000005.apr")
    # Master weights are floats: the blocks are what the codec makes of them, for Q4_0 on the steps of the first ones.
    state, _ = load_state(folder / "ckpt-step-000005.state")
    stored = weights(folder / "model.apr")
    with open_network(teacher_file) as network:
        types = types_of(network, preset)
        for parameter in dict.fromkeys(name for name, _, _ in hf_names(network.shape).values()):
            for hf, part in hf_parts(network.shape, parameter, state[f"master.{parameter}"]):
                if types.get(hf) == "Q4_0":
                    fill(network, hf, first := torch.empty_like(part))
                    steps = fit_steps(first.reshape(-1))
                    assert encode("Q4_0", part.reshape(-1), steps).numpy().tobytes() == stored[hf], hf
                elif hf in types:
                    assert ggml.encode(types[hf], part.reshape(-1).numpy()).tobytes() == stored[hf], hf
    # Quantizing once more changes nothing.
    again = tmp_path / "again.gguf"
    aprfmt.export_model(folder / "model.apr", again, dtype=preset, pure=preset in qat.UNIFORM)
    assert weights(again) == weights(gguf)


def test_floats_of_a_trained_model_quantize_to_its_blocks(distil: Distil, tmp_path: Path) -> None:
    distil(qat="q4_0", steps=3, **SELF)
    model, floats, again = tmp_path / "run/model.apr", tmp_path / "bf16.apr", tmp_path / "again.apr"
    aprfmt.convert_model(model, floats, dtype="bf16")
    aprfmt.convert_model(floats, again, dtype="q4_0")  # which finds the lattice
    back = tmp_path / "back.apr"
    aprfmt.convert_model(again, back, dtype="bf16")
    found, wanted = (
        {name: [value & (0xFFFF if value != 1 << 15 else 0) for value in np.frombuffer(data, "u2").tolist()]  # -0 is 0
         for name, data in weights(path).items()}
        for path in (back, floats)
    )  # fmt: skip
    lattices = [name for name, dtype in dtypes(model).items() if dtype == "Q4_0"]
    assert lattices
    assert {name: found[name] == wanted[name] for name in lattices} == dict.fromkeys(lattices, True)


@pytest.mark.parametrize(("preset", "other"), [("q4_k_m", "q4_0"), ("q4_0", "q8_0")])
def test_a_run_goes_on_where_it_was_stopped(distil: Distil, tmp_path: Path, preset: str, other: str) -> None:
    how = {"qat": preset, "qat_every": 4, "total_steps": 9, **SELF, "save_every": 3}
    distil("whole", steps=6, **how)
    distil("parts", steps=3, **how)
    distil("parts", steps=6, resume=True, **how)
    assert weights(tmp_path / "parts/model.apr") == weights(tmp_path / "whole/model.apr")
    with pytest.raises(RefusedError, match=f"qat was '{preset}'"):
        distil("parts", steps=7, resume=True, **{**how, "qat": other})


def test_the_pull_rises_from_0(distil: Distil, tmp_path: Path) -> None:
    """The first update is that of a run without; later ones are not."""
    for dampening in (0.0, 0.5):
        distil(f"{dampening}", qat="q4_0", steps=2, qat_dampening=dampening, **{**SELF, "save_every": 1})

    def masters(dampening: float, step: int) -> dict[str, Tensor]:
        state, _ = load_state(tmp_path / f"{dampening}/ckpt-step-00000{step}.state")
        return {name: whole for name, whole in state.items() if name.startswith("master.") and whole.ndim > 1}

    for name, whole in masters(0.0, 1).items():
        assert torch.equal(masters(0.5, 1)[name], whole), name
    for name, whole in masters(0.0, 2).items():
        assert not torch.equal(masters(0.5, 2)[name], whole), name


def test_pretraining_takes_it_too(teacher_file: Path, corpus_file: Path, tmp_path: Path) -> None:
    config = train_runs.options(
        "pretrain", corpus_file, tmp_path / "run", init=str(teacher_file), qat="q8_0", steps=1, save_every=0
    )
    summary = run("pretrain", config, stream=None)
    assert set(dtypes(Path(str(summary["model"]))).values()) == {"Q8_0"}


def test_the_plan_counts_it(teacher_file: Path, corpus_file: Path) -> None:
    def planned(**given: Any) -> Any:
        how = {"teacher": str(teacher_file), "steps": 2, **given}
        return plan("distill", train_runs.options("distill", corpus_file, None, smoke=1, **how))

    with_it, without = planned(student_init="self", qat="q4_k_m"), planned(student_init="layers:1")
    assert without["qat"] is None
    assert with_it["qat"]["types"]["Q5_0"]["tensors"] > 0
    memory = {row["name"]: row["bytes"] for row in with_it["memory"]}
    assert memory["student: compute copy"] == 4 * with_it["student"]["parameters"]
    assert memory["student: scales of blocks"] > 0
    with open_network(teacher_file) as network:
        assert grid_bytes(network, {EMBEDDING: "Q4_0"}) == prod(hf_names(network.shape)[EMBEDDING][2]) // 8


# --- in several processes ---


def trained(teacher_file: Path, preset: str, world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and weights of the network after two updates."""
    with open_network(teacher_file) as network:
        quantizer = Quantizer(network, types_of(network, preset), 4)
        decoder = Decoder(network.shape)
        optimizer = FlatOptimizer(decoder, Settings(), world, quantizer)

        def write(parameter: str, whole: Tensor) -> None:
            for name, target in hf_parts(network.shape, parameter, whole):
                fill(network, name, target)

        optimizer.load("master", write)
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            optimizer.clear()
            for name in optimizer.shapes:
                grad = optimizer.grad_of(name)
                grad += torch.randn(grad.shape, generator=generator) / world.size
            optimizer.step(1e-2)
        decoder(torch.zeros(1, 2, dtype=torch.int64))  # a call waits for the weights
        copies = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
        return {name: whole.clone() for name, whole in optimizer.gather("master")}, copies


@pytest.mark.parametrize("preset", ["q4_0", "q4_k_m"])
def test_processes_round_their_parts(teacher_file: Path, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_BUCKET", 1 << 14)
    masters, copies = trained(teacher_file, preset, World(torch.device("cpu")))
    for found, weights_of in Threads(2).run(lambda world: trained(teacher_file, preset, world)):
        for name, master in masters.items():
            torch.testing.assert_close(found[name], master, rtol=0, atol=1e-6)
            near = (weights_of[name] - copies[name]).abs() <= 1e-5
            assert float(near.float().mean()) > 0.999, name  # a code at a tie may differ
    if preset == "q4_0":
        for name, copy in copies.items():
            on_lattice = torch.equal(copy, masters[name])
            assert on_lattice is (copy.ndim == 1), name
