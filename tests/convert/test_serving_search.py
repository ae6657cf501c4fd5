"""Scales of 4-bit schemes chosen by a search: less error than round to nearest, where the importance matrix says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import find_case
from tiny_models import BYTES, build

import aprfmt
from aprfmt.codecs import affine
from aprfmt.codecs.error_feedback import FeedbackBlock, feedback_blocks
from aprfmt.codecs.serving import SERVING, Importance
from aprfmt.errors import CorruptError, RefusedError, UsageError
from aprfmt.formats.imatrix import ImatrixEntry, ImatrixSums, file_of
from aprfmt.formats.second_moments import CollectedMoments, moments_file
from aprfmt.inspection.diff import diff
from aprfmt.io.pipe import WriteOptions, write_file
from aprfmt.types import Array

SEARCHED = [name for name, scheme in SERVING.items() if scheme.is_searched]


def weight(dtype: str = "BF16") -> Array:
    """16 rows of 256 with a group of zeros, one value, a constant group and outliers."""
    values = (np.random.default_rng(1).standard_normal((16, 256)) * 0.05).astype("f4")
    values[3, 128:256] = 0
    values[4, 0:128] = 0.03
    values[5, 7] = 1.75
    values[6, :] *= 1e-6
    return affine.rounded(values, dtype)


def importance() -> Array:
    found = np.random.default_rng(2).random(256).astype("f4") ** 4
    found[64:96] = 0
    return found


def decoded(name: str, values: Array, parts: list[bytes]) -> Array:
    """The values that parts of BF16 weights stand for, by formulas of their own."""
    scheme = SERVING[name]
    codes = np.frombuffer(parts[0], "u1")
    fields = np.stack([codes & 15, codes >> 4], axis=1).reshape(values.shape[0], -1, scheme.group or values.shape[1])
    if scheme.kind == "int":
        scale = (np.frombuffer(parts[1], "<u2").astype("u4") << 16).view("f4").reshape(fields.shape[:2])
        zero = np.full(fields.shape[:2], 8)
        if not scheme.symmetric:
            words = np.frombuffer(parts[2], "<u4").reshape(-1, fields.shape[1])
            zero = np.stack([words >> 4 * i & 15 for i in range(8)], axis=1).reshape(-1, fields.shape[1])
        assert (scale > 0).all()
        return np.asarray((fields.astype("f4") - zero[..., None]) * scale[..., None]).reshape(values.shape)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "f4")
    stored = np.frombuffer(parts[1], "u1").reshape(fields.shape[:2]).astype("i4")
    if scheme.group == 32:
        scale = np.exp2(stored.astype("f4") - 127)
    else:
        exponent, mantissa = stored >> 3, stored & 7
        scale = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6) / 1536
    return np.asarray(table[fields] * scale[..., None]).reshape(values.shape)


def parts_of(name: str, values: Array, weights: Array | None, feedback: Sequence[FeedbackBlock] = ()) -> list[bytes]:
    guide = Importance(weights, feedback) if weights is not None else None
    return [bytes(part) for part in SERVING[name].encode(SERVING[name], values, "BF16", 1536.0, guide)]


@pytest.mark.parametrize("name", SEARCHED)
def test_the_weighted_error_falls_and_rows_do_not_depend_on_each_other(name: str) -> None:
    values, weights = weight(), importance()
    nearest, plain, searched = (parts_of(name, values, w) for w in (None, np.ones(256, "f4"), weights))
    assert [len(part) for part in searched] == [len(part) for part in nearest]

    def error(parts: list[bytes], w: Array) -> float:
        return float((w * (values - decoded(name, values, parts)) ** 2).sum())

    ones = np.ones(256, "f4")
    assert error(plain, ones) < 0.97 * error(nearest, ones)
    assert error(searched, weights) < 0.93 * error(nearest, weights)
    assert error(searched, weights) < error(plain, weights)
    assert not decoded(name, values, searched)[3, 128:].any()
    halves = [parts_of(name, piece, weights) for piece in (values[:8], values[8:])]
    assert [a + b for a, b in zip(*halves, strict=True)] == searched


@pytest.mark.parametrize("name", SEARCHED)
def test_feedback_lowers_the_error_of_outputs(name: str) -> None:
    values = weight()
    rng = np.random.default_rng(3)
    inputs = (rng.standard_normal((2000, 24)) @ rng.standard_normal((24, 256)) + rng.standard_normal((2000, 256))) * 3
    moments = (inputs.T @ inputs / 2000).astype("f4")
    blocks = feedback_blocks([moments[:192, :192], moments[192:, 192:]])
    weights = moments.diagonal() / moments.diagonal().mean()
    errors = {}
    for word, feedback in {"alone": [], "fed back": blocks}.items():
        parts = parts_of(name, values, weights, feedback)
        change = values.astype("f8") - decoded(name, values, parts)
        errors[word] = float(np.einsum("ij,jk,ik->", change, moments, change))
        halves = [parts_of(name, piece, weights, feedback) for piece in (values[:8], values[8:])]
        assert [a + b for a, b in zip(*halves, strict=True)] == parts
        assert not decoded(name, values, parts)[3, 128:].any() or feedback
    assert errors["fed back"] < 0.6 * errors["alone"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search") / "source"
    case = find_case("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    build(replace(case, config={**case.config, **sizes}, tokenizer=BYTES), folder, None, dtype="bfloat16")
    return folder


def matrix(path: Path, names: list[str], columns: int = 128) -> Path:
    sums = np.r_[np.full(8, 100.0), np.full(columns - 8, 0.01)].astype("f4")[None]
    entries = {name: ImatrixEntry(sums, np.ones(1, "f4")) for name in names}
    write_file(str(path), file_of(ImatrixSums(entries, ("text",), 1, 512), path.name), WriteOptions())
    return path


def column_error(a: Path, b: Path, name: str) -> Array:
    one, other = (np.asarray(aprfmt.open(path).tensors[name]) for path in (a, b))
    return np.asarray(((one.astype("f8") - other) ** 2).sum(axis=0))


def test_a_folder_is_searched_by_its_importance_matrix(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    imatrix = matrix(tmp_path / "m.gguf", ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"])
    made: dict[str, dict[str, Any]] = {
        "nearest": {},
        "search": {"search": True},
        "weighted": {"search": True, "imatrix": imatrix},
    }
    errors = {}
    for word, options in made.items():
        report = aprfmt.convert_model(source, tmp_path / word, format="hf", dtype="w4a16-g32", **options)
        aprfmt.convert_model(tmp_path / word, tmp_path / f"{word}.safetensors", dtype="f32")
        errors[word] = column_error(source / "model.safetensors", tmp_path / f"{word}.safetensors", name)
        assert any("no entry for" in warning for warning in report.warnings) == (word == "weighted")
    assert errors["search"].sum() < 0.97 * errors["nearest"].sum()
    assert errors["weighted"][:8].sum() < 0.6 * errors["search"][:8].sum()
    assert errors["weighted"][32:].sum() == pytest.approx(errors["search"][32:].sum(), rel=1e-3)
    rows = {
        row.name: row.distance for row in diff(tmp_path / "search", tmp_path / "weighted", values=True).tensors or ()
    }
    assert [n for n, found in rows.items() if found.n_different] == [name, name.replace("0", "1")]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a float": ({"dtype": "bf16", "search": True}, "schemes of 4 bits", "w4a16"),
    "8 bits": ({"dtype": "fp8-dynamic", "search": True}, "schemes of 4 bits", "nvfp4a16"),
    "a matrix without a search": ({"dtype": "w4a16-g32", "imatrix": "MATRIX"}, "only with --search", "add --search"),
    "a preset's option": ({"dtype": "w4a16-g32", "pure": True}, "--pure does not apply", "gguf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_with_what_to_type(case: str, source: Path, tmp_path: Path) -> None:
    options, what, hint = WRONG[case]
    if "imatrix" in options:
        options = {**options, "imatrix": matrix(tmp_path / "m.gguf", ["blk.0.ffn_up.weight"])}
    with pytest.raises(UsageError, match=what) as info:
        aprfmt.convert_model(source, tmp_path / "out", format="hf", **options)
    assert hint in (info.value.hint or "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("names", "columns"), [(["blk.0.other.weight"], 128), (["blk.0.ffn_up.weight"], 64)])
def test_a_matrix_of_another_model_is_refused(names: list[str], columns: int, source: Path, tmp_path: Path) -> None:
    imatrix = matrix(tmp_path / "m.gguf", names, columns)
    with pytest.raises(RefusedError, match="belongs to another model") as caught:
        aprfmt.convert_model(source, tmp_path / "out", format="hf", dtype="nvfp4a16", search=True, imatrix=imatrix)
    assert "apr imatrix MODEL" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def moments_of(path: Path, weights: Sequence[str], columns: int = 128, *, value: float = 1.0) -> Path:
    """Second moments of inputs whose columns are all the same but for some noise."""
    (path.parent / "0.0").write_bytes((np.full((columns, columns), value) + np.eye(columns)).astype("<f4").tobytes())
    entry = CollectedMoments(weights, [(str(path.parent / "0.0"), columns)], 1)
    write_file(str(path), moments_file([entry], ["text"], path.name), WriteOptions(force=True))
    return path


@pytest.mark.parametrize("format", ["hf", "gptq"])
def test_a_folder_is_rounded_with_feedback(format: str, source: Path, tmp_path: Path) -> None:
    weights = [f"blk.{i}.{name}.weight" for i in range(2) for name in ("ffn_up", "ffn_gate")]
    file = moments_of(tmp_path / "m.safetensors", weights)
    sums = {}
    options: dict[str, Any] = {"format": format, "dtype": "w4a16-g32", "search": True}
    for word, moments in {"alone": None, "fed back": file}.items():
        report = aprfmt.convert_model(source, tmp_path / word, **options, second_moments=moments)
        aprfmt.convert_model(tmp_path / word, tmp_path / f"{word}.safetensors", dtype="f32")
        assert [*report.warnings] == ([] if word == "alone" else report.warnings[:1])
        for name in ("mlp.gate_proj", "mlp.down_proj"):
            a, b = (
                np.asarray(aprfmt.open(path).tensors[f"model.layers.1.{name}.weight"]).astype("f8")
                for path in (source / "model.safetensors", tmp_path / f"{word}.safetensors")
            )
            sums[word, name] = float(((a - b).sum(axis=1) ** 2).sum())
    assert sums["fed back", "mlp.gate_proj"] < 0.2 * sums["alone", "mlp.gate_proj"]
    assert sums["fed back", "mlp.down_proj"] == sums["alone", "mlp.down_proj"]
    assert "the second moments have no entry for" in report.warnings[0]


@pytest.mark.parametrize(("names", "columns"), [(["blk.0.other.weight"], 128), (["blk.0.ffn_up.weight"], 64)])
def test_second_moments_of_another_model_are_refused(
    names: list[str], columns: int, source: Path, tmp_path: Path
) -> None:
    file = moments_of(tmp_path / "m.safetensors", names, columns)
    options: dict[str, Any] = {"format": "hf", "dtype": "nvfp4a16", "second_moments": file}
    with pytest.raises(UsageError, match="only with --search"):
        aprfmt.convert_model(source, tmp_path / "out", **options)
    with pytest.raises(RefusedError, match="belong to another model"):
        aprfmt.convert_model(source, tmp_path / "out", **options, search=True)
    assert not (tmp_path / "out").exists()


def test_damaged_second_moments_are_refused(source: Path, tmp_path: Path) -> None:
    names = ["blk.0.ffn_up.weight"]
    options: dict[str, Any] = {"format": "hf", "dtype": "w4a16-g32", "search": True}
    bad = moments_of(tmp_path / "m.safetensors", names, value=float("nan"))
    with pytest.raises(CorruptError, match="negative, NaN or infinite"):
        aprfmt.convert_model(source, tmp_path / "out", **options, second_moments=bad)
    with pytest.raises(CorruptError, match="not a file of second moments"):
        aprfmt.convert_model(source, tmp_path / "out", **options, second_moments=source / "model.safetensors")
    assert not (tmp_path / "out").exists()
