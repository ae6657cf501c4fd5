"""Wrappers: which row the config of a network has that holds a language model beside other parts, and which names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aprfmt.arch import names
from aprfmt.arch.extra_tensors import outside
from aprfmt.arch.hparams import from_apr, from_hf_config, to_apr, to_hf_config
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import find_link
from aprfmt.arch.row import Wrapper
from aprfmt.arch.table import ARCHITECTURES, classes_of, find, lookup, nearest
from aprfmt.arch.wrappers import BEGINNINGS, WRAPPERS

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
_LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.hf_class)
def test_a_wrapper_is_found(wrapper: Wrapper) -> None:
    row = ARCHITECTURES[wrapper.row]
    assert lookup(wrapper.hf_class) is row
    assert not wrapper.model_type or lookup(wrapper.model_type) is row
    assert wrapper.hf_class in classes_of(row)
    assert nearest(f"{wrapper.hf_class}s") == wrapper.hf_class
    for told, instead in wrapper.instead.items():
        assert find(hf_class=wrapper.hf_class, part_type=ARCHITECTURES[told].model_type).id == instead  # type: ignore[union-attr]


def test_no_class_is_of_a_row_and_a_wrapper() -> None:
    own = {name for row in ARCHITECTURES.values() for name in row.hf_classes}
    classes = [wrapper.hf_class for wrapper in WRAPPERS]
    assert len(classes) == len(set(classes))
    assert not own & set(classes)


@pytest.mark.parametrize("hf_class", ["LlavaForConditionalGeneration", "SomethingNobodyForesaw"])
@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config", "lm_config", "lfm"])
@pytest.mark.parametrize(("model_type", "row"), [("qwen2", "qwen2"), ("lfm2_moe", "lfm2_moe"), ("gemma2", "gemma2")])
def test_the_part_decides(hf_class: str, part: str, model_type: str, row: str) -> None:
    text = {**_SIZES, "model_type": model_type}
    config: dict[str, Any] = {"architectures": [hf_class], "model_type": "some_vl", "hidden_size": 7, part: text}
    h = from_hf_config(config)
    assert (h.architecture, h.hf_model_type, h.hidden_size, h.extra["text_of"]) == (row, model_type, 64, "some_vl")
    assert from_apr(json.loads(json.dumps(to_apr(h)))) == h
    assert to_hf_config(h, complete=False)["architectures"] == [ARCHITECTURES[row].hf_class]


def test_a_part_inside_a_part() -> None:
    text = {**_SIZES, "model_type": "qwen3"}
    config = {"architectures": ["X"], "model_type": "x", "thinker_config": {"text_config": text, "hidden_size": 7}}
    h = from_hf_config(config)
    assert (h.architecture, h.hidden_size) == ("qwen3", 64)


def test_the_class_of_a_part_decides_where_it_names_one() -> None:
    text = {**_SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "of_its_own"}
    assert from_hf_config({"model_type": "x", "text_config": text}).architecture == "qwen3"


def test_a_known_wrapper_without_a_part_has_its_usual_row() -> None:
    assert (
        from_hf_config({**_SIZES, "architectures": ["UltravoxModel"], "model_type": "ultravox"}).architecture == "llama"
    )


def test_a_known_wrapper_around_an_unknown_language_model_has_no_row() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    h = from_hf_config({**config, "text_config": {**_SIZES, "model_type": "nobody_knows"}})
    assert h.architecture == "nobody_knows"


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_names_inside_a_wrapper(beginning: str) -> None:
    llama, bloom = ARCHITECTURES["llama"], ARCHITECTURES["bloom"]
    assert names.canonical_name(llama, f"{beginning}{_LAYER}") == _LAYER
    assert names.canonical_name(llama, f"{beginning}{_LAYER.removeprefix('model.')}") == _LAYER
    assert names.canonical_name(llama, f"{beginning}lm_head.weight") == "lm_head.weight"
    assert (
        names.canonical_name(bloom, f"{beginning}h.0.mlp.dense_h_to_4h.bias")
        == "transformer.h.0.mlp.dense_h_to_4h.bias"
    )
    assert names.canonical_name(llama, f"{beginning}model.layers.1.mlp.foo.weight") is None


def test_what_looks_like_the_language_models_and_is_beside_it() -> None:
    row, own = ARCHITECTURES["llama"], {f"llm.{_LAYER}", "llm.model.norm.weight"}
    found = {"Sarashina2VisionForCausalLM": {"norm.weight"}, "LlamaForCausalLM": set[str]()}
    for hf_class, beside in found.items():
        h = Hyperparams(num_layers=2, hf_architecture=hf_class)
        assert outside(row, h, {*own, "norm.weight"}) == beside


@pytest.mark.parametrize(("shape", "transposed"), [((4, 96, 64), False), ((4, 64, 96), True)])
def test_experts_are_told_by_their_shape(shape: tuple[int, ...], transposed: bool) -> None:
    """Qwen3-VL's are published input before output, and transformers saves them the other way."""
    row, name = ARCHITECTURES["qwen3_vl_moe"], "model.layers.0.mlp.experts.gate_up_proj"
    h = Hyperparams(hidden_size=64, num_layers=1, num_experts=4, moe_intermediate_size=48)
    link = find_link(row, h, name, {name: shape}, "hf")
    assert link is not None
    assert link.mapping.transposed is transposed
    assert link.mapping.after == ((4, 48, 64), (4, 48, 64))
