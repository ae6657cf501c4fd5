"""Hyper-parameters of GPT-2's kin and of encoders: what configs, old ones too, and GGUF keys mean."""

from __future__ import annotations

from typing import Any

import pytest

from aprfmt.arch import hparams
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError, LimitError, RefusedError

SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 4},
}
PLAIN = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}


def read(row: str, **config: Any) -> Hyperparams:
    arch = ARCHITECTURES[row]
    sizes = SIZES.get(row, PLAIN)
    return hparams.from_hf_config(
        {"architectures": [arch.hf_class], "model_type": arch.model_type, "vocab_size": 320, **sizes, **config}
    )


def gguf_keys(h: Hyperparams) -> dict[str, Any]:
    row = ARCHITECTURES[h.architecture or ""]
    return {key.removeprefix(f"{row.gguf}."): value for key, _, value in hparams.to_gguf(h, row)}


def from_gguf(name: str, tensors: tuple[str, ...] = (), **kv: Any) -> dict[str, Any]:
    """The config.json of a GGUF with these keys, dots as two underscores."""
    keys = {key.replace("__", "."): value for key, value in kv.items()}
    sizes = {
        "block_count": 4,
        "embedding_length": 64,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "context_length": 512,
        "attention.layer_norm_epsilon": 1e-5,
    }
    own = {f"{name}.{key}": value for key, value in {**sizes, **keys}.items() if not key.startswith("tokenizer")}
    common = {key: value for key, value in keys.items() if key.startswith("tokenizer")}
    vocabulary = {"tokenizer.ggml.tokens": [""] * 320}
    h = hparams.from_gguf({"general.architecture": name, **vocabulary, **own, **common}, tensors)
    return hparams.to_hf_config(h)


@pytest.mark.parametrize("row", ["gpt2", "gpt_bigcode", "falcon", "bloom", "mpt"])
def test_the_mlp_is_four_times_as_wide_where_nothing_is_said(row: str) -> None:
    assert gguf_keys(read(row))["feed_forward_length"] == 256


@pytest.mark.parametrize(
    ("row", "key"), [("gpt2", "n_inner"), ("gpt_bigcode", "n_inner"), ("falcon", "ffn_hidden_size")]
)
def test_the_width_of_the_mlp_is_the_configs(row: str, key: str) -> None:
    assert gguf_keys(read(row, **{key: 80}))["feed_forward_length"] == 80


@pytest.mark.parametrize(("multi_query", "kv_heads"), [(True, 1), (False, 4)])
def test_bigcode_kv_heads_follow_the_switch(multi_query: bool, kv_heads: int) -> None:
    h = read("gpt_bigcode", multi_query=multi_query, num_key_value_heads=2)
    assert gguf_keys(h)["attention.head_count_kv"] == kv_heads
    assert from_gguf("starcoder", attention__head_count_kv=kv_heads)["multi_query"] is multi_query


FALCONS: list[tuple[dict[str, Any], int]] = [
    ({"multi_query": True, "num_kv_heads": 4}, 1),
    ({"multi_query": False}, 4),
    ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ({"new_decoder_architecture": True, "n_head_kv": 2}, 2),
    ({}, 1),
]


@pytest.mark.parametrize(("config", "kv_heads"), FALCONS)
def test_falcon_kv_heads(config: dict[str, Any], kv_heads: int) -> None:
    assert gguf_keys(read("falcon", **config))["attention.head_count_kv"] == kv_heads


@pytest.mark.parametrize(
    ("kv_heads", "two_norms", "new", "multi_query", "norms"),
    [
        (1, False, False, True, None),
        (4, False, False, False, None),
        (2, False, True, False, 1),
        (2, True, True, False, 2),
    ],
)
def test_which_falcon_a_gguf_holds(
    kv_heads: int, two_norms: bool, new: bool, multi_query: bool, norms: int | None
) -> None:
    tensors = ("blk.0.attn_norm.weight", *(("blk.0.attn_norm_2.weight",) if two_norms else ()))
    config = from_gguf("falcon", tensors, attention__head_count_kv=kv_heads)
    assert config["new_decoder_architecture"] is new
    assert config["multi_query"] is multi_query
    assert config.get("num_ln_in_parallel_attn") == norms


def test_old_names_of_falcon() -> None:
    old = {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_layer": 4, "n_head": 4}
    h = hparams.from_hf_config(
        {**old, "hidden_size": 64, "vocab_size": 320, "n_head_kv": 2, "new_decoder_architecture": True}
    )
    assert (h.architecture, h.num_layers, h.num_heads, h.num_kv_heads) == ("falcon", 4, 4, 2)


@pytest.mark.parametrize(
    ("row", "key", "value"),
    [
        ("falcon", "alibi", True),
        ("falcon", "bias", True),
        ("falcon", "parallel_attn", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "activation_function", "relu"),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("mpt", "attn_config", {"softmax_scale": 0.5}),
        ("bert", "hidden_act", "relu"),
        ("modernbert", "norm_bias", True),
        ("modernbert", "hidden_activation", "relu"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_no_gguf(row: str, key: str, value: Any) -> None:
    with pytest.raises(RefusedError):
        gguf_keys(read(row, **{key: value}))


@pytest.mark.parametrize(("attention", "bias"), [({}, 8.0), ({"alibi_bias_max": 16}, 16.0), ({"alibi": False}, 0.0)])
def test_mpt_alibi(attention: dict[str, Any], bias: float) -> None:
    assert gguf_keys(read("mpt", attn_config=attention))["attention.max_alibi_bias"] == bias
    back = from_gguf("mpt", attention__max_alibi_bias=bias)["attn_config"]
    assert back["alibi"] is (bias != 0)
    assert back["alibi_bias_max"] == (int(bias) or 8)


def test_mpt_clips_where_the_config_says() -> None:
    assert gguf_keys(read("mpt", attn_config={"clip_qkv": 6}))["attention.clamp_kqv"] == 6
    assert "attention.clamp_kqv" not in gguf_keys(read("mpt", attn_config={"clip_qkv": None}))


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_roberta_counts_positions_behind_the_padding_token(padding: int) -> None:
    h = read("roberta", pad_token_id=padding, max_position_embeddings=514)
    assert gguf_keys(h)["context_length"] == 513 - padding
    keys = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__padding_token_id": padding}
    config = from_gguf("bert", ("token_types.weight",), context_length=513 - padding, **keys)
    assert (config["model_type"], config["max_position_embeddings"]) == ("roberta", 514)


def test_roberta_without_a_position_is_refused() -> None:
    with pytest.raises(RefusedError, match="start after the padding id"):
        gguf_keys(read("roberta", pad_token_id=1, max_position_embeddings=2))


@pytest.mark.parametrize(
    ("tensors", "model", "row"),
    [
        (("token_types.weight",), "bert", "bert"),
        (("token_types.weight",), "gpt2", "roberta"),
        (("token_types.weight",), "t5", "xlm-roberta"),
        (("token_embd.weight",), "bert", "distilbert"),
    ],
)
def test_which_bert_a_gguf_holds(tensors: tuple[str, ...], model: str, row: str) -> None:
    assert from_gguf("bert", tensors, tokenizer__ggml__model=model)["model_type"] == row


_F, _S = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        ([_F, _S, _S, _F], 3),
        ([_F, _S, _F, _S], 2),
        ([_F, _F, _F, _F], 1),
        ([_F, _S, _S, _S], 4),
        ([_F, _F, _S, _F], [False, False, True, False]),
        ([_S, _S, _S, _S], [True, True, True, True]),
    ],
)
def test_layers_of_modernbert(kinds: list[str], pattern: int | list[bool]) -> None:
    assert gguf_keys(read("modernbert", layer_types=kinds))["attention.sliding_window_pattern"] == pattern
    config = from_gguf("modern-bert", attention__sliding_window_pattern=pattern, attention__sliding_window=8)
    assert config["layer_types"] == kinds


@pytest.mark.parametrize(("period", "kinds"), [(None, [_F, _S, _S, _F]), (2, [_F, _S, _F, _S])])
def test_modernbert_of_an_old_config(period: int | None, kinds: list[str]) -> None:
    h = read("modernbert", **({} if period is None else {"global_attn_every_n_layers": period}))
    assert h.extra["layer_types"] == kinds


def test_labels_of_a_classifier() -> None:
    arch = {"architectures": ["RobertaForSequenceClassification"]}
    names = {"10": "k", **{str(i): chr(97 + i) for i in range(10)}}
    h = read("roberta", **arch, id2label=names)
    assert gguf_keys(h)["classifier.output_labels"] == list("abcdefghijk")
    assert h.extra["num_labels"] == 11
    assert h.extra["label2id"] == {name: i for i, name in enumerate("abcdefghijk")}
    # The runtime takes one output where nothing is said.
    assert gguf_keys(read("roberta", **arch))["classifier.output_labels"] == ["LABEL_0", "LABEL_1"]
    assert gguf_keys(read("roberta", **arch, num_labels=1))["classifier.output_labels"] == ["LABEL_0"]
    assert "classifier.output_labels" not in gguf_keys(read("roberta", id2label=names))
    with pytest.raises(LimitError, match="num_labels is 65537"):
        gguf_keys(read("roberta", **arch, num_labels=65537))


@pytest.mark.parametrize("row", ["falcon", "gpt_bigcode", "mpt", "roberta", "modernbert"])
@pytest.mark.parametrize("value", [-1, "x", [], {}, 1.5, 1 << 70])
def test_hostile_configs_give_an_error_of_ours(row: str, value: Any) -> None:
    for key in (
        "num_kv_heads",
        "multi_query",
        "expansion_ratio",
        "pad_token_id",
        "layer_types",
        "id2label",
        "attn_config",
    ):
        try:
            gguf_keys(read(row, **{key: value}, architectures=[f"{ARCHITECTURES[row].hf_class}"]))
        except AprError:
            continue
