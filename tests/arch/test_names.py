"""Tensor names: they go there and back, gguf-py knows them, networks are complete and of their shapes."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import Any

import pytest
from arch_models import has_gguf
from converter_peer import CONVERTER

from aprfmt.arch import names
from aprfmt.arch.grammar import dims_of, evaluate
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import link_of
from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, ROPE_FACTORS, Architecture, TensorRow
from aprfmt.arch.table import ARCHITECTURES, find, find_gguf
from aprfmt.errors import RefusedError, UnmappedError

by_arch = pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.id)
LLAMA, QWEN2 = ARCHITECTURES["llama"], ARCHITECTURES["qwen2"]


BEYOND_GGUF_PY = {("qwen3", ("cls.output.weight",))}
"""What llama.cpp loads, and its converter writes, without being in gguf-py's table of the family."""


def small(arch: Architecture, **changes: Any) -> Hyperparams:
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    fields = {"architecture": arch.id, **sizes, "vocab_size": 100, "intermediate_size": 96}
    return Hyperparams(**{**fields, **changes})


@cache
def llama_table() -> Any:
    """llama.cpp's own table of tensors: that of its converter, which is newer than the package gguf."""
    path = CONVERTER / "gguf-py" / "gguf" / "constants.py"
    if not path.exists():
        pytest.skip("llama.cpp's converter is not in the material cache")
    spec = importlib.util.spec_from_file_location("llama_cpp_constants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def llama_names(layers: int = 2, needs: tuple[str, ...] = (REQUIRED, HEAD)) -> list[str]:
    rows = [row for row in LLAMA.tensors if row.need in needs]
    return list(dict.fromkeys(names.spell(row.hf[0], n) for row in rows for n in range(layers)))


def spellings(row: TensorRow, side: str, layer: int, expert: int) -> list[str]:
    return [names.spell(name, layer, expert) for name in getattr(row, side)]


@by_arch
@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (7, 121), (121, 3)])
def test_names_are_found_again(arch: Architecture, layer: int, expert: int) -> None:
    for row in arch.tensors:
        if layer == 0 and row.layers == "!first":
            continue  # the first layer may have other rows for such names
        for side in ("hf", "gguf"):
            for position, name in enumerate(spellings(row, side, layer, expert)):
                found = [m for m in names.matches(arch, name, side) if m.row is row]
                assert [m.position for m in found] == [position]
                assert found[0].layer == (layer if "{n}" in getattr(row, side)[position] else None)
                assert found[0].expert == (expert if "{e}" in getattr(row, side)[position] else None)


@pytest.mark.parametrize("arch", [row for row in ARCHITECTURES.values() if has_gguf(row.id)], ids=lambda row: row.id)
def test_names_are_llama_cpps(arch: Architecture) -> None:
    """What every network of the family has is among gguf-py's tensors of the family, the rest among all names."""
    table = llama_table()
    number = next(key for key, name in table.MODEL_ARCH_NAMES.items() if name == arch.gguf)
    every = {name.replace("{bid}", "{n}") for name in table.TENSOR_NAMES.values()}
    known = {table.TENSOR_NAMES[t].replace("{bid}", "{n}") for t in table.MODEL_TENSORS[number]}
    for row in arch.tensors:
        always = row.need == REQUIRED and not row.layers and (arch.gguf, row.gguf) not in BEYOND_GGUF_PY
        for name in row.gguf:
            bare = re.sub(r"\.(weight|bias|scale|lora_[ab])$", "", re.sub(r"\.\d+\.", ".{n}.", name))
            assert bare in (known if always else every), name
    assert {name.rpartition(".")[0] for name in ROPE_FACTORS} <= every


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{n}.input_layernorm.weight", "blk.{n}.attn_q.weight", "", ".", "lm_heads",
        "model.layers.00.input_layernorm.weight", "model.layers.1000000.input_layernorm.weight",
        "model.layers.-1.input_layernorm.weight",
        "model.layers.0.1.input_layernorm.weight", "model.layers..input_layernorm.weight", "lm_head.weight ",
        "model.layers.٣.input_layernorm.weight",
    ],
)  # fmt: skip
def test_odd_names_are_unknown(name: str) -> None:
    for arch in ARCHITECTURES.values():
        assert names.gguf_name(arch, name, Hyperparams()) is None


def test_find() -> None:
    assert find(hf_class="Unknown", model_type="qwen3") is ARCHITECTURES["qwen3"]
    assert find(hf_class="OfNobody", model_type="nobody") is None
    assert find() is None
    assert find_gguf({}) is None
    assert find(gguf="llama") is LLAMA
    assert find_gguf({"general.architecture": "llama", "llama.expert_count": 8}) is ARCHITECTURES["mixtral"]


def test_llamas_rotary_rows_move() -> None:
    h = small(LLAMA)
    for name, heads in (("q_proj.bias", 4), ("k_proj.weight", 2)):
        match = names.matches(LLAMA, f"model.layers.3.self_attn.{name}")[0]
        link = link_of(h, match, {f"model.layers.3.self_attn.{name}": (heads * 8, 64)[: 2 if "w" in name else 1]})
        assert link.mapping.orders == (("swap", (heads, 2, 4)),)
    assert not any(row.order for row in QWEN2.tensors)


def test_nearest() -> None:
    near = names.nearest(LLAMA, "model.layers.4.self_attn.qproj.weight")
    assert near == "model.layers.4.self_attn.q_proj.weight"
    assert names.nearest(LLAMA, "blk.4.attnq.weight", "gguf") == "blk.4.attn_q.weight"
    assert names.nearest(LLAMA, "", "gguf")


def test_order_is_that_of_the_network() -> None:
    shuffled = sorted([*llama_names(11), "rope_freqs.weight"], reverse=True)
    ordered = sorted(shuffled, key=lambda name: names.order(LLAMA, name))
    assert ordered[0] == "model.embed_tokens.weight"
    assert ordered[-2:] == ["lm_head.weight", "rope_freqs.weight"]
    second, tenth = "model.layers.2.mlp.up_proj.weight", "model.layers.10.input_layernorm.weight"
    assert ordered.index(second) < ordered.index(tenth)


def test_complete_networks_pass() -> None:
    present, h = llama_names(), small(LLAMA)
    names.check_tensors(LLAMA, h, present)
    names.check_tensors(LLAMA, small(LLAMA, tied=True), set(present) - {"lm_head.weight"})
    names.check_tensors(LLAMA, small(LLAMA, hf_architecture="LlamaModel"), set(present) - {"lm_head.weight"})
    names.check_tensors(LLAMA, small(LLAMA, num_layers=None), [*present, "rope_freqs.weight"])
    names.check_tensors(LLAMA, h, [*present, "model.layers.0.self_attn.rotary_emb.inv_freq"])
    every = llama_names(needs=(REQUIRED, HEAD, OPTIONAL, "attention_bias", "mlp_bias"))
    names.check_tensors(LLAMA, small(LLAMA, extra={"attention_bias": True, "mlp_bias": True}), every)


def test_each_missing_tensor_is_named() -> None:
    present = set(llama_names())
    for name in present:
        with pytest.raises(RefusedError) as info:
            names.check_tensors(LLAMA, small(LLAMA), present - {name})
        assert info.value.tensor == name
        assert name in str(info.value)
    with pytest.raises(RefusedError, match="layer 1, but the network has 1 layers"):
        names.check_tensors(LLAMA, small(LLAMA, num_layers=1), present)


def test_promised_biases_must_be_there() -> None:
    with pytest.raises(RefusedError, match=r"4 tensors.*q_proj\.bias"):
        names.check_tensors(LLAMA, small(LLAMA, num_layers=1, extra={"attention_bias": True}), llama_names(1))


def test_unknown_tensors_are_named_with_the_nearest() -> None:
    with pytest.raises(UnmappedError, match=r"closest name is '\S+\.0\.self_attn\.q_proj\.bias'") as info:
        names.check_tensors(QWEN2, small(QWEN2), ["model.layers.0.self_attn.q_proj.bais"])
    assert info.value.tensor == "model.layers.0.self_attn.q_proj.bais"


def test_a_crafted_layer_count_costs_nothing() -> None:
    with pytest.raises(RefusedError, match="missing"):
        names.check_tensors(LLAMA, small(LLAMA, num_layers=1 << 62), llama_names())


def test_shapes() -> None:
    h = small(LLAMA)
    shapes = {
        names.spell(row.hf[0], 0): tuple(evaluate(d, {"q": 32, "kv": 16, "hidden": 64, "vocab": 100, "ffn": 96}) or 0
                                         for d in dims_of(row.dims[0]))
        for row in LLAMA.tensors
    }  # fmt: skip
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (16, 64)
    names.check_shapes(LLAMA, h, shapes)
    names.check_shapes(LLAMA, Hyperparams(), shapes)
    names.check_shapes(LLAMA, h, {"rope_freqs.weight": (4,)})
    for name, shape in shapes.items():
        for wrong in ((*shape[:-1], shape[-1] + 1), (*shape, 1), (shape[0] * 2, *shape[1:]), ()):
            with pytest.raises(RefusedError, match="hyper-parameters require") as info:
                names.check_shapes(LLAMA, h, {**shapes, name: wrong})
            assert info.value.tensor == name


def test_layers_of_a_second_stack_are_numbered_behind_the_first_in_a_gguf() -> None:
    arch, h = ARCHITECTURES["hrm_text"], Hyperparams(num_layers=24, extra={"num_layers_per_stack": 3})
    high = "model.H_module.layers.2.mlp.down_proj.weight"
    assert names.gguf_name(arch, high, h) == "blk.5.ffn_down.weight"
    for number, (first, layer) in enumerate(
        [("", 0), ("", 1), ("", 2), *[("num_layers_per_stack", n) for n in range(3)]]
    ):
        found = names.in_stacks(names.matches(arch, f"blk.{number}.ffn_down.weight", "gguf"), h)
        assert [(match.row.first, match.layer) for match in found] == [(first, layer)]
    beyond = names.in_stacks(names.matches(arch, "blk.6.ffn_down.weight", "gguf"), h)
    assert {match.layer for match in beyond} == {6}


@pytest.mark.parametrize(
    "saved",
    [
        "module.model.layers.0.mlp.up_proj.weight", "_orig_mod.model.layers.0.mlp.up_proj.weight",
        "module._orig_mod.model.layers.0.mlp.up_proj.weight", "_orig_mod.module.model.layers.0.mlp.up_proj.weight",
        "_forward_module.model.layers.0._orig_mod.mlp.up_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "module.layers.0.mlp.up_proj.weight",
    ],
)  # fmt: skip
def test_names_of_wrapped_modules_are_those_of_the_network(saved: str) -> None:
    assert names.canonical_name(LLAMA, saved) == "model.layers.0.mlp.up_proj.weight"
    assert names.canonical_name(LLAMA, f"model.{saved}") is None
