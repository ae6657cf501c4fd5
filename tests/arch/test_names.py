"""The architecture table: every name as gguf-py maps it; completeness and shapes of a network."""

from __future__ import annotations

import gguf
import pytest

from aprfmt.arch import names
from aprfmt.arch.hparams import Hyperparams
from aprfmt.arch.table import ARCHITECTURES, HEAD, OPTIONAL, REQUIRED, Architecture, find
from aprfmt.arch.transforms import INVERSE
from aprfmt.errors import RefusedError, UnmappedError

by_arch = pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.id)


def small(arch: Architecture, **changes: object) -> Hyperparams:
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    fields = {"architecture": arch.id, **sizes, "vocab_size": 100, "intermediate_size": 96}
    return Hyperparams(**{**fields, **changes})  # type: ignore[arg-type]


def all_names(arch: Architecture, layers: int = 2, needs: tuple[str, ...] = (REQUIRED, HEAD)) -> list[str]:
    return [row.hf.replace("{n}", str(n)) for row in arch.tensors if row.need in needs for n in range(layers)]


@by_arch
@pytest.mark.parametrize("layer", ["0", "7", "121"])
def test_names_go_there_and_back(arch: Architecture, layer: str) -> None:
    for row in arch.tensors:
        hf, gguf_name = row.hf.replace("{n}", layer), row.gguf.replace("{n}", layer)
        assert names.to_gguf(arch, hf) == gguf_name
        assert names.to_hf(arch, gguf_name) == hf
        assert (names.move_of(arch, hf) is None) == (row.move is None)


@by_arch
def test_no_two_rows_collide(arch: Architecture) -> None:
    for side in ("hf", "gguf"):
        spellings = [getattr(row, side) for row in arch.tensors]
        assert len(set(spellings)) == len(spellings)
    assert not {row.gguf for row in arch.tensors} & set(arch.gguf_only)
    for row in arch.tensors:
        assert ("{n}" in row.hf) == ("{n}" in row.gguf)
        assert row.need in (REQUIRED, OPTIONAL, HEAD, "attention_bias", "mlp_bias")
        assert row.move is None or (row.move in INVERSE and hasattr(small(arch), row.heads or "?"))
        assert set(row.dims) <= set(names.dim_sizes(small(arch)))


@by_arch
def test_names_as_gguf_maps_them(arch: Architecture) -> None:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.gguf)
    known = {gguf.TENSOR_NAMES[t].replace("{bid}", "{n}") for t in gguf.MODEL_TENSORS[number]}
    mapping = gguf.get_tensor_name_map(number, 3)
    for row in arch.tensors:
        for layer in range(3):
            hf, _, suffix = row.hf.replace("{n}", str(layer)).rpartition(".")
            assert f"{mapping.get_name(hf)}.{suffix}" == row.gguf.replace("{n}", str(layer))
        assert row.gguf.rpartition(".")[0] in known
    assert {name.rpartition(".")[0] for name in arch.gguf_only} <= known


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{n}.input_layernorm.weight", "blk.{n}.attn_q.weight", "", ".", "lm_head",
        "model.layers.00.input_layernorm.weight", "model.layers.1000000.input_layernorm.weight",
        "model.layers.-1.input_layernorm.weight",
        "model.layers.0.1.input_layernorm.weight", "model.layers..input_layernorm.weight", "lm_head.weight ",
        "model.layers.٣.input_layernorm.weight",
    ],
)  # fmt: skip
def test_odd_names_are_unknown(name: str) -> None:
    for arch in ARCHITECTURES.values():
        assert names.to_gguf(arch, name) is None


def test_find() -> None:
    for arch in ARCHITECTURES.values():
        for hf_class in arch.hf_classes:
            assert find(hf_class=hf_class) is arch
        for model_type in arch.model_types:
            assert find(model_type=model_type) is arch
        assert find(gguf=arch.gguf) is arch
        assert arch.hf_class in arch.hf_classes
        assert arch.model_type in arch.model_types
        assert set(arch.bare_classes) <= set(arch.hf_classes)
    assert find(hf_class="MistralForCausalLM") is ARCHITECTURES["llama"]
    assert find(hf_class="Unknown", model_type="qwen3") is ARCHITECTURES["qwen3"]
    assert find(hf_class="MixtralForCausalLM", model_type="mixtral") is None
    assert find() is None


def test_moves_are_those_of_llama() -> None:
    llama = ARCHITECTURES["llama"]
    assert names.move_of(llama, "model.layers.3.self_attn.q_proj.bias") == ("rope_permute", "num_heads")
    assert names.move_of(llama, "model.layers.3.self_attn.k_proj.weight") == ("rope_permute", "num_kv_heads")
    assert names.move_of(llama, "model.layers.3.self_attn.v_proj.weight") is None
    for other in ("qwen2", "qwen3"):
        assert not any(row.move for row in ARCHITECTURES[other].tensors)


@by_arch
def test_nearest(arch: Architecture) -> None:
    assert (
        names.nearest(arch, "model.layers.4.self_attn.qproj.weight")
        == "model.layers.4.self_attn.q_proj.weight"
    )
    assert names.nearest(arch, "blk.4.attnq.weight", "gguf") == "blk.4.attn_q.weight"
    assert names.nearest(arch, "", "gguf")


@by_arch
def test_order_is_that_of_the_network(arch: Architecture) -> None:
    shuffled = sorted([*all_names(arch, 11), "rope_freqs.weight"], reverse=True)
    ordered = sorted(set(shuffled), key=lambda name: names.order(arch, name))
    assert ordered[0] == "model.embed_tokens.weight"
    assert ordered[-2:] == ["lm_head.weight", "rope_freqs.weight"]
    assert ordered.index("model.layers.2.mlp.up_proj.weight") < ordered.index(
        "model.layers.10.input_layernorm.weight"
    )


@by_arch
def test_complete_networks_pass(arch: Architecture) -> None:
    present = all_names(arch)
    names.check_tensors(arch, small(arch), present)
    names.check_tensors(arch, small(arch, tied=True), set(present) - {"lm_head.weight"})
    names.check_tensors(
        arch, small(arch, hf_architecture=arch.bare_classes[0]), set(present) - {"lm_head.weight"}
    )
    names.check_tensors(arch, small(arch, num_layers=None), [*present, "rope_freqs.weight"])
    names.check_tensors(arch, small(arch), [*present, "model.layers.0.self_attn.rotary_emb.inv_freq"])
    every = all_names(arch, needs=(REQUIRED, HEAD, OPTIONAL, "attention_bias", "mlp_bias"))
    names.check_tensors(arch, small(arch, extra={"attention_bias": True, "mlp_bias": True}), every)


@by_arch
def test_each_missing_tensor_is_named(arch: Architecture) -> None:
    present = set(all_names(arch))
    for name in present:
        with pytest.raises(RefusedError) as info:
            names.check_tensors(arch, small(arch), present - {name})
        assert info.value.tensor == name
        assert name in str(info.value)
    with pytest.raises(RefusedError, match="layer 1, the network has 1 layers"):
        names.check_tensors(arch, small(arch, num_layers=1), present)


def test_promised_biases_must_be_there() -> None:
    llama = ARCHITECTURES["llama"]
    with pytest.raises(RefusedError, match=r"4 tensors.*q_proj\.bias"):
        names.check_tensors(
            llama, small(llama, num_layers=1, extra={"attention_bias": True}), all_names(llama, 1)
        )


def test_unknown_tensors_are_named_with_the_nearest() -> None:
    qwen2 = ARCHITECTURES["qwen2"]
    with pytest.raises(UnmappedError, match=r"nearest is '\S+\.0\.self_attn\.q_proj\.bias'") as info:
        names.check_tensors(qwen2, small(qwen2), [*all_names(qwen2), "model.layers.0.self_attn.q_proj.bais"])
    assert info.value.tensor == "model.layers.0.self_attn.q_proj.bais"


def test_a_crafted_layer_count_costs_nothing() -> None:
    llama = ARCHITECTURES["llama"]
    with pytest.raises(RefusedError, match="missing"):
        names.check_tensors(llama, small(llama, num_layers=1 << 62), all_names(llama))


@by_arch
def test_shapes(arch: Architecture) -> None:
    h = small(arch)
    sizes = names.dim_sizes(h)
    shapes = {row.hf.replace("{n}", "0"): tuple(sizes[d] or 0 for d in row.dims) for row in arch.tensors}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (16, 64)
    names.check_shapes(arch, h, shapes)
    names.check_shapes(arch, Hyperparams(), shapes)
    names.check_shapes(arch, h, {"rope_freqs.weight": (4,)})
    for name, shape in shapes.items():
        for wrong in ((*shape[:-1], shape[-1] + 1), (*shape, 1), (shape[0] * 2, *shape[1:]), ()):
            with pytest.raises(RefusedError, match="hyper-parameters ask for") as info:
                names.check_shapes(arch, h, {**shapes, name: wrong})
            assert info.value.tensor == name
