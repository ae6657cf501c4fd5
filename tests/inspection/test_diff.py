"""Differences are found, and only they."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.inspection.diff import Difference, Distance, diff, same_files

Q = "model.layers.0.self_attn.q_proj.weight"


def distance(row: Difference) -> Distance:
    assert row.distance is not None
    return row.distance


def test_same(write: Callable[..., Path], arrays: Any) -> None:
    a, b = write(arrays, "a.apr"), write(arrays, "b.apr")
    assert diff(a, b).identical
    with aprfmt.open(a) as left, aprfmt.open(b) as right:
        assert same_files(left, right)


def test_one_value(write: Callable[..., Path], arrays: Any) -> None:
    a = write(arrays, "a.apr")
    arrays[Q][2, 3] += 0.5
    b = write(arrays, "b.apr")
    for values in (False, True):
        (row,) = diff(a, b, values=values).differences
        assert (row.kind, row.name, distance(row).n_different) == ("tensor", Q, 1)
        assert distance(row).max_diff == pytest.approx(0.5, rel=1e-6)
    assert diff(a, b, values=True, tolerance=0.6).identical
    assert not diff(a, b, values=True, tolerance=0.4).identical
    assert diff(a, b, metadata_only=True).identical


def test_nan_is_never_overlooked(write: Callable[..., Path], arrays: Any) -> None:
    a = write(arrays, "a.apr")
    arrays[Q][0, 0] = np.nan
    b, c = write(arrays, "b.apr"), write(arrays, "c.apr")
    (row,) = diff(a, b, values=True, tolerance=1e9).differences
    assert distance(row).n_different == 1
    assert distance(row).max_diff == np.inf
    assert diff(b, c, values=True).identical


def test_missing_shape_and_dtype(write: Callable[..., Path], arrays: Any) -> None:
    a = write(arrays, "a.apr")
    gone = dict(arrays)
    del gone[Q]
    (row,) = diff(a, write(gone, "b.apr")).differences
    assert (row.what, row.a, row.b) == ("missing", "F32 [8, 8]", None)
    reshaped = arrays | {Q: arrays[Q].reshape(16, 4)}
    (row,) = diff(a, write(reshaped, "c.apr"), values=True).differences
    assert row.what == "shape"
    halves = {name: array.astype("<f2").astype("<f4") for name, array in arrays.items()}
    d = write(halves, "d.apr")
    e = write({name: array.astype("<f2") for name, array in halves.items()}, "e.apr")
    assert {row.what for row in diff(d, e).differences} == {"dtype"}
    assert diff(d, e, values=True).identical


def test_metadata(write: Callable[..., Path], arrays: Any) -> None:
    a = write(arrays, "a.apr")
    tokens = [chr(97 + i) for i in range(9)]
    b = write(arrays, "b.apr", author="me", **{"tokenizer.vocabulary": [*tokens[:5], "X", *tokens[6:]]})
    rows = {row.name: row for row in diff(a, b, metadata_only=True).differences}
    assert set(rows) == {"author", "tokenizer.vocabulary"}
    assert (rows["author"].a, rows["author"].b) == (None, "me")
    assert rows["tokenizer.vocabulary"].first_difference == 5
    assert diff(a, b, values=True).identical


def test_null_is_not_absent(write: Callable[..., Path], arrays: Any) -> None:
    a, b = write(arrays, "a.apr", custom=False), write(arrays, "b.apr")
    assert [row.name for row in diff(a, b).differences] == ["custom"]


def test_across_containers(write: Callable[..., Path], arrays: Any, tmp_path: Path) -> None:
    from aprfmt.convert.api import export_model

    a, b = write(arrays, "a.apr"), tmp_path / "b.safetensors"
    export_model(a, b)
    found = diff(a, b, values=True)
    assert found.identical
    assert found.tensors_compared == len(arrays)
    assert "format" in {row.kind for row in diff(a, b).differences}


def test_unknown_architectures_are_compared_by_their_own_names(tmp_path: Path) -> None:
    one = np.ones(4, "<f4")
    for name, array in (("a.apr", one), ("b.apr", one * 2)):
        aprfmt.save_file({"w": array}, tmp_path / name, metadata={"model_type": "x"})
    assert diff(tmp_path / "a.apr", tmp_path / "a.apr").identical
    (row,) = diff(tmp_path / "a.apr", tmp_path / "b.apr").differences
    assert distance(row).n_different == 4


def test_other_files_of_folders(write: Callable[..., Path], arrays: Any, tmp_path: Path) -> None:
    packed = write(arrays, "a.apr", **{"tokenizer.vocabulary": None, "tokenizer.merges": None})
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        aprfmt.export_model(packed, folder, format="hf")
        (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
        (folder / "README.md").write_text("hello")
    (b / "generation_config.json").write_text('{"top_k": 3,\n "temperature": 0.5}')
    assert diff(a, b).identical
    (b / "generation_config.json").write_text('{"temperature": 0.7}')
    (b / "README.md").unlink()
    for metadata_only in (False, True):
        rows = diff(a, b, metadata_only=metadata_only).differences
        assert [(r.kind, r.name, r.b) for r in rows] == [
            ("metadata", "README.md", "absent"),
            ("metadata", "generation_config.json", "20 bytes"),
        ]
    assert diff(a, b, values=True).identical


def test_long_values_are_counted(write: Callable[..., Path], arrays: Any) -> None:
    nested = {"files": [{"name": f"file-{i}"} for i in range(99)]}
    found = diff(write(arrays, "a.apr"), write(arrays, "b.apr", extra=nested, more=[nested]))
    assert {r.name: r.b for r in found.differences} == {"extra": "{1 key}", "more": "[1 item]"}
