"""apr quantize --format mlx for a target: bits and groups by module, as mlx_lm reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from imatrix_files import old_imatrix

import aprfmt
from aprfmt.cli.main import run
from aprfmt.codecs.affine import Affine, parse_affine, quantize, round_trip
from aprfmt.errors import RefusedError, UsageError

BITS = 7.0
"""For a model in F32, whose groups have 64 bits of scale and bias."""


@pytest.fixture(scope="module")
def target(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, aprfmt.Report]:
    """A folder for BITS bits per weight, its recipe, and the report."""
    home = tmp_path_factory.mktemp("mlx")
    report = aprfmt.quantize_model(
        tiny_gguf, home / "m", format="mlx", target_bpw=BITS, recipe_out=home / "r.toml", report=home / "page.html"
    )
    return home / "m", home / "r.toml", report


def test_bits_are_kept_and_named_in_the_config(target: tuple[Path, Path, aprfmt.Report]) -> None:
    folder, _, report = target
    assert report.bits_per_weight is not None
    assert 0.97 * BITS < report.bits_per_weight <= BITS
    assert report.format == "mlx"
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    schemes = {(row["bits"], row["group_size"]) for row in settings.values() if isinstance(row, dict)}
    assert len(schemes) > 1
    with aprfmt.open(folder) as model:
        tensors = {name: tensor.shape for name, tensor in model.tensors.items()}
    for row in report.groups:
        assert row["layers"] or row["role"] in ("model.embed_tokens", "lm_head")
    assert len(tensors) > 10


def test_mlx_lm_computes_with_every_module(target: tuple[Path, Path, aprfmt.Report]) -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    mx = pytest.importorskip("mlx.core")
    folder, _, report = target
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    model = mlx_lm.utils.load_model(folder)[0]
    found = {name: (m.bits, m.group_size) for name, m in model.named_modules() if hasattr(m, "group_size")}
    default = settings["bits"], settings["group_size"]
    assert len(found) == sum(sum(row["dtypes"].values()) for row in report.groups)
    for name, scheme in found.items():
        row = settings.get(name)
        assert scheme == ((row["bits"], row["group_size"]) if row else default)
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])).astype(mx.float32))).all()


def test_a_recipe_gives_the_same_bytes(
    target: tuple[Path, Path, aprfmt.Report], tiny_gguf: Path, tmp_path: Path
) -> None:
    folder, recipe, _ = target
    aprfmt.quantize_model(tiny_gguf, tmp_path / "again", format="mlx", recipe=recipe)
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.raises(UsageError, match="types of an MLX folder"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", recipe=recipe)
    aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", "q4_0", recipe_out=tmp_path / "g.toml")
    with pytest.raises(UsageError, match="types of a GGUF"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "u", format="mlx", recipe=tmp_path / "g.toml")
    recipe.with_name("other.toml").write_text(recipe.read_text().replace("layers\\\\.0", "layers\\\\.7"))
    with pytest.raises(RefusedError, match="for another model"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "u", format="mlx", recipe=recipe.with_name("other.toml"))
    page = recipe.with_name("page.html").read_text()
    assert all(word in page for word in ("mixed_3_6", "4 bits", "model.embed_tokens.weight"))


def test_importance_decides_and_one_of_another_model_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    with aprfmt.open(tiny_gguf) as model:
        shapes = {t.name: t.shape for t in model.tensors.values() if t.name.startswith("blk.") and len(t.shape) > 1}
    good, bad, other = tmp_path / "m.dat", tmp_path / "bad.dat", tmp_path / "other.dat"
    good.write_bytes(old_imatrix({name: [1e-6 + (i < 2) for i in range(s[-1])] for name, s in shapes.items()}))
    bad.write_bytes(old_imatrix({name: [1.0] * (s[-1] + 32) for name, s in shapes.items()}))
    other.write_bytes(old_imatrix({"blk.0.ssm_in.weight": [1.0] * 64}))
    given = {"format": "mlx", "target_bpw": BITS, "plan": True}
    shares = [
        [row["error"] for row in aprfmt.quantize_model(tiny_gguf, tmp_path / "t", imatrix=matrix, **given).groups]  # type: ignore[arg-type]
        for matrix in (None, good)
    ]
    assert shares[0] != shares[1]
    for matrix in (bad, other):
        with pytest.raises(RefusedError, match="belongs to another model") as caught:
            aprfmt.quantize_model(tiny_gguf, tmp_path / "t", imatrix=matrix, **given)  # type: ignore[arg-type]
        assert f"apr imatrix {tiny_gguf} --data" in str(caught.value.hint)
    with pytest.raises(UsageError, match="does not change the codes"):
        aprfmt.convert_model(tiny_gguf, tmp_path / "t", format="mlx", bits=4, imatrix=good)


def test_a_size_is_kept_and_the_nearest_named(tiny_gguf: Path, tmp_path: Path) -> None:
    plan = aprfmt.quantize_model(tiny_gguf, tmp_path / "t", format="mlx", target_bpw=BITS, plan=True)
    report = aprfmt.quantize_model(tiny_gguf, tmp_path / "t", format="mlx", target_size=plan.output_bytes)
    written = sum(path.stat().st_size for path in (tmp_path / "t").iterdir())
    assert written == report.output_bytes <= plan.output_bytes
    with pytest.raises(RefusedError, match="cannot be reached: the smallest") as caught:
        aprfmt.quantize_model(tiny_gguf, tmp_path / "u", format="mlx", target_bpw=1.0)
    nearest = float((caught.value.hint or "").split()[1])
    aprfmt.quantize_model(tiny_gguf, tmp_path / "u", format="mlx", target_bpw=nearest, plan=True)


def test_types_of_the_user(tiny_gguf: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(tiny_gguf, tmp_path / "a", format="mlx", bits=4, tensor_type=["down_proj=8g32", "v_proj=6"])
    settings = json.loads((tmp_path / "a" / "config.json").read_text())["quantization"]
    assert settings["model.layers.0.mlp.down_proj"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert settings["model.layers.1.self_attn.v_proj"]["bits"] == 6
    assert (settings["bits"], settings["group_size"]) == (4, 64)
    assert (
        run(["quantize", str(tiny_gguf), "--format", "mlx", "--target-bpw", str(BITS), "-o", str(tmp_path / "b")]) == 0
    )
    assert (tmp_path / "b" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"mix": "q4_k_m"},
        {"target_bpw": BITS, "measure": True, "eval_data": "text.txt"},
        {"max_kl": 0.1, "eval_data": "text.txt"},
        {"target_bpw": BITS, "tensor_type": "v_proj=7"},
        {"target_bpw": BITS, "tensor_type": "v_proj=4g48"},
        {"target_bpw": BITS, "tensor_type": "(=4"},
        {"target_bpw": BITS, "tensor_type": "q4_0"},
    ],
)
def test_what_mlx_does_not_have(tiny_gguf: Path, tmp_path: Path, given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t", format="mlx", **given)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_round_trip_is_what_mlx_decodes() -> None:
    mx = pytest.importorskip("mlx.core")
    values = np.random.default_rng(0).standard_normal((8, 128)).astype("f4")
    for scheme in (Affine(3, 32), parse_affine("4"), parse_affine("6g128")):
        parts = mx.quantize(mx.array(values), group_size=scheme.group_size, bits=scheme.bits)
        theirs = np.array(mx.dequantize(*parts, group_size=scheme.group_size, bits=scheme.bits))
        assert np.array_equal(round_trip(values, scheme, "F32"), theirs)
        assert quantize(values.reshape(-1, scheme.group_size), scheme)[0].max() < 1 << scheme.bits
