"""Packed weights decode to the values of their definition, whole or in the smallest sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import packed_models as pm
import pytest

from aprfmt.canonical import packed
from aprfmt.canonical.packed import PackedTensor
from aprfmt.codecs import plain
from aprfmt.codecs.packed import region
from aprfmt.codecs.packed_schemes import METHODS, SCHEMES
from aprfmt.codecs.stream import STEP, read_whole
from aprfmt.io.source import Source
from aprfmt.model import Tensor


def only(case: pm.Packed) -> PackedTensor:
    (found,) = packed.packed_weights(case.tensors, case.config)
    return found


def floats(tensor: PackedTensor, dtype: str = "F32") -> Any:
    data = bytes(read_whole(replace(tensor, dtype=dtype)))
    return plain.decode(dtype, data).reshape(tensor.shape)


@pytest.mark.parametrize("name", pm.CASES)
def test_values_are_those_of_the_definition(name: str) -> None:
    case = pm.CASES[name]()
    found = only(case)
    assert found.name == case.name
    assert found.shape == case.values.shape
    assert found.dtype == {"bfloat16": "BF16", "float16": "F16"}[case.dtype]
    assert floats(found).tobytes() == case.values.tobytes()


@pytest.mark.parametrize("name", pm.CASES)
@pytest.mark.parametrize("step", [1, 32, 64, 100])
def test_pieces_give_what_the_whole_gives(name: str, step: int) -> None:
    case = pm.CASES[name]()
    found = only(case)
    assert found.decoded.step >= STEP
    if step < 32 and name.startswith(("gptq", "awq", "ct-pack", "ct-nvfp4", "ct-mxfp4", "modelopt")):
        step = 32  # a part of a row begins at a whole word; STEP is a multiple of 32
    small = replace(found, values=replace(found.decoded, step=step))
    assert floats(small).tobytes() == case.values.tobytes()


@pytest.mark.parametrize("name", pm.CASES)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_weight_can_be_read_at_any_place(name: str, dtype: str) -> None:
    found = only(pm.CASES[name]())
    source = replace(found, dtype=dtype)
    whole = bytes(read_whole(source))
    assert (source.name, source.shape, source.n_bytes) == (found.name, found.shape, len(whole))
    rng = np.random.default_rng(1)
    spans = [(0, len(whole)), (len(whole) - 1, len(whole)), (3, 3)]
    spans += [tuple(sorted(rng.integers(0, len(whole) + 1, 2).tolist())) for _ in range(12)]
    for start, stop in spans:
        buffer = bytearray(stop - start)
        source.read_into(start, memoryview(buffer))
        assert buffer == whole[start:stop]


def test_every_scheme_and_method_has_a_case() -> None:
    schemes = {only(make()).scheme for make in pm.CASES.values()}
    assert schemes == {scheme.label for scheme in SCHEMES}
    used = {make().quantization.get("quant_method", "mlx") for make in pm.CASES.values()}
    assert used | {"fbgemm_fp8"} == {*METHODS, "auto-round"}


@pytest.mark.parametrize("name", ["fp8-block", "gptq-4", "bnb-nf4"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_other_dtypes_are_rounded_from_the_exact_values(name: str, dtype: str) -> None:
    from aprfmt.codecs.recode import encode

    case = pm.CASES[name]()
    assert bytes(read_whole(replace(only(case), dtype=dtype))) == encode(dtype, case.values)


def test_the_natural_dtype_is_the_default_and_counts_its_bytes() -> None:
    found = only(pm.fp8())
    assert (found.dtype, len(read_whole(found)), found.n_bytes) == ("BF16", 70, 70)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, "F16"),
        ({"dtype": "float32"}, "F32"),
        ({"text_config": {"dtype": "bfloat16"}}, "BF16"),
        ({}, "F32"),
    ],
)
def test_the_natural_dtype_comes_from_the_config(config: dict[str, Any], dtype: str) -> None:
    case = pm.fp8()
    (found,) = packed.packed_weights(case.tensors, config | {"quantization_config": case.quantization})
    assert found.dtype == dtype


def test_without_a_word_on_the_dtype_the_scales_tell() -> None:
    case = pm.gptq()
    (found,) = packed.packed_weights(case.tensors, {"quantization_config": case.quantization})
    assert found.dtype == "F16"


def test_fp8_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype="u1").reshape(2, 128)
    weight, scale = pm.tensor("a.weight", "F8_E4M3", codes), pm.tensor("a.weight_scale", "F32", [0.37])
    (found,) = packed.packed_weights(pm.named([weight, scale]), {"quantization_config": {"quant_method": "fp8"}})
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.tensor(0.37)
    np.testing.assert_array_equal(floats(found), theirs.numpy())


@pytest.mark.parametrize(("n_rows", "width"), [(3, 5000), (7, 300), (9000, 300), (2, 4), (1, 9000)])
def test_regions_of_a_piece(n_rows: int, width: int) -> None:
    values = np.arange(n_rows * width, dtype="<i4").reshape(n_rows, width)
    # A read beyond the tensor would be one beyond its source, which refuses.
    source = Tensor("a", "I32", values.shape, 0, values.nbytes, Source.from_bytes(values.tobytes(), "a"))
    for rows in (range(n_rows), range(n_rows // 2, n_rows)):
        for columns in (range(width), range(1, width), range(width - 3), range(1, 2)):
            found = region(source, width, rows, columns)
            expected = values[rows.start : rows.stop, columns.start : columns.stop]
            np.testing.assert_array_equal(found, expected)


def test_stacked_experts_in_fp8_have_a_grid_each() -> None:
    one, two = pm.fp8(seed=1), pm.fp8(seed=2)
    base = "model.layers.0.mlp.experts.gate_up_proj"

    def both(ending: str) -> Iterator[bytes]:
        return (bytes(c.tensors[f"{pm.BASE}.{ending}"].raw()) for c in (one, two))

    codes = np.frombuffer(b"".join(both("weight")), dtype="u1").reshape(2, 5, 7)
    scales = np.frombuffer(b"".join(both("weight_scale_inv")), dtype="<f4").reshape(2, 3, 3)
    tensors = [pm.tensor(base, "F8_E4M3", codes), pm.tensor(f"{base}_scale_inv", "F32", scales)]
    (found,) = packed.packed_weights(pm.named(tensors), one.config)
    assert found.name == base
    for step in (1, 10, 1 << 18):
        small = replace(found, values=replace(found.decoded, step=step))
        np.testing.assert_array_equal(floats(small), np.stack([one.values, two.values]))


@pytest.mark.parametrize("shape", [(2, 1, 7), (2, 1, 1), (2,), (2, 5), (2, 5, 1)])
def test_scales_of_stacked_experts(shape: tuple[int, ...]) -> None:
    codes = np.full((2, 5, 7), 0x38)
    scale = np.arange(1, 1 + int(np.prod(shape)), dtype="<f4").reshape(shape)
    tensors = [pm.tensor("m.experts.w", "F8_E4M3", codes), pm.tensor("m.experts.w_scale", "F32", scale)]
    (found,) = packed.packed_weights(pm.named(tensors), {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    full = scale.reshape(*shape, *(1,) * (3 - len(shape)))
    np.testing.assert_array_equal(floats(found), np.broadcast_to(full, (2, 5, 7)))


def test_blocks_of_fp8_are_128_by_128_where_the_config_is_silent() -> None:
    codes = np.full((3, 130), 0x38)
    tensors = [pm.tensor("a.weight", "F8_E4M3", codes), pm.tensor("a.weight_scale_inv", "F32", [[2.0, 3.0]])]
    (found,) = packed.packed_weights(pm.named(tensors), {"quantization_config": {"quant_method": "fp8"}})
    np.testing.assert_array_equal(floats(found), [[2.0] * 128 + [3.0] * 2] * 3)


def test_scales_that_are_bare_exponents() -> None:
    codes = np.full((2, 64), 0x38)
    tensors = [pm.tensor("a.weight", "F8_E4M3", codes), pm.tensor("a.weight_scale_inv", "U8", [[127, 128], [126, 130]])]
    settings = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    (found,) = packed.packed_weights(pm.named(tensors), {"quantization_config": settings})
    np.testing.assert_array_equal(floats(found)[:, [0, 31, 32]], [[1, 1, 2], [0.5, 0.5, 8]])


def test_gptq_zero_points_of_the_first_format_wrap_in_their_bits() -> None:
    case = pm.gptq(4)
    zeros = np.frombuffer(case.tensors[f"{pm.BASE}.qzeros"].raw(), dtype="<u4")
    nibbles = {int(word) >> 4 * i & 15 for word in zeros for i in range(8)}
    assert 15 in nibbles, "the case holds a zero point of 0, stored as 15"


def test_dynamic_rules_of_gptq_may_pack_a_module_in_other_bits() -> None:
    case = pm.gptq(8)
    settings = case.quantization | {"bits": 4, "dynamic": {"+:.*up_proj": {"bits": 8}, "-:.*gate": {}}}
    (found,) = packed.packed_weights(case.tensors, {"quantization_config": settings})
    np.testing.assert_array_equal(floats(found), case.values)


def test_bitsandbytes_codes_may_be_stored_as_another_dtype() -> None:
    case = pm.bnb4(rows=4, columns=16)
    data = bytes(case.tensors[f"{pm.BASE}.weight"].raw())
    bits = np.frombuffer(data, dtype="<u2").reshape(-1, 1)
    tensors = case.tensors | pm.named([pm.tensor(f"{pm.BASE}.weight", "BF16", bits)])
    (found,) = packed.packed_weights(tensors, case.config)
    np.testing.assert_array_equal(floats(found), case.values)
