"""What cannot be decoded is refused before anything is written, with scheme, tensor and a way on."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import packed_models as pm
import pytest

from aprfmt.canonical import packed
from aprfmt.codecs.stream import read_whole
from aprfmt.errors import AprError, CorruptError, LimitError, RefusedError
from aprfmt.io.source import Source
from aprfmt.model import Tensor


def refusal(tensors: Mapping[str, Tensor], quantization: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        packed.packed_weights(tensors, {"quantization_config": quantization})
    error = caught.value
    assert error.hint
    assert len(error.message) < 400
    return error


ONE_SCALE = ("fp8-tensor", "bitnet", "bitnet-auto")
# What a weight can be decoded without: then other checks decide.
OPTIONAL = ("g_idx", "_bias", "weight_format", "input_scale", "input_global_scale")
PIECES = [(name, n) for name, make in pm.CASES.items() for n in make().tensors if not n.endswith(OPTIONAL)]


@pytest.mark.parametrize(("name", "source"), PIECES)
def test_a_missing_piece_is_refused(name: str, source: str) -> None:
    case = pm.CASES[name]()
    if name == "ct-nvfp4" and source.endswith("global_scale"):
        return  # then it looks as MXFP4 does: the next test
    optional = source.endswith("zero_point") and name == "ct-pack-plain-zero"
    error = refusal({n: t for n, t in case.tensors.items() if n != source}, case.quantization)
    assert error.tensor is not None
    assert optional or error.tensor in case.tensors


def test_nvfp4_without_its_overall_scale_is_no_mxfp4() -> None:
    case = pm.nvfp4()
    error = refusal(case.changed("weight_global_scale", None), case.quantization)
    assert error.tensor == f"{pm.BASE}.weight_scale"
    assert "F8_E4M3" in error.message


@pytest.mark.parametrize(("name", "source"), PIECES)
def test_a_piece_of_another_shape_is_refused(name: str, source: str) -> None:
    case = pm.CASES[name]()
    old = case.tensors[source]
    if "quant_state" in source or (name in ONE_SCALE and source.endswith(".weight")):
        return  # a text may have any length, and one scale fits any weight
    for axis in range(len(old.shape)):
        whole_rows = axis == 1 and source.endswith(".weight") and "nvfp4" not in name and name != "fp8-block"
        if whole_rows and not name.startswith("bnb-nf4") and not name.startswith("bnb-fp4"):
            continue  # a scale a row fits any number of columns
        if axis == 0 and (name, source) == ("awq-one-group", f"{pm.BASE}.qweight"):
            continue
        new = np.concatenate([np.zeros(old.shape)] * 3, axis=axis)
        error = refusal(case.tensors | {source: pm.tensor(source, old.dtype, new)}, case.quantization)
        assert error.tensor is not None


@pytest.mark.parametrize(("name", "source"), PIECES)
def test_a_piece_of_another_dtype_is_refused(name: str, source: str) -> None:
    case = pm.CASES[name]()
    old = case.tensors[source]
    new = pm.tensor(source, "F32" if old.dtype in ("I32", "I64", "I8", "U8", "F8_E4M3") else "I64", np.zeros(old.shape))
    error = refusal(case.tensors | {source: new}, case.quantization)
    assert error.tensor is not None


@pytest.mark.parametrize("name", pm.CASES)
def test_a_piece_without_elements_is_refused(name: str) -> None:
    case = pm.CASES[name]()
    main = next(iter(case.tensors))
    old = case.tensors[main]
    refusal(case.tensors | {main: pm.tensor(main, old.dtype, np.zeros((0, *old.shape[1:])))}, case.quantization)


@pytest.mark.parametrize("size", [0, -2, -(1 << 70), 1 << 70, 7, True, "32", 32.0, [32], None, {}])
def test_group_sizes_that_do_not_fit_are_refused(size: Any) -> None:
    for case in (pm.gptq(), pm.gptq(g_idx=False), pm.awq()):
        error = refusal(case.tensors, case.quantization | {"group_size": size})
        assert "group_size" in error.message
    case = pm.pack_quantized()
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": size}}
    refusal(case.tensors, case.quantization | {"config_groups": {"g": group}})


@pytest.mark.parametrize(
    "size", [[0, 3], [2, 0], [-2, 3], [2], [2, 3, 4], "2", "axb", 128, [2.0, 3], [True, 3], [3, 2], [1 << 80, 1]]
)
def test_block_sizes_that_do_not_fit_are_refused(size: Any) -> None:
    case = pm.fp8()
    refusal(case.tensors, case.quantization | {"weight_block_size": size})


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -4, True, "4", None, 8, 3])
def test_numbers_of_bits_that_do_not_fit_are_refused(bits: Any) -> None:
    refusal(pm.gptq().tensors, pm.gptq().quantization | {"bits": bits})
    refusal(pm.awq().tensors, pm.awq().quantization | {"bits": bits})
    case = pm.pack_quantized()
    weights = {"num_bits": bits, "group_size": 8, "strategy": "group"}
    refusal(case.tensors, pm.ct(weights, "pack-quantized"))


@pytest.mark.parametrize("bad", [-1, 2, 1 << 30])
def test_an_order_with_a_group_that_is_not_stored_is_refused(bad: int) -> None:
    for case, ending in ((pm.gptq(desc_act=True), "g_idx"), (pm.pack_quantized(order=True), "weight_g_idx")):
        old = case.tensors[f"{pm.BASE}.{ending}"]
        order = np.frombuffer(old.raw(), dtype="<i4").copy()
        order[3] = bad if ending == "g_idx" or bad != 2 else 5
        error = refusal(case.changed(ending, pm.tensor(old.name, "I32", order)), case.quantization)
        assert error.tensor == old.name


def test_an_order_that_the_config_denies_is_refused() -> None:
    case = pm.gptq(desc_act=True)
    error = refusal(case.tensors, case.quantization | {"desc_act": False})
    assert "desc_act" in error.message
    missing = pm.gptq(g_idx=False)
    assert "g_idx" in refusal(missing.tensors, missing.quantization | {"desc_act": True}).message


@pytest.mark.parametrize("shape", [[10, 41], [11, 40], [10, 0], [10, -40], [-10, 40], [1 << 62, 1 << 62], [40, 10]])
def test_a_weight_shape_that_does_not_fit_the_codes_is_refused(shape: list[int]) -> None:
    case = pm.pack_quantized()
    refusal(case.changed("weight_shape", pm.tensor(f"{pm.BASE}.weight_shape", "I64", shape)), case.quantization)


def with_state(state: Any) -> dict[str, Tensor]:
    case = pm.bnb4(nested=True)
    text = state if isinstance(state, bytes) else json.dumps(state).encode()
    name = f"{pm.BASE}.weight.quant_state.bitsandbytes__nf4"
    return case.tensors | {name: pm.tensor(name, "U8", list(text))}


GOOD_STATE = {"quant_type": "nf4", "blocksize": 8, "dtype": "bfloat16", "shape": [5, 13], "nested_blocksize": 4,
              "nested_dtype": "float32", "nested_offset": 1.625}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [5, 14]}, {"shape": [1 << 40, 1 << 40]}, {"shape": [0, 13]}, {"shape": [-5, -13]}, {"shape": []},
        {"shape": None}, {"shape": "5,13"}, {"shape": [5.0, 13]}, {"shape": [[5], 13]}, {"shape": [True, 65]},
        {"blocksize": 0}, {"blocksize": -8}, {"blocksize": 16}, {"blocksize": 1 << 63}, {"blocksize": None},
        {"nested_blocksize": 0}, {"nested_blocksize": 2}, {"nested_offset": None}, {"nested_offset": "1"},
        {"quant_type": "fp4"},
    ],
)  # fmt: skip
def test_a_state_of_bitsandbytes_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    quantization = pm.bnb4().quantization
    packed.packed_weights(with_state(GOOD_STATE), {"quantization_config": quantization})
    with pytest.raises((RefusedError, LimitError)):
        packed.packed_weights(with_state(GOOD_STATE | change), {"quantization_config": quantization})


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"null", b'{"a":' * 500, b"[" * 60000, b" " * 70000])
def test_a_state_that_is_no_object_is_refused(text: bytes) -> None:
    assert refusal(with_state(text), pm.bnb4().quantization).tensor


def test_code_values_of_another_kind_are_refused() -> None:
    case = pm.bnb4()
    other = pm.tensor(f"{pm.BASE}.weight.quant_map", "F32", np.linspace(-1, 1, 16))
    assert "nf4" in refusal(case.changed("quant_map", other), case.quantization).message


def test_rows_laid_out_for_a_gpu_are_refused() -> None:
    case = pm.bnb8()
    other = pm.tensor(f"{pm.BASE}.weight_format", "U8", np.array(2), ())
    assert "GPU" in refusal(case.changed("weight_format", other), case.quantization).message


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "auto-round"),
        ({"quant_method": 7}, "does not name"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "Marlin"),
        ({"quant_method": "gptq", "pack_dtype": "int64"}, "int64"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "odd"}}}, "odd"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "transform"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"a": {"weights": {"strategy": "attn_head"}}}}, "attn_head"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ([1], "not a JSON object"),
        ("fp8", "not a JSON object"),
    ],
)  # fmt: skip
def test_ways_to_pack_that_are_not_decoded_are_named(method: Any, word: str) -> None:
    error = refusal({}, method)
    assert word in error.message


def test_codes_of_three_bits_get_the_line_that_decodes_them() -> None:
    case = pm.CASES["ct-pack-4"]()
    group = {"weights": {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}}
    error = refusal(case.tensors, case.quantization | {"config_groups": {"group_0": group}})
    assert "num_bits 3 is not supported" in error.message
    assert "CompressedTensorsConfig as C" in str(error.hint)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "ct-pack-4", "fp8-block", "mxfp4", "bnb-nf4", "bnb-int8"])
def test_packed_weights_without_a_config_are_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="has no quantization_config"):
        packed.packed_weights(pm.CASES[name]().tensors, {"dtype": "bfloat16"})


@pytest.mark.parametrize(("name", "method"), [("gptq-4", "awq"), ("awq", "gptq"), ("bnb-int8", "compressed-tensors"),
                                              ("ct-int8", "bitsandbytes"), ("ct-pack-4", "fp8"), ("mxfp4", "gptq"),
                                              ("modelopt-nvfp4", "compressed-tensors")])  # fmt: skip
def test_weights_of_another_method_than_the_config_says_are_refused(name: str, method: str) -> None:
    case = pm.CASES[name]()
    refusal(case.tensors, case.quantization | {"quant_method": method})


def test_zero_points_that_the_config_announces_must_be_there() -> None:
    for case in (pm.pack_quantized(), pm.ct_int8()):
        (group,) = case.quantization["config_groups"].values()
        weights = group["weights"] | {"symmetric": False}
        error = refusal(case.tensors, pm.ct(weights, "int-quantized"))
        assert "zero points are missing" in error.message


@pytest.mark.parametrize("ending", ["pre_quant_scale", "weight_scale", "qzeros"])
def test_what_belongs_to_no_weight_is_refused(ending: str) -> None:
    case = pm.fp8()
    stray = pm.tensor(f"model.layers.1.mlp.up_proj.{ending}", "F32", [1.0])
    assert refusal(case.tensors | {stray.name: stray}, case.quantization).tensor == stray.name


def test_a_weight_beside_its_packed_form_is_refused() -> None:
    case = pm.gptq()
    twin = pm.tensor(f"{pm.BASE}.weight", "F32", np.zeros((32, 64)))
    assert "together with" in refusal(case.tensors | {twin.name: twin}, case.quantization).message


def test_more_bytes_than_the_shape_takes_are_refused() -> None:
    case = pm.fp8()
    weight = case.tensors[f"{pm.BASE}.weight"]
    long = Tensor(weight.name, "F8_E4M3", (500, 7), weight.offset, weight.n_bytes, weight.source)
    with pytest.raises(CorruptError):
        packed.packed_weights(case.tensors | {weight.name: long}, case.config)


def test_a_file_that_ends_early_is_an_error_of_ours() -> None:
    case = pm.gptq()
    name = f"{pm.BASE}.qweight"
    old = case.tensors[name]
    short = Tensor(name, "I32", old.shape, 0, old.n_bytes, Source.from_bytes(b"\0" * 100, "short"))
    (found,) = packed.packed_weights(case.tensors | {name: short}, case.config)
    with pytest.raises(AprError):
        read_whole(found)


class Zeros(Source):
    """A file of any size that holds zeros, and takes no memory."""

    def __init__(self, size: int) -> None:
        super().__init__("zeros", None, b"", size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.check(offset, len(buffer))


def hollow(name: str, dtype: str, *shape: int) -> Tensor:
    from aprfmt.codecs.dtypes import DTYPES

    n_bytes = DTYPES[dtype].n_bytes(shape)
    return Tensor(name, dtype, shape, 0, n_bytes, Zeros(n_bytes))


HUGE: list[tuple[list[Tensor], dict[str, Any]]] = [
    ([hollow("a.weight", "F8_E4M3", 4, 1 << 30), hollow("a.weight_scale_inv", "F32", 1, 1 << 23)],
     {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ([hollow("a.weight", "F8_E4M3", 1 << 20, 1 << 16), hollow("a.weight_scale_inv", "F32", 1 << 20, 1 << 16)],
     {"quant_method": "fp8", "weight_block_size": [1, 1]}),
    ([hollow("a.qweight", "I32", 1 << 10, 1 << 16), hollow("a.qzeros", "I32", 64, 1 << 13),
      hollow("a.scales", "F16", 64, 1 << 16)], {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    ([hollow("a.weight", "I8", 2, 1 << 34), hollow("a.SCB", "F32", 2)], {"quant_method": "bitsandbytes"}),
    ([hollow("a_blocks", "U8", 64, 1 << 12, 1 << 7, 16), hollow("a_scales", "U8", 64, 1 << 12, 1 << 7)],
     {"quant_method": "mxfp4"}),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "settings"), HUGE)
def test_memory_does_not_grow_with_the_weight(tensors: list[Tensor], settings: dict[str, Any]) -> None:
    (found,) = packed.packed_weights(pm.named(tensors), {"quantization_config": settings})
    tracemalloc.start()
    for i in range(2):
        found.read_into(i << 20, memoryview(bytearray(1 << 20)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB"
