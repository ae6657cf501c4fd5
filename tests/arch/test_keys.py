"""The keys of every row: config.json, APR and GGUF hold the same; absent keys mean what transformers means."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from arch_models import ArchCase, all_cases, make_config, quiet_transformers, unwrapped, whole_config
from class_defaults import NO_CLASS, REMOTE, attribute, carries_no_logits, class_config, is_of_the_class, rotation_of
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import examples

from aprfmt.arch import rope, rope_factors
from aprfmt.arch.converter import Scope
from aprfmt.arch.grammar import factor_names
from aprfmt.arch.heads import EVEN_HEADS
from aprfmt.arch.hparams import from_apr, from_gguf, from_hf_config, to_apr, to_gguf, to_hf_config
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.arch.scopes import defaults_of, keys_of
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError, RefusedError

by_row = pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=lambda row: row.id)
by_case = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)


@by_row
def test_absent_keys_mean_what_the_class_means(row: Architecture) -> None:
    for model_type in row.model_types:
        if model_type in NO_CLASS or row.id in REMOTE:
            continue
        config = class_config(model_type)
        for name, value in defaults_of(row, model_type).items():
            if is_of_the_class(row, name):
                assert attribute(config, name) == value, (model_type, name)


@by_row
def test_the_rotated_part_of_a_head_is_that_of_the_class(row: Architecture) -> None:
    assert row.rotates == rotation_of(row), "bring it up to date: python tools/defaults.py"


@by_row
def test_every_field_of_the_class_is_a_key(row: Architecture) -> None:
    """Of a value that no key reads, a GGUF would say nothing and mean the default."""
    for model_type in row.model_types:
        if model_type in NO_CLASS or row.id in REMOTE:
            continue
        rows = [one for one in ARCHITECTURES.values() if model_type in one.model_types]
        told = {name for one in rows for key in one.keys for name in key.hf} | factor_names(row) | rope.NAMES
        read = {name.partition(".")[0] for name in told} | {"bos_token_id", "eos_token_id", "tie_word_embeddings"}
        config = class_config(model_type)
        other = {name: {new, old} for new, old in type(config).attribute_map.items() for name in (new, old)}
        fields = {name for name in config.to_dict() if not other.get(name, {name}) & read}
        assert {name for name in fields if not carries_no_logits(model_type, name)} == set(), model_type


def config_of(case: ArchCase) -> dict[str, Any]:
    """config.json as transformers saves it, or as it was published."""
    if not case.computable:
        return whole_config(case, 512)
    quiet_transformers()
    config = make_config(case, 512).to_dict()
    config["architectures"] = [case.model_class]
    loaded: dict[str, Any] = json.loads(json.dumps(config))
    return loaded


@pytest.mark.turns(rows=True)
@by_case
def test_apr_metadata_holds_everything(case: ArchCase) -> None:
    h = from_hf_config(config_of(case))
    assert h.architecture == case.row
    metadata = json.loads(json.dumps(to_apr(h)))
    assert from_apr(metadata) == h
    assert from_apr(json.loads(json.dumps(to_apr(from_apr(metadata))))) == h


@pytest.mark.turns(rows=True)
@by_case
def test_a_rebuilt_config_means_the_same(case: ArchCase) -> None:
    """As transformers reads it, or as we do where it cannot; keys that no class has may be added."""
    renamed = case.model_class in ARCHITECTURES[case.row].other_names
    if not case.computable or renamed:  # a config for a class that calls its keys otherwise, too
        h = from_hf_config(config_of(case))
        again = from_hf_config(to_hf_config(h, complete=not renamed))
        if case.wrapped:
            again, h = unwrapped(again, h), unwrapped(h, again)
        assert again == h
        return
    want = make_config(case, 512)
    text = want.get_text_config()
    h = from_hf_config(config_of(case))
    built = to_hf_config(h)
    got = type(text)(**{key: value for key, value in built.items() if key != "model_type"})
    told = got.to_dict()
    ignored = {"dtype", "torch_dtype", "architectures", "transformers_version", "model_type"}
    row = ARCHITECTURES[case.row]
    settled = {"block_auto_adjust_ff_dim"} | {
        name
        for key in row.keys
        if key.converter is not None and (key.converter.normalize or key.converter.derive)
        for name in key.hf
    }
    for name, value in json.loads(json.dumps(text.to_dict())).items():
        if name in keys_of_network(row, h) & set(told) - ignored - settled:
            assert without_whole(json.loads(json.dumps(told[name]))) == without_whole(value), name


def without_whole(value: Any) -> Any:
    """Rope parameters without the part of a head that is rotated, where they say that it is all of it."""
    whole = isinstance(value, dict) and value.get("partial_rotary_factor") == 1.0
    return {k: v for k, v in value.items() if k != "partial_rotary_factor"} if whole else value


def keys_of_network(row: Architecture, h: Hyperparams) -> set[str]:
    """config.json keys that the row knows."""
    known = {name for key in keys_of(row, defaults_of(row, h.hf_model_type)) for name in key.hf}
    return known | {"rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id"}


def gguf_values(row: Architecture, pairs: list[Any]) -> dict[str, Any]:
    """Keys as a GGUF reader gives them: floats have been through float32."""

    def stored(kind: str, value: Any) -> Any:
        return struct.unpack("<f", struct.pack("<f", value))[0] if kind == "FLOAT32" else value

    kv: dict[str, Any] = {"general.architecture": row.gguf}
    for key, kind, value in pairs:
        kv[key] = [stored(kind[1], item) for item in value] if isinstance(kind, tuple) else stored(kind, value)
    return kv


@pytest.mark.turns(rows=True)
@by_case
def test_gguf_keys_come_back(case: ArchCase) -> None:
    """Whatever a GGUF has keys for is the same again, and gives the same keys."""
    h = from_hf_config(config_of(case))
    row = ARCHITECTURES[case.row]
    pairs = to_gguf(h, row, complete=not case.llama_cpp_cannot)  # a GGUF cannot say all of such a config
    again = from_gguf(gguf_values(row, pairs))
    if again.architecture not in ARCHITECTURES:  # no GGUF is of this row
        assert case.llama_cpp_cannot
        return
    if again.architecture != row.id:  # the same network under a plainer name
        assert ARCHITECTURES[again.architecture or ""].gguf == row.gguf
        return
    again.hf_model_type, again.vocab_size = h.hf_model_type, h.vocab_size
    for key in row.keys:
        is_refused = bool(case.llama_cpp_cannot) and key.constant is not None
        if key.gguf and key.hf and key.converter is None and not is_refused:
            assert Scope(again, row, key).value == Scope(h, row, key).value, key
    assert again.extra.get("rope_layers") == h.extra.get("rope_layers")
    first, second = ({pair[0]: pair[1:] for pair in found} for found in (pairs, to_gguf(again, row, complete=False)))
    for name, (kind, value) in second.items():
        want = (kind, pytest.approx(value, rel=1e-6) if kind == "FLOAT32" else value)
        assert first.get(name, want) == want, name
    assert {name for name in first if name not in second} <= {f"{row.gguf}.rope.scaling.{x}" for x in _TENSORS}


_TENSORS = ("type", "attn_factor", "original_context_length")
"""Keys of a scaling whose factors stand in tensors."""


def test_biases_follow_from_the_tensors() -> None:
    kv = {"general.architecture": "llama"}
    assert from_gguf(kv, ["output.weight"]).extra["attention_bias"] is False
    h = from_gguf(kv, ["token_embd.weight", "blk.0.attn_q.bias", "blk.1.ffn_down.bias"])
    assert (h.extra["attention_bias"], h.extra["mlp_bias"], h.tied) == (True, True, True)
    assert "attention_bias" not in from_gguf(kv).extra


def test_multimodal_configs_give_their_language_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "hidden_size": 7,
        "eos_token_id": [1, 106], "vision_config": {"hidden_size": 9}, "text_config": text,
    }  # fmt: skip
    h = from_hf_config(config)
    assert (h.architecture, h.hf_architecture, h.hf_model_type) == (
        "gemma3_text", "Gemma3ForConditionalGeneration", "gemma3_text",
    )  # fmt: skip
    assert (h.hidden_size, h.num_heads, h.eos_token_id, h.tied) == (64, 8, 1, True)
    built = to_hf_config(h)
    assert (built["architectures"], built["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert from_apr(json.loads(json.dumps(to_apr(h)))) == h


@pytest.mark.parametrize(
    ("whole", "part", "tied"),
    [({"tie_word_embeddings": True}, {}, True), ({}, {"tie_word_embeddings": False}, False),
     ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, None)],
)  # fmt: skip
def test_ties_of_a_multimodal_model(whole: dict[str, Any], part: dict[str, Any], tied: bool | None) -> None:
    assert from_hf_config({**whole, "text_config": {"model_type": "mistral", **part}}).tied is tied


LEAVES = st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.sampled_from(
    ["auto", "linear", "yarn", "silu", "sliding_attention", "full_attention", "x"]
)  # fmt: skip
NAMES = ("rope_type", "factor", "rope_theta", "full_attention", "sliding_attention", "clip_qkv")
HOSTILE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=5,
)


@given(st.sampled_from(sorted(ARCHITECTURES)), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_hostile_values_give_an_error_of_ours(name: str, data: st.DataObject) -> None:
    row = ARCHITECTURES[name]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}
    hf = [name for key in row.keys for name in key.hf] + ["rope_parameters", "text_config", *row.defaults.get("", {})]
    gguf = [f"{row.gguf}.{key.gguf}" for key in row.keys if key.gguf]
    config = data.draw(st.dictionaries(st.sampled_from(hf), HOSTILE, max_size=3))
    kv = data.draw(st.dictionaries(st.sampled_from(gguf), HOSTILE, max_size=3))
    extra = data.draw(st.dictionaries(st.sampled_from(hf), HOSTILE, max_size=3))
    apr = {"architecture": row.model_type, "hf_architecture": row.hf_class, "aprfmt.hparams": extra, "num_layers": 2}
    sources: tuple[tuple[Any, dict[str, Any]], ...] = (
        (from_hf_config, {**sizes, **config, "architectures": [row.hf_class], "model_type": row.model_type}),
        (from_gguf, {**kv, "general.architecture": row.gguf}),
        (from_apr, {**sizes, **apr}),
    )
    for source, given_values in sources:
        try:
            h = source(given_values)
            to_apr(h)
            to_hf_config(h)
            rope_factors.factor_tensors(h, row)
            to_gguf(h, row)
        except AprError:
            pass


def test_classes_that_want_even_heads() -> None:
    """A config class of transformers refuses a hidden size that its heads do not divide, or does not."""
    quiet_transformers()
    from transformers import CONFIG_MAPPING

    def is_refused(model_type: str) -> bool:
        try:
            CONFIG_MAPPING[model_type](hidden_size=64, num_attention_heads=5, num_key_value_heads=5, head_dim=16)
        except Exception as error:
            return "is not a multiple of the number of attention heads" in str(error)
        return False

    known = {name for row in ARCHITECTURES.values() for name in row.model_types if name in CONFIG_MAPPING}
    assert {name for name in known if is_refused(name)} == EVEN_HEADS
    h = Hyperparams(architecture="llama", hidden_size=64, num_heads=5, num_layers=1, vocab_size=8, intermediate_size=8)
    h.max_position_embeddings, h.rms_norm_eps = 8, 1e-5
    with pytest.raises(RefusedError, match="LlamaForCausalLM needs a hidden_size that is a multiple of num_attention"):
        to_hf_config(h)
