"""Importance matrices: both file forms, damaged ones, those of another model."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from imatrix_files import new_imatrix, old_imatrix, write_gguf
from turns import examples

from aprfmt.errors import AprError, CorruptError, LimitError, NotFoundError, TruncatedError
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.imatrix import read_imatrix

ENTRIES = {"blk.0.attn_q.weight": [1.5, 0.25, 3.0, 0.0], "blk.0.ffn_down.weight": [2.0, 4.0]}


def test_the_old_form_gives_sums_over_calls(tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(old_imatrix(ENTRIES, calls=3))
    found = read_imatrix(path)
    assert {name: values.tolist() for name, values in found.entries.items()} == ENTRIES
    assert (found.datasets, found.chunks, found.path) == (("text.txt",), 7, str(path))
    assert all(values.dtype == np.float32 for values in found.entries.values())


@pytest.mark.parametrize("calls", [0, -1])
def test_values_without_calls_stay_as_they_are(calls: int, tmp_path: Path) -> None:
    raw = struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii2f", calls, 2, 3.0, 5.0)
    (tmp_path / "m.dat").write_bytes(raw)
    found = read_imatrix(tmp_path / "m.dat")
    assert found.entries["x"].tolist() == [3.0, 5.0]
    assert (found.datasets, found.chunks) == ((), 0)


def test_the_division_is_that_of_float32(tmp_path: Path) -> None:
    values = np.array([0.1, 1 / 3, 1e-30, 7.7e17], dtype="<f4")
    raw = struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii", 7, 4) + values.tobytes()
    (tmp_path / "m.dat").write_bytes(raw)
    assert read_imatrix(tmp_path / "m.dat").entries["x"].tobytes() == (values / np.float32(7)).tobytes()


def test_the_new_form_gives_sums_over_the_counts_of_each_matrix(tmp_path: Path) -> None:
    entries = {"a": [2.0, 4.0, 9.0, 3.0, 5.0, 6.0], "b": [8.0, 2.0]}
    new_imatrix(tmp_path / "m.gguf", entries, {"a": [2.0, 3.0, 0.0], "b": [2.5]})
    found = read_imatrix(tmp_path / "m.gguf")
    # never used matrices weigh alike; 2.5 uses are rounded to 3
    assert found.entries["a"].tolist() == [1.0, 2.0, 3.0, 1.0, 1.0, 1.0]
    assert found.entries["b"].tolist() == [np.float32(8) / np.float32(3), np.float32(2) / np.float32(3)]
    assert (found.datasets, found.chunks) == (("text.txt",), 7)


Damage = Callable[[bytes], bytes]

DAMAGED: dict[str, tuple[Damage, type[AprError]]] = {
    "empty": (lambda raw: b"", TruncatedError),
    "no entries": (lambda raw: struct.pack("<i", 0), CorruptError),
    "negative count": (lambda raw: struct.pack("<i", -5) + raw[4:], CorruptError),
    "huge count": (lambda raw: struct.pack("<i", 0x7FFFFFFF) + raw[4:], TruncatedError),
    "one more entry": (lambda raw: struct.pack("<i", 3) + raw[4:], AprError),
    "negative name": (lambda raw: raw[:4] + struct.pack("<i", -1) + raw[8:], CorruptError),
    "long name": (lambda raw: raw[:4] + struct.pack("<i", 1 << 20) + raw[8:], LimitError),
    "it is empty": (lambda raw: raw[:31] + struct.pack("<i", 0) + raw[35:], CorruptError),
    "huge values": (lambda raw: raw[:31] + struct.pack("<i", 0x7FFFFFFF) + raw[35:], TruncatedError),
    "cut in the values": (lambda raw: raw[:40], TruncatedError),
    "cut in the data set": (lambda raw: raw[:-1], TruncatedError),
    "nan": (lambda raw: raw[:35] + struct.pack("<f", math.nan) + raw[39:], CorruptError),
    "infinity": (lambda raw: raw[:35] + struct.pack("<f", -math.inf) + raw[39:], CorruptError),
    "text": (lambda raw: b"this is not an importance matrix, just a line of text\n" * 9, CorruptError),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_old_file_is_refused(name: str, tmp_path: Path) -> None:
    damage, kind = DAMAGED[name]
    path = tmp_path / "m.dat"
    path.write_bytes(damage(old_imatrix(ENTRIES)))
    with pytest.raises(kind) as caught:
        read_imatrix(path)
    assert caught.value.path == str(path)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_damage_does_worse_than_an_error(data: st.DataObject, tmp_path: Path) -> None:
    raw = bytearray(old_imatrix(ENTRIES))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "m.dat").write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        found = read_imatrix(tmp_path / "m.dat")
    except AprError:
        return
    assert all(np.isfinite(values).all() for values in found.entries.values())


_GOOD = [
    ("imatrix.datasets", (GgufType.ARRAY, GgufType.STRING), ["t"]),
    ("imatrix.chunk_count", GgufType.UINT32, 1),
    ("imatrix.chunk_size", GgufType.UINT32, 1),
]
_SUMS, _ONE = ("F32", (1, 2), struct.pack("<2f", 1, 2)), ("F32", (1, 1), struct.pack("<f", 1))


@pytest.mark.parametrize(
    ("keys", "tensors"),
    [
        ([], {"a.in_sum2": _SUMS, "a.counts": _ONE}),
        (_GOOD[:2], {"a.in_sum2": _SUMS, "a.counts": _ONE}),
        ([("imatrix.datasets", GgufType.UINT32, 1), *_GOOD[1:]], {"a.in_sum2": _SUMS, "a.counts": _ONE}),
        ([_GOOD[0], ("imatrix.chunk_count", GgufType.STRING, "x"), _GOOD[2]], {"a.in_sum2": _SUMS, "a.counts": _ONE}),
        (_GOOD, {}),
        (_GOOD, {"token_embd.weight": _SUMS}),
        (_GOOD, {"a.in_sum2": _SUMS}),
        (_GOOD, {"a.counts": _ONE}),
        (_GOOD, {"a.in_sum2": ("F16", (1, 2), bytes(4)), "a.counts": _ONE}),
        (_GOOD, {"a.in_sum2": _SUMS, "a.counts": ("F32", (3, 1), bytes(12))}),
        (_GOOD, {"a.in_sum2": _SUMS, "a.counts": ("F32", (0, 1), b"")}),
        (_GOOD, {"a.in_sum2": ("F32", (1, 0), b""), "a.counts": _ONE}),
        (_GOOD, {"a.in_sum2": _SUMS, "a.counts": ("F32", (1, 1), struct.pack("<f", math.nan))}),
        (_GOOD, {"a.in_sum2": ("F32", (1, 2), struct.pack("<2f", 1, math.inf)), "a.counts": _ONE}),
    ],
)
def test_a_wrong_new_file_is_refused(
    keys: list[tuple[str, GgufType, object]], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, keys, tensors)
    with pytest.raises(CorruptError) as caught:
        read_imatrix(path)
    assert caught.value.path == str(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CorruptError):
        read_imatrix(path)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_imatrix(tmp_path / "none.dat")
