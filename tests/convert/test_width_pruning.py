"""Widths of a model: what has no weight can go without a change, in every form; what cannot be narrowed is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import build, find_case, token_ids, transformers_logits, write_tokenizers
from safetensors.numpy import save_file

import aprfmt
from aprfmt.canonical.width_pruning import parse_widths
from aprfmt.errors import AprError, RefusedError, UsageError
from aprfmt.types import Array

Base = Callable[[str], Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Gives the folder of a case, which must not be written to."""
    pytest.importorskip("transformers")
    work = tmp_path_factory.mktemp("narrowed")

    def get(name: str) -> Path:
        folder = work / name.replace("/", "_")
        if not folder.exists():
            case = find_case(name)
            build(case, folder, write_tokenizers(work / "tokenizers", [case.tokenizer], 300))
        return folder

    return get


def values(path: Path) -> dict[str, Array]:
    with aprfmt.open(path) as model:
        return {name: tensor.numpy() for name, tensor in model.tensors.items()}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def with_idle_parts(folder: Path, out: Path) -> str:
    """A copy in which some neurons and a group of heads write nothing; the widths that are left of it."""
    shutil.copytree(folder, out)
    config = config_of(folder)
    ffn, heads = config["intermediate_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    tensors = values(folder)
    idle = np.random.default_rng(3).permutation(ffn)[: ffn - 64]
    for name in [name for name in tensors if re.search(r"(down_proj|mlp\.c_proj)\.weight$", name)]:
        tensors[name] = tensors[name].copy()
        tensors[name][:, idle] = 0
    for number, name in enumerate(sorted(name for name in tensors if name.endswith("o_proj.weight"))):
        parts = tensors[name].reshape(len(tensors[name]), groups, -1).copy()
        parts[:, number % groups] = 0
        tensors[name] = parts.reshape(tensors[name].shape)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return f"ffn=64,heads={heads - heads // groups},kv_heads={groups - 1}"


@pytest.mark.parametrize("name", ["llama", "llama/biases", "olmo", "stablelm", "gemma2", "phi3", "starcoder2"])
def test_what_has_no_weight_goes_without_a_change(name: str, base: Base, tmp_path: Path) -> None:
    width = with_idle_parts(base(name), tmp_path / "idle")
    if name in ("phi3", "stablelm"):  # their config.json has no place for the size of a head
        width = "ffn=64"
    report = aprfmt.prune_model(tmp_path / "idle", tmp_path / "out", width=width, format="hf")
    assert f"64 of {config_of(base(name))['intermediate_size']} ffn" in report.losses[0]
    ids, config = token_ids(base(name)), config_of(tmp_path / "out")
    assert config["intermediate_size"] == 64
    wanted = transformers_logits(tmp_path / "idle", ids)
    assert np.abs(transformers_logits(tmp_path / "out", ids) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_channels_go_by_the_size_of_their_embedding(base: Base, tmp_path: Path) -> None:
    aprfmt.prune_model(base("llama"), tmp_path / "out", width={"hidden": 32}, keep_layers="1", format="hf")
    before, after = values(base("llama")), values(tmp_path / "out")
    embedding = before["model.embed_tokens.weight"].astype(np.float64)
    kept = np.sort(np.argsort(-(embedding**2).sum(axis=0))[:32])
    assert np.array_equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"][:, kept])
    layer = "model.layers.{}.self_attn.{}_proj.weight"
    assert np.array_equal(after[layer.format(0, "o")], before[layer.format(1, "o")][kept])
    assert np.array_equal(after[layer.format(0, "q")], before[layer.format(1, "q")][:, kept])
    assert config_of(tmp_path / "out")["head_dim"] == 16
    aprfmt.prune_model(base("llama"), tmp_path / "out.apr", width="hidden=32", keep_layers="1")
    with aprfmt.open(tmp_path / "out.apr") as model:
        told = str(model.metadata["description"])
    assert "Dropped from the base model: layer 0 of 2" in told
    assert "32 of 64 hidden" in told


def test_rows_are_chosen_part_by_part(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aprfmt.prune_model(base("llama"), tmp_path / "whole.apr", width="ffn=64,heads=2,kv_heads=2")
    monkeypatch.setattr("aprfmt.canonical.width_pruning._PIECE", 1000)
    aprfmt.prune_model(base("llama"), tmp_path / "parts.apr", width="ffn=64,heads=2,kv_heads=2")
    assert (tmp_path / "whole.apr").read_bytes() == (tmp_path / "parts.apr").read_bytes()


def test_every_form_gives_the_same(base: Base, tmp_path: Path) -> None:
    """Folder, GGUF and .apr, each narrowed, and brought back as a folder."""
    aprfmt.export_model(base("llama"), tmp_path / "m.gguf")
    aprfmt.import_model(base("llama"), tmp_path / "m.apr")
    found = []
    for i, source in enumerate((base("llama"), tmp_path / "m.gguf", tmp_path / "m.apr")):
        for form in ("gguf", "apr"):
            out = tmp_path / f"{i}.{form}"
            aprfmt.prune_model(source, out, width="hidden=32,ffn=64,heads=2,kv_heads=1")
            aprfmt.export_model(out, tmp_path / f"{i}_{form}", format="hf")
            found.append(values(tmp_path / f"{i}_{form}"))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(np.array_equal(other[name], found[0][name]) for name in other)


def test_blocks_of_which_parts_are_kept_become_floats_and_that_is_told(base: Base, tmp_path: Path) -> None:
    aprfmt.export_model(base("llama"), tmp_path / "m.gguf", dtype="q8_0")
    report = aprfmt.prune_model(tmp_path / "m.gguf", tmp_path / "out.gguf", width="ffn=64")
    assert any("stored as F32" in loss for loss in report.losses)
    assert any("64 of 96 ffn kept" in loss for loss in report.losses)
    before, after = values(tmp_path / "m.gguf"), values(tmp_path / "out.gguf")
    name = "blk.0.ffn_down.weight"
    assert all((before[name] == column[:, None]).all(axis=0).any() for column in after[name].T)
    with aprfmt.open(tmp_path / "out.gguf") as model:
        assert model.tensors["blk.0.attn_q.weight"].dtype == "Q8_0"


@pytest.mark.parametrize(
    ("name", "width", "kind", "words"),
    [
        ("gpt2", "hidden=32", RefusedError, "width pruning does not support this tensor"),
        ("gpt_neox", "hidden=32", RefusedError, "width pruning does not support this tensor"),
        ("mixtral", "hidden=32", RefusedError, "width pruning does not support this tensor"),
        ("mamba", "hidden=32", RefusedError, "it lacks one of"),
        ("phi3", "heads=2,kv_heads=1", RefusedError, "hidden / heads"),
        ("llama", "hidden=40", UsageError, "not a multiple of 32"),
        ("llama", "ffn=128", UsageError, "not from 1 to the model's 96"),
        ("llama", "heads=3", UsageError, "3 heads cannot share 2"),
        ("llama", {"heads": 0}, UsageError, "not from 1 to the model"),
        ("llama", "depth=3", UsageError, "invalid width 'depth=3'"),
        ("llama", "", UsageError, "invalid width ''"),
        ("llama", {"heads": True}, UsageError, "width must be a string"),
        ("llama", 3, UsageError, "width must be a string"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str, width: Any, kind: type[AprError], words: str, base: Base, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        aprfmt.prune_model(base(name), tmp_path / "out", width=width, format="hf")
    assert list(tmp_path.iterdir()) == []


def test_what_users_write() -> None:
    assert parse_widths("hidden=512,kv_heads=2") == {"hidden": 512, "kv_heads": 2}
    for text in ("hidden", "hidden=", "hidden=-1", "hidden=32,hidden=32", "hidden=\u0663"):
        with pytest.raises(UsageError):
            parse_widths(text)
