"""The GGUF writer: properties of the encoding, and what it refuses to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from natives import gguf_parts
from turns import examples

import aprfmt
from aprfmt.errors import AprError, UnsupportedError, UsageError
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import KV, ValueType, encode_kv, encode_value, layout
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, write_layout
from aprfmt.io.sink import AtomicFile
from aprfmt.limits import MAX_ARRAY_DEPTH

T = GgufType
Put = Callable[[bytes], Path]

_BITS = {T.UINT8: 8, T.INT8: -8, T.UINT16: 16, T.INT16: -16, T.UINT32: 32, T.INT32: -32, T.UINT64: 64, T.INT64: -64}


def _scalars(kind: GgufType) -> st.SearchStrategy[Any]:
    if kind in _BITS:
        bits = _BITS[kind]
        return st.integers(0, 2**bits - 1) if bits > 0 else st.integers(-(2 ** (-bits - 1)), 2 ** (-bits - 1) - 1)
    if kind is T.BOOL:
        return st.booleans()
    if kind is T.STRING:
        return st.text(max_size=12)
    return st.floats(width=32 if kind is T.FLOAT32 else 64)


SCALAR_TYPES = [kind for kind in T if kind is not T.ARRAY]


def _typed(depth: int) -> Any:
    """A type with the strategy of its values."""
    plain = st.sampled_from(SCALAR_TYPES).map(lambda kind: (kind, _scalars(kind)))
    if depth == 0:
        return plain
    arrays = _typed(depth - 1).map(lambda pair: ((T.ARRAY, pair[0]), st.lists(pair[1], max_size=4)))
    return st.one_of(plain, arrays)


@st.composite
def key_values(draw: st.DrawFn) -> list[KV]:
    keys = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6))
    pairs: list[KV] = []
    for key in keys:
        if key == "general.alignment":
            continue
        kind, values = draw(_typed(3))
        pairs.append((key, kind, draw(values)))
    return pairs


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kv=key_values())
def test_what_is_written_is_read(put: Put, kv: list[KV]) -> None:
    (head, *_rest) = layout(kv, [])
    with aprfmt.open(put(bytes(head.data))) as model:  # type: ignore[union-attr]
        assert list(model.metadata) == [key for key, _, _ in kv]
        for key, kind, value in kv:
            entry = model.metadata.entries[key]  # type: ignore[attr-defined]
            assert same(model.metadata[key], value)
            assert entry.type is (T.ARRAY if isinstance(kind, tuple) else kind)
            assert entry.count == (len(value) if isinstance(value, list) else None)
            assert bytes(model.metadata.raw(key)) == encode_kv(key, kind, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (T.UINT8, 256),
        (T.INT8, 128),
        (T.UINT32, -1),
        (T.INT64, 1 << 63),
        (T.UINT32, 1.5),
        (T.UINT32, "1"),
        (T.FLOAT32, 1e39),
        (T.FLOAT64, "x"),
        (T.STRING, 5),
        (T.STRING, "\ud800"),
        (T.ARRAY, [1]),
        ((T.ARRAY, T.UINT8), [1, 300]),
        ((T.ARRAY, T.STRING), ["a", None]),
        ((T.ARRAY, T.INT32), 7),
        ((T.ARRAY, (T.ARRAY, T.INT32)), [[1], [1 << 40]]),
    ],
)
def test_values_that_do_not_fit_are_refused(kind: ValueType, value: Any) -> None:
    with pytest.raises(UsageError):
        encode_value(kind, value)
    with pytest.raises(UsageError, match="'the key'"):
        encode_kv("the key", kind, value)


def test_deeper_arrays_than_the_reader_takes_are_refused() -> None:
    kind: ValueType = T.UINT8
    value: Any = 1
    for _ in range(MAX_ARRAY_DEPTH):
        kind, value = (T.ARRAY, kind), [value]
    encode_value(kind, value)
    with pytest.raises(UsageError, match="nested"):
        encode_value((T.ARRAY, kind), [value])


@pytest.mark.parametrize("key", ["", "k" * 65_536])
def test_keys_of_no_or_too_many_bytes_are_refused(key: str) -> None:
    with pytest.raises(UsageError, match="key"):
        encode_kv(key, T.BOOL, True)


def tensor(name: str = "t", dtype: str = "F32", shape: tuple[int, ...] = (4,), n_bytes: int = 16) -> OutTensor:
    return OutTensor(name, dtype, shape, n_bytes, lambda: [bytes(n_bytes)])


ALIGN_64 = encode_kv("general.alignment", T.UINT32, 64)


@pytest.mark.parametrize(
    ("kv", "tensors", "options", "kind"),
    [
        ([("a", T.BOOL, True)] * 2, [], {}, UsageError),
        ([], [tensor()] * 2, {}, UsageError),
        ([], [tensor(dtype="AprQ8")], {}, UnsupportedError),
        ([], [tensor(dtype="BOOL")], {}, UnsupportedError),
        ([], [tensor(shape=(1, 1, 1, 1, 4))], {}, UnsupportedError),
        ([], [tensor(n_bytes=12)], {}, UsageError),
        ([], [], {"alignment": 64}, UsageError),
        ([ALIGN_64], [], {}, UsageError),
        ([encode_kv("general.alignment", T.UINT32, 48)], [], {"alignment": 48}, UsageError),
        ([ALIGN_64[:-1]], [], {"alignment": 64}, UsageError),
        ([ALIGN_64 + b"\0"], [], {"alignment": 64}, UsageError),
        ([], [], {"version": 1}, UsageError),
    ],
)
def test_layouts_that_would_be_broken_are_refused(
    kv: list[KV | bytes], tensors: list[OutTensor], options: dict[str, int], kind: type[AprError]
) -> None:
    with pytest.raises(kind):
        layout(kv, tensors, **options)


def test_the_layout_is_written_through_the_pipe(tmp_path: Path) -> None:
    rows = np.arange(4096, dtype="<f4").reshape(16, 256)
    raw = rows.tobytes()
    parts = [raw[:1000], raw[1000:]]
    segments = layout([ALIGN_64], [OutTensor("w", "F32", (16, 256), len(raw), lambda: parts)], alignment=64)
    plan = FileLayout("x", segments)
    path = tmp_path / "x.gguf"
    with AtomicFile(path) as sink:
        write_layout(plan, sink)
    assert path.stat().st_size == plan.n_bytes
    with aprfmt.open(path) as model:
        assert model.tensors["w"].raw() == raw
        assert model.tensors["w"].offset % 64 == 0
        assert gguf_parts(model)[0].alignment == 64
