"""Mistral's own layout: params.json with consolidated.safetensors, as a whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_peer import LlamaPeer
from mistral_folders import FP8, LATENT, MINISTRAL3, MIXTRAL, PARAMS, VISION, YARN, write_mistral_folder
from rank_files import tekken_file
from tokenizer_folders import sentencepiece

import aprfmt
from aprfmt.codecs.stream import read_whole
from aprfmt.errors import AprError, UnsupportedError
from aprfmt.formats import mistral
from aprfmt.tokenizer.rules import RULES

VOCAB = 300
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"abc": 257, b"bc": 258}
TEKKEN = {"tekken.json": tekken_file(RANKS, RULES["tekken"].splits[0], specials=41, version="v7")}
CASES: dict[str, tuple[Mapping[str, Any], str, str]] = {
    "small": ({}, "llama", "LlamaForCausalLM"),
    "ministral3": (MINISTRAL3, "mistral3", "Ministral3ForCausalLM"),
    "yarn": ({"yarn": YARN}, "llama", "LlamaForCausalLM"),
    "tied": ({"tied_embeddings": True}, "llama", "LlamaForCausalLM"),
    "window": ({"sliding_window": 64}, "llama", "MistralForCausalLM"),
    "vision": (VISION, "llama", "LlamaForCausalLM"),
    "mixtral": (MIXTRAL, "llama", "MixtralForCausalLM"),
    "latent": (LATENT, "mistral4", "Mistral4ForCausalLM"),
    "fp8": (FP8, "llama", "LlamaForCausalLM"),
    "fp8_latent": ({**LATENT, **FP8}, "mistral4", "Mistral4ForCausalLM"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_folder_comes_back_and_its_gguf_is_a_checkpoint(tmp_path: Path, case: str) -> None:
    changed, gguf, hf_class = CASES[case]
    folder = write_mistral_folder(tmp_path / "model", TEKKEN, VOCAB, **changed)
    aprfmt.import_model(folder, tmp_path / "m.apr")
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", format="hf").lossless
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir()
    }
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert ("vision_encoder" in str(report.losses)) == (case == "vision")
    with aprfmt.open(tmp_path / "m.gguf") as made, aprfmt.open(folder) as source:
        assert made.metadata["general.architecture"] == gguf
        # Mistral has the rows of Q and K in the order of a GGUF.
        stored = {tensor.name: tensor for tensor in source.tensors.entries}
        for name in ("blk.0.attn_q.weight", "blk.1.attn_k.weight") if case not in ("latent", "fp8_latent") else ():
            if case == "fp8":
                scale = stored[f"{name}_scale"].numpy()
                np.testing.assert_allclose(made.tensors[name].numpy(), stored[name].numpy() * scale, rtol=4e-3)
            else:
                assert read_whole(made.tensors[name]) == read_whole(stored[name])
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "hf", format="hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [hf_class]
    # Written anew the folder has Hugging Face's layout, with the same weights as by the way of the GGUF.
    dtype = "bf16" if "fp8" in case else "keep"
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "again", format="hf", shard_size="1MB", dtype=dtype)
    assert not (tmp_path / "again" / "params.json").exists()
    with aprfmt.open(tmp_path / "hf") as one, aprfmt.open(tmp_path / "again") as other:
        names = {t.name for t in one.tensors.entries}
        matrices = [t.name for t in one.tensors.entries if t.dtype == "BF16"]  # a GGUF has norms in F32
        shared = {t.name for t in other.tensors.entries} & names
        assert len(shared) >= 18
        assert all(read_whole(one.tensors[n]) == read_whole(other.tensors[n]) for n in matrices if n in shared)
        towers = {t.name for t in other.tensors.entries if "experts." not in t.name} - names
        assert bool(towers) == (case == "vision")


@pytest.mark.llama
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["small", "ministral3", "mixtral", "fp8", "latent", "fp8_latent"])
def test_llama_cpp_and_transformers_compute_the_same(tmp_path: Path, llama_cpp: LlamaPeer, case: str) -> None:
    import torch
    import transformers

    folder = write_mistral_folder(tmp_path / "model", TEKKEN, VOCAB, **CASES[case][0])
    aprfmt.convert_model(folder, tmp_path / "m.gguf", dtype="f32")
    # transformers has all experts of Mistral 4 in one tensor, as a folder has them that was a GGUF.
    whole = tmp_path / "m.gguf" if "latent" in case else folder
    aprfmt.convert_model(whole, tmp_path / "hf", format="hf", dtype="f32")
    ids = [1, 5, 77, 140, 200, 9]
    found = llama_cpp.logits(tmp_path / "m.gguf", ids)
    kind = transformers.Mistral4ForCausalLM if "latent" in case else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(found - wanted).max() <= 5e-3 * np.abs(wanted).max()
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_versioned_sentencepiece_models_are_read(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("a", -1.0, 1), ("[INST]", 0.0, 3)]
    data = {f"tokenizer.model.v{n}": sentencepiece(pieces[: 3 + n], [(3, 2)]) for n in (1, 2)}
    folder = write_mistral_folder(tmp_path / "model", data, 8)
    with aprfmt.open(folder) as model:
        tok = model.tokenizer
    assert tok is not None
    assert tok.tokens == ["<unk>", "<s>", "</s>", "a", "[INST]"]
    assert (tok.special, tok.flags["add_bos"]) == ({"unk": 0, "bos": 1, "eos": 2, "pad": 2}, True)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"quantization": {"qformat_weight": "nvfp4"}}, "declares nvfp4 weights"),
        ({**LATENT, "moe": {**LATENT["moe"], "route_every_n": 2}}, "one of every 2 layers"),
    ],
)
def test_what_is_read_from_the_other_layout_alone_is_said(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    folder = write_mistral_folder(tmp_path / "model", TEKKEN, VOCAB, **{"yarn": YARN, **changed})
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(params))
    with pytest.raises(UnsupportedError, match=what) as caught:
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"hidden_dim": 40}, "gate_proj"), ({"n_heads": 8}, "attn_q|q_proj"), ({"n_layers": 3}, "layers.2")],
)
def test_contradictions_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    folder = write_mistral_folder(tmp_path / "model", TEKKEN, VOCAB)
    (folder / "params.json").write_text(json.dumps({**PARAMS, "vocab_size": VOCAB, **changed}))
    with pytest.raises(AprError) as caught:
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert caught.value.exit_code == 4 or caught.value.tensor
    import re

    assert re.search(what, f"{caught.value} {caught.value.tensor}")
    assert not (tmp_path / "m.apr").exists()


def test_names_of_latent_attention_are_hugging_faces() -> None:
    assert mistral.to_name("layers.3.experts.7.w2.weight") == "model.layers.3.mlp.experts.7.down_proj.weight"
    assert mistral.to_name("layers.3.attention.wkv_b.weight") == "model.layers.3.self_attn.kv_b_proj.weight"
    assert mistral.to_name("vision_encoder.ln_pre.weight") == "vision_encoder.ln_pre.weight"
    assert mistral.to_name("layers.3.unknown.weight") == "layers.3.unknown.weight"
