"""Adapters between PEFT, GGUF, MLX and `.apr`: what PEFT saves, and what llama.cpp's script makes of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_models import FAMILIES, files, values, write_adapter, write_base
from converter_peer import ADAPTERS, CONVERTER, ConverterPeer

import aprfmt
from aprfmt.errors import AprError

pytestmark = pytest.mark.skipif(
    not (CONVERTER / ADAPTERS).exists(), reason="tools/fetch_material.py llama.cpp-converter"
)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The base and the adapter folder of a llama."""
    folder = tmp_path_factory.mktemp("llama_adapter")
    model = write_base("llama", folder / "base")
    write_adapter(model, folder / "lora", FAMILIES["llama"], folder / "base")
    return folder / "base", folder / "lora"


def edited(source: Path, folder: Path, **config: Any) -> Path:
    """A copy of an adapter's folder with another config."""
    shutil.copytree(source, folder)
    body = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**body, **config}))
    return folder


def same_values(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert sorted(a) == sorted(b)
    for name, array in a.items():
        assert array.shape == b[name].shape, name
        assert (array == b[name]).all(), name


@pytest.mark.turns
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_gguf_has_the_tensors_of_llama_cpps_script_and_every_form_comes_back(family: str, tmp_path: Path) -> None:
    base, lora = tmp_path / "base", tmp_path / "lora"
    write_adapter(write_base(family, base), lora, FAMILIES[family], base)
    report = aprfmt.convert_model(lora, tmp_path / "ours.gguf")
    assert report.losses == []
    if family != "falcon":  # whose fused rows the script cannot divide
        ConverterPeer().convert_adapter(lora, base, tmp_path / "theirs.gguf")
        same_values(values(tmp_path / "ours.gguf"), values(tmp_path / "theirs.gguf"))
    # PEFT -> GGUF -> PEFT and PEFT -> MLX -> PEFT: the same tensors and the same config.
    aprfmt.convert_model(tmp_path / "ours.gguf", tmp_path / "back", format="hf", base=base)
    assert files(tmp_path / "back") == {name: data for name, data in files(lora).items() if name != "README.md"} | {
        WEIGHTS: files(tmp_path / "back")[WEIGHTS]
    }
    same_values(values(tmp_path / "back" / WEIGHTS), values(lora / WEIGHTS))
    aprfmt.convert_model(lora, tmp_path / "mlx", format="mlx")
    aprfmt.convert_model(tmp_path / "mlx", tmp_path / "from_mlx", format="hf", base=base)
    same_values(values(tmp_path / "from_mlx" / WEIGHTS), values(lora / WEIGHTS))
    aprfmt.convert_model(tmp_path / "mlx", tmp_path / "from_mlx.gguf", base=base)
    same_values(values(tmp_path / "from_mlx.gguf"), values(tmp_path / "ours.gguf"))
    # Through an .apr each is the same file again.
    for source, form in ((lora, "hf"), (tmp_path / "mlx", "mlx")):
        assert aprfmt.import_model(source, tmp_path / f"{form}.apr", base=base).lossless
        aprfmt.convert_model(tmp_path / f"{form}.apr", tmp_path / f"{form}.out", format=form)
        assert files(tmp_path / f"{form}.out") == files(source)
    assert aprfmt.import_model(tmp_path / "ours.gguf", tmp_path / "gguf.apr", base=base).lossless
    aprfmt.convert_model(tmp_path / "gguf.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "ours.gguf").read_bytes()
    # An .apr that was made with the base tells it.
    aprfmt.convert_model(tmp_path / "hf.apr", tmp_path / "third.gguf")
    same_values(values(tmp_path / "third.gguf"), values(tmp_path / "ours.gguf"))


def test_an_apr_has_hugging_face_names_rank_and_alpha(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = llama
    aprfmt.convert_model(lora, tmp_path / "lora.gguf", base=base)
    for source in (lora, tmp_path / "lora.gguf"):
        aprfmt.import_model(source, tmp_path / "x.apr", base=base, force=True)
        with aprfmt.open(tmp_path / "x.apr") as model:
            assert (model.metadata["lora_rank"], model.metadata["lora_alpha"]) == (4, 8.0)
            name = "model.layers.0.self_attn.q_proj.weight"
            assert model.tensors[f"{name}.lora_a"].shape == (4, 64)
            assert model.tensors[f"{name}.lora_b"].shape == (64, 4)
        assert aprfmt.diff(tmp_path / "x.apr", lora, values=True).identical


def test_a_gguf_adapter_without_its_base_keeps_what_depends_on_it(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = llama
    ConverterPeer().convert_adapter(lora, base, tmp_path / "lora.gguf")
    assert aprfmt.validate(tmp_path / "lora.gguf").passed
    assert aprfmt.import_model(tmp_path / "lora.gguf", tmp_path / "x.apr").lossless
    aprfmt.convert_model(tmp_path / "x.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "lora.gguf").read_bytes()
    with pytest.raises(AprError, match="base model was not found") as refused:
        aprfmt.convert_model(tmp_path / "lora.gguf", tmp_path / "folder", format="hf")
    assert "--base" in (refused.value.hint or "")
    aprfmt.convert_model(tmp_path / "x.apr", tmp_path / "folder", format="hf", base=base)
    same_values(values(tmp_path / "folder" / WEIGHTS), values(lora / WEIGHTS))


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({"use_rslora": True}, 8 / 2), ({"lora_alpha": 3}, 3 / 4), ({"alpha_pattern": {"q_proj": 32}}, 8 / 4)],
)
def test_scales_reach_the_gguf(llama: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    base, lora = llama
    folder = edited(lora, tmp_path / "lora", **changes)
    aprfmt.convert_model(folder, tmp_path / "x.gguf", base=base)
    before, after = values(lora / WEIGHTS), values(tmp_path / "x.gguf")
    with aprfmt.open(tmp_path / "x.gguf") as model:
        alpha = model.metadata["adapter.lora.alpha"]
    for own, gguf in (("mlp.down_proj", "ffn_down"), ("self_attn.q_proj", "attn_q")):
        a, b = (after[f"blk.0.{gguf}.weight.lora_{which}"] for which in "ab")
        stem = f"base_model.model.model.layers.0.{own}.lora_"
        wanted = scale * (4 if gguf == "attn_q" and "alpha_pattern" in changes else 1)
        product = before[f"{stem}B.weight"] @ before[f"{stem}A.weight"] * wanted
        if gguf == "attn_q":  # llama.cpp's order of rows
            product = product.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
        np.testing.assert_allclose(b @ a * (alpha / b.shape[1]), product, rtol=1e-5, atol=1e-7)
    aprfmt.convert_model(tmp_path / "x.gguf", tmp_path / "back", format="hf", base=base)
    assert aprfmt.diff(folder, tmp_path / "back", values=True).identical


def test_ranks_by_pattern_come_back(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = llama
    model = write_base("llama", tmp_path / "base")
    options: dict[str, Any] = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"v_proj": 5}}
    write_adapter(model, tmp_path / "lora", FAMILIES["llama"], base, **options)
    assert aprfmt.validate(tmp_path / "lora").passed
    # A GGUF has one alpha for all, and 5 / 8 cannot be multiplied into float32 without rounding.
    for form, losses, tolerance in (("gguf", ["the scales of 2 weights"], 1e-7), ("apr", [], 0.0)):
        report = aprfmt.convert_model(tmp_path / "lora", tmp_path / f"x.{form}")
        assert [loss[:23] for loss in report.losses] == losses
        aprfmt.convert_model(tmp_path / f"x.{form}", tmp_path / form, format="hf", base=base)
        assert aprfmt.diff(tmp_path / "lora", tmp_path / form, values=True, tolerance=tolerance).identical, form
    aprfmt.convert_model(tmp_path / "lora", tmp_path / "mlx", format="mlx")
    assert json.loads((tmp_path / "mlx" / CONFIG).read_text())["lora_parameters"]["rank"] == 4


OTHERS = [
    ({"peft_type": "LOHA"}, "LoHa"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"peft_type": "PREFIX_TUNING"}, "prefix tuning"),
    ({"peft_type": "SOMETHING_NEW"}, "SOMETHING_NEW"),
    ({"use_dora": True}, "DoRA"),
    ({"init_lora_weights": "pissa"}, "pissa"),
    ({"trainable_token_indices": [1]}, "trainable tokens"),
    ({"lora_alpha": math.nan}, "lora_alpha"),
    ({"lora_alpha": None}, "lora_alpha"),
    ({"r": 0}, "not a valid rank"),
    ({"r": 8}, "rank mismatch"),
    ({"rank_pattern": {"q_proj": 2}}, "rank mismatch"),
    ({"rank_pattern": {"(a+)+": 2}}, "an invalid regular expression"),
    ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern"),
]


@pytest.mark.parametrize(("changes", "what"), OTHERS)
def test_what_is_no_plain_lora_is_refused_by_name(
    llama: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    folder = edited(llama[1], tmp_path / "lora", **changes)
    for output in ("x.apr", "x.gguf"):
        with pytest.raises(AprError, match=what):
            aprfmt.convert_model(folder, tmp_path / output, base=llama[0])
        assert not (tmp_path / output).exists()
    checks = {check.id: check for check in aprfmt.validate(folder).checks}
    assert checks["adapter.pairs"].status == "fail"
    assert what in checks["adapter.pairs"].message


def rewritten(source: Path, folder: Path, change: Any) -> Path:
    """A copy of an adapter's folder with other tensors."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _drop(tensors: dict[str, Any]) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def _twice(tensors: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_A.default.weight"] = tensors[f"{Q}.lora_A.weight"]


def _ranks(tensors: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_B.weight"] = np.zeros((64, 3), np.float32)


def _wide(tensors: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_A.weight"] = np.zeros((4, 65), np.float32)


def _magnitude(tensors: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_magnitude_vector"] = np.ones(64, np.float32)


def _layer(tensors: dict[str, Any]) -> None:
    for which in "AB":
        tensors[f"{Q}.lora_{which}.weight".replace("layers.0", "layers.7")] = tensors[f"{Q}.lora_{which}.weight"]


def _unknown(tensors: dict[str, Any]) -> None:
    for which in "AB":
        tensors[f"{Q}.lora_{which}.weight".replace("q_proj", "z_proj")] = tensors.pop(f"{Q}.lora_{which}.weight")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_drop, "lora_b of the weight is missing"),
        (_twice, "two pairs of LoRA factors"),
        (_ranks, "rank mismatch"),
        (_wide, "a different base model"),
        (_magnitude, "DoRA"),
        (_layer, "changes layer 7"),
        (_unknown, "do not have"),
    ],
)
def test_tensors_that_make_no_adapter_of_the_base_are_refused(
    llama: tuple[Path, Path], tmp_path: Path, change: Any, what: str
) -> None:
    folder = rewritten(llama[1], tmp_path / "lora", change)
    with pytest.raises(AprError, match=what) as refused:
        aprfmt.convert_model(folder, tmp_path / "x.gguf", base=llama[0])
    assert refused.value.tensor is not None
    assert not (tmp_path / "x.gguf").exists()


def test_a_kind_that_is_not_understood_is_carried_on_request(llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder = edited(llama[1], tmp_path / "lora", use_dora=True)
    aprfmt.import_model(folder, tmp_path / "x.apr", allow_unmapped=True)
    aprfmt.convert_model(tmp_path / "x.apr", tmp_path / "back", format="hf", allow_unmapped=True)
    assert files(tmp_path / "back") == files(folder)
    info = aprfmt.inspect(folder).adapter
    assert info is not None
    assert "DoRA" in info.kind


def test_the_base_must_be_one_of_an_adapter(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = llama
    with pytest.raises(AprError, match="the input is not an adapter"):
        aprfmt.convert_model(base, tmp_path / "x.gguf", base=base)
    with pytest.raises(AprError, match="this is an adapter"):
        aprfmt.convert_model(lora, tmp_path / "x.gguf", base=lora)


def test_inspect_tells_what_an_adapter_changes(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = llama
    aprfmt.convert_model(lora, tmp_path / "x.gguf")
    aprfmt.convert_model(lora, tmp_path / "mlx", format="mlx")
    for path, label in ((lora, "PEFT adapter"), (tmp_path / "mlx", "MLX adapter"), (tmp_path / "x.gguf", "GGUF v3")):
        found = aprfmt.inspect(path)
        assert found.format == label
        assert found.adapter is not None
        assert (found.adapter.rank, found.adapter.alpha, list(found.adapter.scales)) == (4, 8.0, [2.0])
        assert (found.adapter.weights, found.adapter.base) == (14, str(base))
    assert aprfmt.inspect(base).adapter is None


def test_an_adapter_in_a_pickle_is_one_too(llama: tuple[Path, Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    base, lora = llama
    (tmp_path / "lora").mkdir()
    shutil.copy(lora / CONFIG, tmp_path / "lora" / CONFIG)
    torch.save(load_file(lora / WEIGHTS), tmp_path / "lora" / "adapter_model.bin")
    assert aprfmt.inspect(tmp_path / "lora").format == "PEFT adapter"
    aprfmt.convert_model(tmp_path / "lora", tmp_path / "x.gguf")
    aprfmt.convert_model(lora, tmp_path / "y.gguf")
    same_values(values(tmp_path / "x.gguf"), values(tmp_path / "y.gguf"))
    assert aprfmt.import_model(tmp_path / "lora", tmp_path / "x.apr", base=base).lossless
    aprfmt.convert_model(tmp_path / "x.apr", tmp_path / "back", format="hf")
    assert files(tmp_path / "back") == files(tmp_path / "lora")
