"""MLX's affine groups: the quantiser, the packing and the values against mlx's own, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_peer
import numpy as np
import pytest

from aprfmt.canonical.packed import packed_weights
from aprfmt.codecs import affine, ggml, packed, plain
from aprfmt.codecs.affine import BITS, GROUP_SIZES, PARTS, Affine, quantized, regrouped
from aprfmt.codecs.recode import encode
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats import safetensors
from aprfmt.io.pipe import Item, run_jobs

Array = np.ndarray[Any, Any]
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def values() -> Array:
    """Rows of 256: ordinary ones, and those at which a quantiser divides by what is hardly there."""
    rng = np.random.default_rng(7)
    rows = [rng.standard_normal(256) * scale for scale in (1, 1, 0.02, 1e-6, 300)]
    rows += [np.zeros(256), np.full(256, 0.25), np.full(256, -3.0), np.abs(rows[0]), -np.abs(rows[1])]
    rows += [np.where(np.arange(256) % 64, 0.0, 5.0), np.linspace(-1, 1, 256), np.linspace(-1, 7, 256) ** 3]
    return np.stack(rows).astype(np.float32)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx")
    np.save(folder / "values.npy", values())
    jobs = [("quantize", str(folder), b, g, t, "affine") for b in BITS for g in GROUP_SIZES for t in DTYPES]
    jobs += [("quantize", str(folder), *numbers, "bfloat16", mode) for mode, numbers in FLOAT_MODES.items()]
    mlx_peer.run(*jobs)
    return folder


def stored(data: bytes, step: int) -> Iterator[Item]:
    """Bytes in pieces that end anywhere."""
    return iter([data[i : i + step] for i in range(0, len(data), step)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_codes_scales_and_biases_are_those_of_mlx(bits: int, group_size: int, dtype: str, peer: Path) -> None:
    name = f"affine-{dtype}-{bits}-{group_size}"
    data = plain.encode(DTYPES[dtype], values().reshape(-1)).tobytes()
    weight = quantized("w", DTYPES[dtype], Affine(bits, group_size), lambda unit: stored(data, 1001))
    with safetensors.open_model(peer / f"{name}.safetensors") as model:
        for part in PARTS:
            tensor = model.tensors[f"{name}.{part}"]
            assert tensor.shape == Affine(bits, group_size).part_shape(values().shape, part)
            assert b"".join(map(bytes, run_jobs(weight.items(PARTS.index(part))))) == bytes(tensor.raw())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_values_are_those_of_mlx(bits: int, group_size: int, dtype: str, peer: Path) -> None:
    name = f"affine-{dtype}-{bits}-{group_size}"
    with safetensors.open_model(peer / f"{name}.safetensors") as model:
        tensors = {n: model.tensors[n] for n in model.tensors if not n.endswith(".decoded")}
        settings = {"group_size": 64, "bits": 2, "mode": "affine", name: {"group_size": group_size, "bits": bits}}
        (weight,) = packed_weights(tensors, {"quantization": settings})
        assert (weight.name, weight.shape, weight.dtype) == (f"{name}.weight", values().shape, DTYPES[dtype])
        expected = model.tensors[f"{name}.decoded"].numpy().reshape(-1)
        assert weight.decoded.between(0, expected.size).tobytes() == expected.tobytes()
        assert weight.decoded.between(300, 555).tobytes() == expected[300:555].tobytes()


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_values_of_the_modes_of_small_floats_are_those_of_mlx(mode: str, peer: Path) -> None:
    bits, group_size = FLOAT_MODES[mode]
    name = f"{mode}-bfloat16-{bits}-{group_size}"
    with safetensors.open_model(peer / f"{name}.safetensors") as model:
        tensors = {n: model.tensors[n] for n in model.tensors if not n.endswith(".decoded")}
        settings = {"group_size": group_size, "bits": bits, "mode": mode}
        (weight,) = packed_weights(tensors, {"quantization": settings})
        expected = model.tensors[f"{name}.decoded"].numpy().reshape(-1)
        assert np.array_equal(weight.decoded.between(0, expected.size), expected)


def test_fields_of_three_bits_run_on_from_byte_to_byte() -> None:
    codes = np.array([1, 2, 3, 4, 5, 6, 7, 0] * 4, "u1")
    # 0b001, 0b010, 0b011, ... from the lowest bit on.
    assert affine.pack(codes, 3).tobytes() == bytes([0b11010001, 0b01011000, 0b00011111]) * 4
    assert affine.pack(codes, 4).tobytes() == bytes([0x21, 0x43, 0x65, 0x07]) * 4


@pytest.mark.parametrize("bits", BITS)
def test_what_is_packed_is_unpacked(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96), "u1")
    assert np.array_equal(packed.unpack(affine.pack(codes, bits), bits), codes)


def test_scales_are_the_same_whether_codes_were_made_before_or_not() -> None:
    data = values().tobytes()
    first, second = (quantized("w", "F32", Affine(4, 32), lambda unit: stored(data, 4096)) for _ in range(2))
    alone = {part: b"".join(map(bytes, run_jobs(first.items(PARTS.index(part))))) for part in ("scales", "biases")}
    for part in PARTS:
        after = b"".join(map(bytes, run_jobs(second.items(PARTS.index(part)))))
        assert part == "weight" or after == alone[part]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_without_a_scale_are_refused(bad: float) -> None:
    data = values()
    data[3, 5] = bad
    weight = quantized("layers.0.w", "F32", Affine(4, 64), lambda unit: stored(data.tobytes(), 4096))
    with pytest.raises(RefusedError, match="no finite scale") as caught:
        list(run_jobs(weight.items(0)))
    assert caught.value.tensor == "layers.0.w"


@pytest.mark.parametrize("dtype", affine.BITS_OF_BLOCKS)
def test_blocks_are_groups_of_32_and_the_same_blocks_again(dtype: str) -> None:
    data = encode(dtype, values() / 100)
    codes, scales, biases = affine.read_blocks(dtype, data)
    decoded = (scales[:, None] * codes + biases[:, None]).reshape(-1)
    assert np.allclose(decoded, ggml.decode(dtype, data), rtol=1e-6, atol=1e-9)
    assert bytes(affine.write_blocks(dtype, codes, scales, biases)) == data
    assert affine.fitting_blocks(affine.BITS_OF_BLOCKS[dtype], [(scales, biases)]) == (dtype, 0)
    groups = regrouped("w", dtype, lambda unit: stored(data, 777))
    words = np.frombuffer(b"".join(map(bytes, run_jobs(groups.items(0)))), "<u4")
    assert np.array_equal(packed.unpack(words, affine.BITS_OF_BLOCKS[dtype]), codes.reshape(-1))
    halves = [b"".join(map(bytes, run_jobs(groups.items(PARTS.index(part))))) for part in ("scales", "biases")]
    assert np.array_equal(np.frombuffer(halves[0], "<f2"), scales)
    assert np.array_equal(np.frombuffer(halves[1], "<f2"), biases)


def change_of(bits: int, parts: list[tuple[Array, Array]]) -> float:
    found = affine.fitting_blocks(bits, parts)
    assert found is not None
    return found[1]


def test_blocks_of_scales_that_f16_rounds() -> None:
    third, half = np.full(4, 1 / 3, np.float32), np.full(4, 0.5, np.float32)
    assert affine.fitting_blocks(4, [(half, half)]) == ("Q4_1", 0)
    assert affine.fitting_blocks(4, [(half, -8 * half)]) == ("Q4_0", 0)
    assert affine.fitting_blocks(4, [(half, -8 * half), (half, half)]) == ("Q4_1", 0)
    off = float(abs(np.float16(1 / 3) - np.float64(np.float32(1 / 3))))
    assert change_of(4, [(third, -8 * third)]) == pytest.approx(3 * off)
    assert change_of(4, [(third, half)]) == pytest.approx(15 * off / 5.5)
    assert change_of(4, [(half, third)]) == pytest.approx(off / (7.5 + 1 / 3))
    assert change_of(4, [(third * 2**-22, half)]) == pytest.approx(0, abs=1e-6)
    assert affine.fitting_blocks(4, [(third * 2**-14, -8 * third * 2**-14)]) is None
    assert affine.fitting_blocks(4, [(half * 2**18, -4 * half * 2**18)]) is None
    assert affine.fitting_blocks(8, [(half, half)]) is None
    assert affine.fitting_blocks(6, [(half, half)]) is None


def test_blocks_whose_biases_f16_does_not_hold_are_refused() -> None:
    data = encode("Q8_0", np.full((1, 32), 60_000.0, np.float32) * 2)
    groups = regrouped("w", "Q8_0", lambda unit: stored(data, 34))
    with pytest.raises(RefusedError, match="overflow F16"):
        list(run_jobs(groups.items(2)))


@pytest.mark.parametrize(("bits", "group_size"), [(1, 64), (7, 64), (4, 16), (4, 0), ("4", 64), (True, 64), (4, None)])
def test_numbers_that_mlx_does_not_have(bits: object, group_size: object) -> None:
    with pytest.raises(UsageError, match="MLX does not support"):
        affine.check(bits, group_size)
