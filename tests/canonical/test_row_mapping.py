"""Recasts move the right bytes both ways: against numpy, on every dtype, in sources, from several files' tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import examples

from aprfmt.arch.links import RowMapping
from aprfmt.canonical import row_mapping as engine
from aprfmt.canonical.row_mapping import keeps_dtype, produce
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import encode
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError
from aprfmt.io.source import Source
from aprfmt.model import Tensor

Array = np.ndarray[Any, Any]


def source(array: Array, dtype: str = "F32") -> TensorSource:
    data = encode(dtype, array) if dtype != "F32" else array.astype("<f4").tobytes()
    source = Source.from_bytes(b"\0" * 5 + data + b"\0", "memory")
    return Tensor("t", dtype, array.shape, 5, len(data), source)


def made(sources: list[TensorSource], mapping: RowMapping, inverse: bool = False) -> list[Array]:
    shapes = mapping.before if inverse else mapping.after
    out = []
    for position, shape in enumerate(shapes):
        produced = produce(sources, mapping, position, inverse=inverse)
        assert produced.shape == shape
        assert sum(len(chunk) for chunk in produced.chunks()) == produced.n_bytes
        out.append(produced.values())
    return out


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def both_ways(before: list[Array], after: list[Array], **more: Any) -> None:
    mapping = RowMapping(tuple(a.shape for a in before), tuple(a.shape for a in after), **more)
    mapping.check("t")
    assert RowMapping.from_json(json.loads(json.dumps(mapping.to_json())), "t") == mapping
    for have, want in zip(made([source(a) for a in before], mapping), after, strict=True):
        np.testing.assert_array_equal(have, want)
    for have, want in zip(made([source(a) for a in after], mapping, True), before, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.fixture(params=[1 << 20, 100], ids=["whole", "sources"], autouse=True)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CHUNK_BYTES", request.param)


def test_rotary_heads() -> None:
    x = floats(24, 7)
    both_ways([x], [x.reshape(3, 2, 4, 7).swapaxes(1, 2).reshape(24, 7)], orders=(("swap", (3, 2, 4)),))
    bias = floats(24)
    both_ways([bias], [bias.reshape(3, 2, 4).swapaxes(1, 2).reshape(24)], orders=(("swap", (3, 2, 4)),))


def test_fused_projections_are_split() -> None:
    x = floats(2 * (6 + 3 + 3), 5)
    groups = x.reshape(2, 12, 5)
    parts = [groups[:, a:b].reshape(-1, 5) for a, b in ((0, 6), (6, 9), (9, 12))]
    both_ways([x], parts, orders=(("deal", (2, 6, 3, 3)),))
    both_ways([x], [np.concatenate(parts)], orders=(("deal", (2, 6, 3, 3)),))


def test_experts_are_stacked() -> None:
    experts = [floats(6, 5, seed=i) for i in range(4)]
    both_ways(experts, [np.stack(experts)])


def test_stacked_gate_and_up_are_taken_apart() -> None:
    x = floats(3, 8, 5)
    both_ways([x], [x[:, :4], x[:, 4:]], orders=(("deal", (3, 4, 4)),))


def test_interleaved_and_transposed_experts() -> None:
    x = floats(3, 5, 8)  # [experts, hidden, 2 ffn], gate and up in turn
    rows = x.swapaxes(1, 2)
    both_ways([x], [rows[:, ::2], rows[:, 1::2]], orders=(("deal", (12, 1, 1)),), transposed=True)
    bias = floats(3, 8)
    both_ways([bias], [bias[:, ::2], bias[:, 1::2]], orders=(("deal", (12, 1, 1)),), flat=True)


def test_transposed_matrices() -> None:
    x = floats(6, 9)
    both_ways([x], [np.ascontiguousarray(x.T)], transposed=True)


def test_absorbed_attention() -> None:
    heads, nope, v, rank = 3, 4, 2, 7
    x = floats(heads * (nope + v), rank)
    per_head = x.reshape(heads, nope + v, rank)
    k, v_b = per_head[:, :nope].swapaxes(1, 2), per_head[:, nope:]
    both_ways([x], [k, v_b], orders=(("deal", (heads, nope, v)),), after_transposed=(True, False))


def test_rows_are_multiplied_run_by_run() -> None:
    x = floats(6, 5)
    wanted = np.concatenate([x[:2] * np.float32(0.5) * np.float32(4), x[2:3], x[3:] * np.float32(0.25)])
    scales = ((2, (0.5, 4.0)), (1, ()), (3, (0.25,)))
    both_ways([x], [wanted], scales=scales)
    both_ways([x.reshape(3, 2, 5).swapaxes(0, 1).reshape(6, 5)], [wanted], orders=(("swap", (1, 2, 3)),), scales=scales)
    both_ways([x], [wanted[:4], wanted[4:]], scales=scales)
    bias = floats(6)
    both_ways([bias], [bias * np.float32(2)], scales=((6, (2.0,)),))
    with pytest.raises(RefusedError):
        RowMapping((x.shape,), (x.shape,), scales=((5, (2.0,)),)).check("x")
    body = RowMapping((x.shape,), (x.shape,), scales=((6, (2.0,)),)).to_json()
    for number in (0, float("nan"), "2"):
        with pytest.raises((ValueError, RefusedError)):
            RowMapping.from_json(body | {"scales": [[6, number]]}, "x")


def test_columns() -> None:
    x = floats(4, 12)
    want = x.reshape(4, 2, 3, 2).swapaxes(1, 2).reshape(4, 12)
    both_ways([x], [want], columns=(("swap", (1, 2, 3)),))


def test_reshapes() -> None:
    x = floats(6, 1, 4)
    both_ways([x], [x.reshape(6, 4)])
    y = floats(6)
    both_ways([y], [y.reshape(6, 1)])
    both_ways([y], [y.reshape(2, 3)])


def test_values() -> None:
    x = np.array([0.0, 0.5, -0.25, 2.0], np.float32)
    mapping = RowMapping((x.shape,), (x.shape,), value="plus_one")
    assert made([source(x)], mapping)[0].tolist() == [1.0, 1.5, 0.75, 3.0]
    assert made([source(x + 1)], mapping, inverse=True)[0].tolist() == x.tolist()
    assert produce([source(x, "BF16")], mapping, 0).dtype == "F32"
    assert made([source(x, "BF16")], mapping)[0].tolist() == [1.0, 1.5, 0.75, 3.0]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64", "Q4_0", "Q8_0"])
def test_stored_rows_move_without_being_decoded(dtype: str) -> None:
    x = floats(12, 64)
    mapping = RowMapping(((12, 64),), ((6, 64), (6, 64)), (("deal", (3, 2, 2)),))
    sources = [source(x, dtype)]
    assert keeps_dtype(sources, mapping)
    rows = x.reshape(3, 4, 64)
    for position, want in enumerate((rows[:, :2], rows[:, 2:])):
        produced = produce(sources, mapping, position)
        assert produced.dtype == dtype
        assert b"".join(bytes(c) for c in produced.chunks()) == encode(dtype, want.reshape(6, 64))


def test_experts_of_blocks_are_stacked_and_cut_again() -> None:
    experts = [floats(4, 64, seed=i) for i in range(3)]
    mapping = RowMapping(((4, 64),) * 3, ((3, 4, 64),))
    stacked = produce([source(e, "Q4_0") for e in experts], mapping, 0)
    assert b"".join(bytes(c) for c in stacked.chunks()) == encode("Q4_0", np.stack(experts))
    second = produce([source(np.stack(experts), "Q4_0")], mapping, 1, inverse=True)
    assert b"".join(bytes(c) for c in second.chunks()) == encode("Q4_0", experts[1])


def test_blocks_are_decoded_where_values_move() -> None:
    x = floats(32, 64)
    mapping = RowMapping(((32, 64),), ((64, 32),), transposed=True)
    sources = [source(x, "Q8_0")]
    assert not keeps_dtype(sources, mapping)
    produced = produce(sources, mapping, 0)
    assert produced.dtype == "F32"
    assert np.abs(produced.values() - x.T).max() < 0.05


def test_pieces_of_two_dtypes_become_floats() -> None:
    mapping = RowMapping(((2, 4),) * 2, ((2, 2, 4),))
    x = floats(2, 4)
    produced = produce([source(x), source(x, "BF16")], mapping, 0)
    assert produced.dtype == "F32"
    np.testing.assert_allclose(produced.values()[1], x, rtol=1e-2)


def test_empty_tensors() -> None:
    mapping = RowMapping(((0, 4),), ((0, 4),), (("swap", (1, 2, 1)),))
    assert list(produce([source(floats(0, 4))], mapping, 0).chunks()) == []


@settings(max_examples=examples(60))
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 6), st.booleans())
def test_any_deal_comes_back(n: int, runs: list[int], width: int, turned: bool) -> None:
    x = floats(n * sum(runs), width)
    after = tuple((width, n * run) if turned else (n * run, width) for run in runs)
    mapping = RowMapping((x.shape,), after, (("deal", (n, *runs)),), after_transposed=(turned,) * len(runs))
    there = made([source(x)], mapping)
    np.testing.assert_array_equal(made([source(a) for a in there], mapping, True)[0], x)


def stored(array: Array, dtype: str, shape: tuple[int, ...]) -> TensorSource:
    source = Source.from_bytes(array.tobytes(), "memory")
    return Tensor("t", dtype, shape, 0, array.nbytes, source)


def test_integers_become_smaller_and_larger_again() -> None:
    mapping = RowMapping(((3, 2),), ((3, 2),), value="int32")
    table = np.array([[0, 1], [-1, 2**31 - 1], [5, -(2**31)]], np.int64)
    small = produce([stored(table, "I64", (3, 2))], mapping, 0)
    assert (small.dtype, small.n_bytes, small.data()) == ("I32", 24, table.astype("<i4").tobytes())
    large = produce([stored(table.astype("<i4"), "I32", (3, 2))], mapping, 0, inverse=True)
    assert (large.dtype, large.data()) == ("I64", table.tobytes())
    table[1, 1] += 1
    with pytest.raises(RefusedError, match="2147483648 does not fit the 32-bit integers"):
        produce([stored(table, "I64", (3, 2))], mapping, 0).data()


def test_a_product_comes_back_as_itself_and_ones() -> None:
    norm, projection = floats(6), floats(1, 6, seed=1)
    mapping = RowMapping(((6,), (1, 6)), ((6,),), value="product")
    mapping.check("t")
    assert RowMapping.from_json(json.loads(json.dumps(mapping.to_json())), "t") == mapping
    (both,) = made([source(norm), source(projection, "BF16")], mapping)
    rounded = stored(np.frombuffer(encode("BF16", projection), "<u2"), "BF16", (1, 6))
    np.testing.assert_array_equal(both, norm * made([rounded], RowMapping(((1, 6),), ((6,),)))[0])
    back = made([source(both)], mapping, True)
    np.testing.assert_array_equal(back[0], both)
    np.testing.assert_array_equal(back[1], np.ones((1, 6), np.float32))
    for wrong in (((6,),), ((6,), (1, 6), (6,)), ((6,), (1, 5))):
        with pytest.raises(RefusedError):
            RowMapping(wrong, ((6,),), value="product").check("t")


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
def test_rows_of_zeros_stand_before_and_behind_the_others_in_a_gguf(dtype: str) -> None:
    rows = floats(2, 1, 6, 32)
    mapping = RowMapping(((2, 1, 6, 32),), ((3, 6, 32),), (("swap", (2, 2, 3)),), lead=5, trail=1)
    mapping.check("t")
    assert RowMapping.from_json(json.loads(json.dumps(mapping.to_json())), "t") == mapping
    given = source(rows, dtype)
    there = produce([given], mapping, 0)
    assert there.dtype == dtype
    values = there.values().reshape(18, 32)
    assert not values[:5].any()
    assert not values[17:].any()
    stored = Tensor("g", dtype, (3, 6, 32), 0, there.n_bytes, Source.from_bytes(there.data(), "memory"))
    back = produce([stored], mapping, 0, inverse=True)
    assert back.data() == b"".join(
        produce([given], RowMapping(given_shape := ((2, 1, 6, 32),), given_shape), 0).chunks()
    )
    np.testing.assert_array_equal(values[5], back.values().reshape(12, 32)[0])
    np.testing.assert_array_equal(values[6], back.values().reshape(12, 32)[3])


@pytest.mark.parametrize("row", [0, 3])
def test_what_stands_where_zeros_should_is_not_lost(row: int) -> None:
    table = np.zeros((4, 8), np.float32)
    table[row, 3] = 1
    mapping = RowMapping(((2, 8),), ((4, 8),), lead=1, trail=1)
    with pytest.raises(RefusedError, match="1 of its padding rows are not zero"):
        made([source(table)], mapping, inverse=True)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8_0"])
def test_the_first_row_is_repeated_behind_the_others(dtype: str) -> None:
    rows = floats(3, 32)
    mapping = RowMapping(((3, 32),), ((5, 32),), trail=2, repeats=True)
    mapping.check("t")
    assert RowMapping.from_json(json.loads(json.dumps(mapping.to_json())), "t") == mapping
    given = source(rows, dtype)
    there = produce([given], mapping, 0)
    stored = produce([given], RowMapping(shape := ((3, 32),), shape), 0).data()
    first = stored[: len(stored) // 3]
    assert there.data() == stored + 2 * first
    for behind in (2 * first, bytes(2 * len(first))):  # llama.cpp's converter writes zeros
        whole = Tensor("g", dtype, (5, 32), 0, there.n_bytes, Source.from_bytes(stored + behind, "memory"))
        assert produce([whole], mapping, 0, inverse=True).data() == stored
    other = Source.from_bytes(stored + first + stored[len(first) : 2 * len(first)], "memory")
    with pytest.raises(RefusedError, match="2 of its padding rows are not copies of the first row"):
        produce([Tensor("g", dtype, (5, 32), 0, there.n_bytes, other)], mapping, 0, inverse=True).data()


def test_last_values_that_a_gguf_lacks_come_back_as_zeros() -> None:
    decay = floats(7)
    mapping = RowMapping(((7,),), ((4,),), value="plus_one", cut=3)
    mapping.check("t")
    assert RowMapping.from_json(json.loads(json.dumps(mapping.to_json())), "t") == mapping
    (there,) = made([source(decay)], mapping)
    np.testing.assert_array_equal(there, decay[:4] + 1)
    (back,) = made([source(there)], mapping, True)
    np.testing.assert_array_equal(back, np.concatenate([(decay[:4] + 1) - 1, np.zeros(3, np.float32)]))


def test_mxfp4_of_each_expert_is_stacked() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 256, (3, 4, 48), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 4, 3), dtype=np.uint8)
    whole = RowMapping(((3, 4, 3, 16), (3, 4, 3)), ((3, 4, 96),), pack="mxfp4")
    want = produce([stored(values, "U8", (3, 4, 3, 16)), stored(scales, "U8", (3, 4, 3))], whole, 0).data()
    each = RowMapping((*((4, 48),) * 3, *((4, 3),) * 3), ((3, 4, 96),), pack="mxfp4_e8m0")
    sources = [stored(v, "I8", (4, 48)) for v in values] + [stored(s, "F8_E8M0", (4, 3)) for s in scales]
    assert produce(sources, each, 0).data() == want
    rows = [stored(np.frombuffer(want, np.uint8), "MXFP4", (3, 4, 96))]
    back = [produce(rows, each, i, inverse=True) for i in range(6)]
    assert [b.dtype for b in back] == ["I8"] * 3 + ["F8_E8M0"] * 3
    assert [b.data() for b in back] == [part.tobytes() for part in (*values, *scales)]
    for wrong in (((4, 48), (4, 4)), ((4, 48),), ((4, 48), (4, 48), (4, 3))):
        with pytest.raises(RefusedError, match="are not MXFP4 values and scales"):
            produce(sources[: len(wrong)], RowMapping(wrong, ((4, 96),), pack="mxfp4"), 0)


def test_mxfp4_blocks_and_scales() -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (2, 6, 3), dtype=np.uint8)
    mapping = RowMapping((blocks.shape, scales.shape), ((2, 3, 96), (2, 3, 96)), (("deal", (6, 1, 1)),), pack="mxfp4")

    sources = [stored(blocks, "U8", blocks.shape), stored(scales, "U8", scales.shape)]
    packed = [produce(sources, mapping, i) for i in range(2)]
    assert [p.dtype for p in packed] == ["MXFP4", "MXFP4"]
    assert packed[0].n_bytes == DTYPES["MXFP4"].n_bytes((2, 3, 96))
    data = [np.frombuffer(b"".join(bytes(c) for c in p.chunks()), np.uint8) for p in packed]
    rows = [stored(d, "MXFP4", (2, 3, 96)) for d in data]
    back = [b"".join(bytes(c) for c in produce(rows, mapping, i, inverse=True).chunks()) for i in range(2)]
    assert back == [blocks.tobytes(), scales.tobytes()]
    assert data[0].reshape(6, 3, 17)[:, :, 0].tobytes() == scales.reshape(6, 2, 3)[:, 0].tobytes()


def test_mxfp4_rows_are_packed_as_they_are_read() -> None:
    """A tensor of gpt-oss takes a gigabyte: memory must not grow with it."""
    n_rows, per_row = 4096, 128
    reads: list[int] = []

    class Zeros:
        def __init__(self, shape: tuple[int, ...]) -> None:
            self.name, self.dtype, self.shape = "t", "U8", shape
            self.n_bytes = int(np.prod(shape))

        def read_into(self, offset: int, buffer: memoryview) -> None:
            reads.append(len(buffer))
            buffer[:] = bytes(len(buffer))

        def raw(self) -> memoryview:
            raise AssertionError("the whole tensor was asked for")

    sources: list[TensorSource] = [Zeros((n_rows, per_row, 16)), Zeros((n_rows, per_row))]
    mapping = RowMapping(((n_rows, per_row, 16), (n_rows, per_row)), ((n_rows, per_row * 32),), pack="mxfp4")
    produced = produce(sources, mapping, 0)
    assert sum(len(chunk) for chunk in produced.chunks()) == produced.n_bytes == n_rows * per_row * 17
    assert max(reads) <= 1 << 20


@pytest.mark.parametrize(
    "body",
    [
        {}, {"before": [], "after": []}, {"before": [[1, [4]]], "after": [[1, [5]]]},
        {"before": [[1, [4]]], "after": [[1, [4]]], "orders": [["swap", 3, 1, 1]]},
        {"before": [[1, [4]]], "after": [[1, [4]]], "orders": [["turn", 1]]},
        {"before": [[1, [4]]], "after": [[1, [4]]], "value": "times_two"},
        {"before": [[1, [4]]], "after": [[1, [4]]], "pack": "zip"},
        {"before": [[1 << 40, [4]]], "after": [[1, [4]]]}, {"before": [[1, [-4]]], "after": [[1, [-4]]]},
        {"before": [[1, [2, 3]]], "after": [[1, [3, 2]], [1, [0]]], "after_transposed": [True]},
    ],
)  # fmt: skip
def test_damaged_records_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises((RefusedError, ValueError, TypeError, KeyError)):
        RowMapping.from_json(body, "t")


def test_a_big_file_is_read_in_pieces(tmp_path: Path) -> None:
    """Rows of a tensor larger than a source, from a file, in an order that jumps."""
    x = floats(512, 1024)
    (tmp_path / "x").write_bytes(x.tobytes())
    with Source.open(tmp_path / "x") as source:
        tensor = Tensor("x", "F32", x.shape, 0, x.nbytes, source)
        mapping = RowMapping((x.shape,), ((256, 1024), (256, 1024)), (("deal", (2, 128, 128)),))
        produced = produce([tensor], mapping, 1)
        assert max(len(chunk) for chunk in produced.chunks()) <= 1 << 20
        np.testing.assert_array_equal(produced.values(), x.reshape(2, 256, 1024)[:, 128:].reshape(256, 1024))
