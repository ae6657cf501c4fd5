"""Differences are found, and only they."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Page

import aprfmt
from aprfmt.inspection.comparison import ModelDifference
from aprfmt.inspection.diff import diff, same_files
from aprfmt.inspection.distance import Distance

Q = "model.layers.0.self_attn.q_proj.weight"


def distance(row: ModelDifference) -> Distance:
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


# --- figures ---

K = "model.layers.0.self_attn.k_proj.weight"


def by_formula(a: Any, b: Any) -> tuple[float, float, float]:
    """Relative RMSE, SNR in dB and cosine in float64, from their definitions."""
    x, y = a.astype("f8").ravel(), b.astype("f8").ravel()
    relative = float(np.linalg.norm(x - y) / np.linalg.norm(x))
    return relative, -20 * float(np.log10(relative)), float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def test_figures_of_every_tensor_and_of_all_together(write: Callable[..., Path], arrays: Any) -> None:
    a = write(arrays, "a.apr")
    changed = dict(arrays)
    rng = np.random.default_rng(5)
    for name, size in ((Q, 0.3), (K, 0.01)):
        changed[name] = arrays[name] + rng.normal(scale=size, size=arrays[name].shape).astype("<f4")
    found = diff(a, write(changed, "b.apr"), values=True)
    assert found.tensors is not None
    assert [row.name for row in found.tensors[:2]] == [Q, K]
    assert {row.name for row in found.tensors} == set(arrays)
    assert {row.name for row in found.differences} == {Q, K}
    for row in found.tensors:
        far = row.distance
        relative, snr, cosine = (
            by_formula(arrays[row.name], changed[row.name]) if row.name in (Q, K) else (0.0, None, 1.0)
        )
        assert far.relative_rmse == pytest.approx(relative, rel=1e-9)
        assert far.snr_db == (None if snr is None else pytest.approx(snr, rel=1e-9))
        assert far.cosine == pytest.approx(cosine, rel=1e-12)
        assert (row.bits_a, row.bits_b, far.nonfinite_a) == (32, 32, 0)
    total = found.total
    assert total is not None
    both = [np.concatenate([values[name].ravel() for name in arrays]) for values in (arrays, changed)]
    relative, snr, cosine = by_formula(*both)
    assert total.distance.relative_rmse == pytest.approx(relative, rel=1e-9)
    assert total.distance.snr_db == pytest.approx(snr, rel=1e-9)
    assert total.distance.cosine == pytest.approx(cosine, rel=1e-12)
    assert total.distance.rmse == pytest.approx(float(np.sqrt(np.mean((both[0].astype("f8") - both[1]) ** 2))))
    assert (total.n_tensors, total.size_a, total.bits_b) == (len(arrays), 4 * both[0].size, 32)


def test_a_nan_ranks_first_and_hides_nothing_of_the_rest(write: Callable[..., Path], arrays: Any) -> None:
    a = write(arrays, "a.apr")
    changed = {name: array.copy() for name, array in arrays.items()}
    changed[Q] += 5.0
    changed[K][0, 0] = np.nan
    changed[K][1, 1] += 0.25
    found = diff(a, write(changed, "b.apr"), values=True, tolerance=0.5)
    assert found.tensors is not None
    assert [row.name for row in found.tensors[:2]] == [K, Q]
    far = found.tensors[0].distance
    assert (far.nonfinite_a, far.nonfinite_b, far.nonfinite_different, far.n_different) == (0, 1, 1, 1)
    assert far.rmse == far.max_diff == np.inf
    kept = np.isfinite(changed[K])
    aa = float(np.sum(arrays[K][kept].astype("f8") ** 2))
    assert far.relative_rmse == pytest.approx(0.25 / np.sqrt(aa), rel=1e-6)
    assert {row.name for row in found.differences} == {Q, K}
    body = found.to_json()
    assert isinstance(body["tensors"], list)


def test_zeros_and_infinities_have_figures(tmp_path: Path) -> None:
    def of(*values: Any) -> Distance:
        for name, array in zip("ab", values, strict=True):
            aprfmt.save_file(
                {"w": np.asarray(array)}, tmp_path / f"{name}.apr", metadata={"model_type": "x"}, force=True
            )
        found = diff(tmp_path / "a.apr", tmp_path / "b.apr", values=True)
        assert found.tensors is not None
        return found.tensors[0].distance

    zeros, ones = np.zeros(3, "f4"), np.ones(3, "f4")
    far = of(zeros, ones)
    assert (far.relative_rmse, far.snr_db, far.cosine, far.n_different) == (None, None, None, 3)
    far = of(ones, zeros)
    assert (far.relative_rmse, far.snr_db, far.cosine) == (1.0, 0.0, None)
    far = of(ones, -ones)
    assert (far.relative_rmse, far.cosine) == (2.0, -1.0)
    far = of(np.array([np.inf, np.nan, 1], "f4"), np.array([np.inf, np.nan, 2], "f4"))
    assert (far.nonfinite_a, far.nonfinite_different, far.n_different, far.max_diff) == (2, 0, 1, 1.0)
    far = of(np.array([np.inf, 1, 1], "f4"), np.array([-np.inf, 1, 1], "f4"))
    assert (far.nonfinite_different, far.n_different, far.max_diff) == (1, 1, np.inf)
    far = of(np.array([1 << 60, 5]), np.array([(1 << 60) + 1, 5]))
    assert far.n_different == 1, "two integers that are one float64"
    far = of(np.array([1e200, 1.0]), np.array([1e200, 2.0]))
    assert (far.n_different, far.max_diff, far.relative_rmse) == (1, 1.0, None)
    far = of(np.array([1 + 1j], "c8"), np.array([1 + 2j], "c8"))
    assert (far.n_different, far.max_diff) == (1, 1.0)


@pytest.mark.parametrize("threads", [1, 7])
def test_any_number_of_threads_gives_the_same_figures(write: Callable[..., Path], arrays: Any, threads: int) -> None:
    a = write(arrays, "a.apr")
    b = write({name: array * 1.01 for name, array in arrays.items()}, "b.apr")
    assert diff(a, b, values=True, threads=threads) == diff(a, b, values=True)


def test_a_tensor_that_cannot_be_read_ends_the_comparison(
    write: Callable[..., Path], arrays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.errors import StorageError
    from aprfmt.inspection import diff as module

    a, b = write(arrays, "a.apr"), write({name: array * 2 for name, array in arrays.items()}, "b.apr")

    def fail(*words: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(module, "measure", fail)
    with pytest.raises(StorageError, match="the disk is gone"):
        diff(a, b, values=True)


def test_a_page(write: Callable[..., Path], arrays: Any, tmp_path: Path) -> None:
    a = write(arrays, "a.apr")
    changed = {name: array + np.float32(0.01) for name, array in arrays.items()}
    changed[K][0, 0] = np.nan
    b = write(changed, "b.apr")
    target = tmp_path / "page.html"
    diff(a, b, values=True, output=target)
    page = Page(target.read_text())
    assert "SNR of B, in dB" in page.titles
    assert {"layer", "SNR of B, dB"} <= set(page.words), "the axes have names and units"
    assert page.charts["self_attn.q_proj.weight"]["s"][0]["x"] == [0]
    assert page.words.count(Q) == 1
    assert "In 1 place only one model has NaN or infinity" in page.text
    assert any("sortable" in (row.get("class") or "").split() for row in page.tags["table"])
    with pytest.raises(aprfmt.AprError, match="exists"):
        diff(a, b, values=True, output=target)
    own = b.with_name("b.html")
    own.write_bytes(b.read_bytes())
    with pytest.raises(aprfmt.AprError, match="is the input"):
        diff(a, own, values=True, output=own, force=True)
    with pytest.raises(aprfmt.AprError, match="is the input"):
        diff(a, b, values=True, base=own, output=own, force=True)
    diff(b, b, values=True, output=target, force=True)
    assert "the values are the same" in target.read_text()
    for values, output in ((False, target), (True, tmp_path / "page.png")):
        with pytest.raises(aprfmt.AprError) as caught:
            diff(b, b, values=values, output=output)
        assert caught.value.code == "usage"


def test_packed_weights_are_compared_by_what_they_stand_for(tiny_gguf: Path, tmp_path: Path) -> None:
    made = tiny_gguf
    aprfmt.convert_model(made, tmp_path / "eight", format="mlx", bits=8, group_size=32)
    found = diff(made, tmp_path / "eight", values=True)
    assert {row.what for row in found.differences} == {"values"}
    assert found.tensors is not None
    assert found.total is not None
    row = next(row for row in found.tensors if row.name == Q)
    assert (row.b, row.bits_b) == ("MLX affine", 10.0)  # scales and biases are F32 as the weights were
    assert found.total.distance.rmse < 0.01
    assert found.total.bits_b == pytest.approx(8 * found.total.size_b / aprfmt.inspect(made).param_count)
    assert "shape" in {row.what for row in diff(made, tmp_path / "eight").differences}
