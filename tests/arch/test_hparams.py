"""Hyper-parameters: config.json, GGUF keys and APR metadata mean the same network."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_cases import CASES, DIMS, LLAMA3, LLAMA3_FACTORS, Case
from arch_models import find_case
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from turns import examples

import aprfmt
from aprfmt.arch import fields, rope, rope_factors
from aprfmt.arch.hparams import active_window, from_apr, from_gguf, from_hf_config, to_apr, to_gguf, to_hf_config
from aprfmt.arch.hyperparams import FIELDS, Hyperparams
from aprfmt.arch.scopes import KEPT
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError, CorruptError, RefusedError, UnmappedError

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def transformers_config(config: dict[str, Any]) -> Any:
    """`config` as transformers reads it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**json.loads(json.dumps(config)))


def gguf_values(keys: list[Any], arch: str) -> dict[str, Any]:
    """Keys as a GGUF reader gives them: floats have been through float32."""
    kv: dict[str, Any] = {"general.architecture": arch}
    for key, kind, value in keys:
        kv[key] = struct.unpack("<f", struct.pack("<f", value))[0] if kind == "FLOAT32" else value
    return kv


@by_case
def test_gguf_keys_are_those_of_the_converter(case: Case) -> None:
    h = from_hf_config(case.hf_config)
    row = ARCHITECTURES[case.arch]
    keys = to_gguf(h, row, file_type=32)
    assert [key for key in keys if key not in case.ours] == case.keys
    assert all(key in keys for key in case.ours)
    assert to_gguf(h, row) == [key for key in keys if key[0] != "general.file_type"]
    padded = {key: value for key, _, value in to_gguf(h, row, vocab_size=640)}
    assert padded.get("llama.vocab_size", 640) == 640


@by_case
def test_config_loads_in_transformers_with_equal_attributes(case: Case) -> None:
    want = transformers_config(case.hf_config).to_dict()
    assert transformers_config(to_hf_config(from_hf_config(case.hf_config))).to_dict() == want
    saved = from_hf_config(want)  # as transformers 5 saves it, every default spelled out
    assert transformers_config(to_hf_config(saved)).to_dict() == want


@by_case
def test_config_in_the_spelling_of_transformers_4(case: Case) -> None:
    new, old = case.hf_config, case.hf_config
    del old["rope_parameters"]
    old["rope_theta"] = case.theta
    if case.scaling is not None:
        old["rope_scaling"] = {"type" if k == "rope_type" else k: v for k, v in case.scaling.items()}
    assert from_hf_config(old) == from_hf_config(new)
    assert from_hf_config(old).extra.get("rope_scaling") == case.scaling


@by_case
def test_apr_metadata_holds_everything(case: Case) -> None:
    h = from_hf_config({**case.hf_config, "dtype": "bfloat16"})
    metadata = json.loads(json.dumps(to_apr(h)))
    assert from_apr(metadata) == h
    assert None not in metadata.values()
    assert metadata["architecture"] == case.config["model_type"]
    assert metadata["rope_type"] == (0 if case.arch in ("llama", "mistral") else 2)


@by_case
def test_gguf_holds_the_network(case: Case) -> None:
    """Through GGUF keys and back into a config.json of the same meaning, but for what GGUF cannot say."""
    h, row = from_hf_config(case.hf_config), ARCHITECTURES[case.arch]
    names = ["token_embd.weight"] + ([] if h.tied else ["output.weight"])
    names += ["blk.0.attn_q.bias"] if h.extra.get("attention_bias") or case.arch == "qwen2" else []
    names += ["blk.0.ffn_gate.bias"] if h.extra.get("mlp_bias") else []
    back = from_gguf(gguf_values(to_gguf(h, row, vocab_size=512), row.gguf), names)
    back.vocab_size = h.vocab_size
    back.bos_token_id, back.eos_token_id = h.bos_token_id, h.eos_token_id
    if "eos_token_id" in h.extra:
        back.extra["eos_token_id"] = h.extra["eos_token_id"]
    if case.scaling is LLAMA3:  # a tensor in GGUF
        back.extra["rope_scaling"] = rope_factors.infer_llama3(LLAMA3_FACTORS, 500000.0, 16)
    got, want = (transformers_config(to_hf_config(back)).to_dict(), transformers_config(case.hf_config).to_dict())
    for config in (got, want):
        for unused in ("max_window_layers", "sliding_window") if case.arch == "qwen2" else ():
            config.pop(unused)
    assert got == want


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_keys_mean_what_transformers_means(model_type: str) -> None:
    dims = {key: value for key, value in DIMS.items() if key != "num_key_value_heads"}
    want = transformers_config({"model_type": model_type, **dims})
    h = from_hf_config({"model_type": model_type, **dims})
    assert h.num_kv_heads == want.num_key_value_heads
    assert h.max_position_embeddings == want.max_position_embeddings
    assert h.rope_theta == want.rope_parameters["rope_theta"]
    assert h.rms_norm_eps == want.rms_norm_eps
    assert h.tied is want.tie_word_embeddings is False
    assert h.head_dim == (getattr(want, "head_dim", None) or 16)
    assert (h.bos_token_id, h.eos_token_id) == (want.bos_token_id, want.eos_token_id)
    assert active_window(h) == want.sliding_window if model_type != "llama" else active_window(h) is None
    assert transformers_config(to_hf_config(h)).to_dict() | {"architectures": None} == want.to_dict()


def test_null_keys() -> None:
    config = {
        "model_type": "mistral",
        **DIMS,
        "sliding_window": None,
        "num_key_value_heads": None,
        "eos_token_id": None,
    }
    h = from_hf_config(config)
    assert active_window(h) is None
    assert h.num_kv_heads == 4
    assert h.eos_token_id is None
    loaded = transformers_config(to_hf_config(h))
    assert (loaded.sliding_window, loaded.num_key_value_heads, loaded.eos_token_id) == (None, 4, None)


def test_sliding_window_of_qwen_counts_only_when_used() -> None:
    off = {"model_type": "qwen2", **DIMS, "sliding_window": 4096, "use_sliding_window": False}
    assert active_window(from_hf_config(off)) is None
    on = from_hf_config({**off, "use_sliding_window": True})
    assert to_gguf(on, ARCHITECTURES["qwen2"])[-1] == ("qwen2.attention.sliding_window", "UINT32", 4096)


def test_unknown_architectures_keep_their_own_words() -> None:
    h = from_hf_config(
        {"architectures": ["OddForCausalLM"], "model_type": "odd", "n_embd": 8, "n_layer": 3, "n_head": 2}
    )
    assert (h.architecture, h.hf_architecture, h.hidden_size, h.num_layers, h.head_dim) == (
        "odd",
        "OddForCausalLM",
        8,
        3,
        4,
    )
    assert (h.rope_theta, h.tied) == (None, None)
    with pytest.raises(UnmappedError, match="'odd'"):
        to_hf_config(h)
    assert from_hf_config({}) == Hyperparams()


SPELLINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "num_layers": ({"num_hidden_layers": 3}, {"n_layer": 3}, {"num_layers": 3}, {"n_layers": 3}),
    "hidden_size": ({"n_embd": 8}, {"n_embed": 8}, {"d_model": 8}),
    "num_heads": ({"n_head": 2}, {"num_heads": 2}, {"n_heads": 2}),
    "num_kv_heads": ({"num_kv_heads": 1}, {"n_kv_heads": 1}, {"n_head_kv": 1}),
    "intermediate_size": ({"n_inner": 9}, {"ffn_dim": 9}, {"ffn_hidden_size": 9}, {"d_ff": 9}),
    "max_position_embeddings": ({"n_positions": 7}, {"n_ctx": 7}, {"max_seq_len": 7}, {"seq_length": 7}),
    "rms_norm_eps": ({"layer_norm_epsilon": 0.5}, {"norm_eps": 0.5}, {"norm_epsilon": 0.5}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_unknown_class_is_read_by_every_spelling(name: str) -> None:
    for config in SPELLINGS[name]:
        h = from_hf_config({"architectures": ["FooForCausalLM"], **config})
        assert getattr(h, name) == next(iter(config.values())), config


def test_a_folder_of_an_unknown_class_tells_its_sizes(tmp_path: Path) -> None:
    folder, apr = tmp_path / "foo", tmp_path / "foo.apr"
    folder.mkdir()
    config = {"architectures": ["FooForCausalLM"], "n_layers": 3, "n_heads": 2, "d_model": 8}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros((2, 8), np.float32)}, folder / "model.safetensors")
    aprfmt.import_model(folder, apr, allow_unmapped=True)
    for path in (folder, apr):
        with aprfmt.open(path) as model:
            h = model.hparams
            assert (h.hf_architecture, h.num_layers, h.num_heads, h.hidden_size) == ("FooForCausalLM", 3, 2, 8)
            assert (h.head_dim, h.num_kv_heads) == (4, 2)
    with aprfmt.open(apr) as model:
        assert (model.metadata["num_layers"], model.metadata["hidden_size"]) == (3, 8)


def test_apr_aliases_in_the_order_of_the_reference() -> None:
    h = from_apr({"architecture": "llama", "hidden_dim": 64, "d_model": 32, "n_layers": "x", "n_layer": 2,
                  "n_heads": 4, "n_vocab": 10, "num_kv_heads": None, "n_kv_heads": 2, "norm_eps": 1e-5,
                  "context_length": 99})  # fmt: skip
    assert (h.hidden_size, h.num_layers, h.num_heads, h.num_kv_heads, h.vocab_size) == (64, 2, 4, 2, 10)
    assert (h.rms_norm_eps, h.max_position_embeddings, h.head_dim) == (1e-5, 99, 16)


def test_apr_of_the_reference() -> None:
    h = from_apr({"architecture": "mistral", "tokenizer.eos_token_id": 2, "tied_embeddings": True,
                  "hf_config": {"model_type": "mistral", **DIMS, "sliding_window": 77}})  # fmt: skip
    assert (h.architecture, h.eos_token_id, h.tied, h.hidden_size) == ("mistral", 2, True, 64)
    assert active_window(h) == 77


def test_eos_lists_keep_their_order() -> None:
    h = from_hf_config({"model_type": "llama", **DIMS, "eos_token_id": [7, 5], "bos_token_id": -1})
    assert (h.bos_token_id, h.eos_token_id, h.extra["eos_token_id"]) == (None, 7, [7, 5])
    assert to_hf_config(h)["eos_token_id"] == [7, 5]


def test_smollm2(smollm2_gguf: Any) -> None:
    """Keys of a real file that llama.cpp wrote: its architecture's keys come out again, in order."""
    import gguf

    reader = gguf.GGUFReader(smollm2_gguf)
    kv = {key: field.contents() for key, field in reader.fields.items()}
    h = from_gguf(kv, [t.name for t in reader.tensors])
    assert (h.tied, h.head_dim, h.num_kv_heads, h.rms_norm_eps, h.rope_theta) == (True, 64, 3, 1e-5, 100000.0)
    keys = [(key, field.types[-1].name) for key, field in reader.fields.items()
            if key.startswith("llama.") or key == "general.file_type"]  # fmt: skip
    ours = to_gguf(h, ARCHITECTURES["llama"], file_type=kv["general.file_type"])
    assert [key[:2] for key in ours] == keys
    assert gguf_values(ours, "llama") == {"general.architecture": "llama", **{key: kv[key] for key, _ in keys}}


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_gemma4_assistant_has_the_cap_of_its_config(cap: float | None) -> None:
    """Unlike Gemma 4, whose loader in llama.cpp takes 30 for an absent key."""
    case = find_case("gemma4_assistant")
    text = {**case.config["text_config"], "final_logit_softcapping": cap, "vocab_size": 512}
    h = from_hf_config({**case.config, "architectures": [case.model_class], "text_config": text})
    written = to_gguf(h, ARCHITECTURES["gemma4_assistant"])
    assert {key: value for key, _, value in written}.get("gemma4-assistant.final_logit_softcapping") == cap
    again = from_gguf(gguf_values(written, "gemma4-assistant"))
    assert again.extra.get("final_logit_softcapping") == cap


def test_missing_dims_are_named() -> None:
    h = from_hf_config({"model_type": "mistral", "hidden_size": 64})
    with pytest.raises(RefusedError, match="num_layers, intermediate_size, num_heads"):
        to_gguf(h, ARCHITECTURES["mistral"])
    with pytest.raises(RefusedError, match="vocab_size"):
        to_hf_config(h)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "64"), ("hidden_size", -1), ("hidden_size", True), ("num_hidden_layers", 2.5),
     ("vocab_size", 10**30), ("rms_norm_eps", math.nan), ("rope_theta", math.inf), ("rope_theta", 10**400),
     ("rope_scaling", [1]), ("rope_parameters", "x"), ("rope_scaling", {"type": 7}), ("eos_token_id", "</s>"),
     ("head_dim", {}), ("sliding_window", "wide")],
)  # fmt: skip
def test_bad_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(CorruptError, match=key.removesuffix("_scaling").removesuffix("_parameters")):
        active_window(from_hf_config({"model_type": "mistral", **DIMS, key: value}))


def test_values_beyond_gguf_types() -> None:
    h = from_hf_config({"model_type": "llama", **DIMS, "max_position_embeddings": 1 << 32})
    with pytest.raises(RefusedError, match="context_length"):
        to_gguf(h, ARCHITECTURES["llama"])
    h = from_hf_config({"model_type": "llama", **DIMS, "rope_theta": 1e39})
    with pytest.raises(RefusedError, match="freq_base"):
        to_gguf(h, ARCHITECTURES["llama"])


def test_per_layer_lists() -> None:
    kv = {"general.architecture": "llama", "llama.attention.head_count": [4, 4], "llama.feed_forward_length": [8, 9]}
    h = from_gguf(kv)
    assert (h.num_heads, h.intermediate_size, h.tied) == (4, None, None)


@pytest.mark.parametrize(("stored", "shown"), [(1e-6, 1e-6), (1e-5, 1e-5), (1e6, 1e6), (0.1, 0.1), (1 / 3, 0.33333334)])
def test_float32_by_its_shortest_digits(stored: float, shown: float) -> None:
    assert fields.from_f32(struct.unpack("<f", struct.pack("<f", stored))[0], "x") == shown


NESTED_KEYS = ("rope_type", "type", "factor", "full_attention", "eos_token_id", "rope_scaling", "sliding_window")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["llama", "yarn", "linear", "llama3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NESTED_KEYS), inner, max_size=3),
    max_leaves=6,
)
HF_KEYS = [key for f in FIELDS for key in f.hf] + [
    *KEPT, "architectures", "rope_scaling", "rope_parameters", "eos_token_id", "bos_token_id",
    "tie_word_embeddings", "dtype",
]  # fmt: skip
GGUF_KEYS = [f"llama.{f.gguf}" for f in FIELDS] + [
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.attention.sliding_window", "tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id",
]  # fmt: skip
APR_KEYS = [key for f in FIELDS for key in (f.name, *f.aliases)] + [
    "hf_config", "aprfmt.hparams", "aprfmt.hparams", "tied_embeddings", "rope_type", "hf_architecture",
]  # fmt: skip


@given(st.sampled_from(MODEL_TYPES), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_hostile_values_give_an_error_of_ours(model_type: str, data: st.DataObject) -> None:
    def draw(keys: list[str]) -> dict[str, Any]:
        return data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=4))

    sources = (
        (from_hf_config, {**DIMS, "model_type": model_type, **draw(HF_KEYS)}),
        (from_gguf, {"general.architecture": "llama", **draw(GGUF_KEYS)}),
        (from_apr, {**DIMS, "architecture": model_type, **draw(APR_KEYS)}),
    )
    for read, values in sources:
        try:
            h = read(values)
            to_apr(h)
            to_gguf(h, ARCHITECTURES["llama"])
            to_hf_config(h)
            rope_factors.llama3_factors(h.rope_theta or 1.0, h.head_dim or 0, rope.scaling_of(h))
        except AprError:
            pass
