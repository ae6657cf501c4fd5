"""MLX folders: those that mlx_lm writes, in and out; ours beside them; and GGUFs that hold the same codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import arch_models
import mlx_folders
import mlx_peer
import numpy as np
import pytest
from llama_peer import LlamaPeer
from mlx_folders import files, tensors
from safetensors.torch import load_file, save_file

import aprfmt
from aprfmt.arch.mlx_networks import NETWORKS
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError, RefusedError, UsageError

IDS = [3, 17, 5, 99, 41, 7, 250, 11]

CONVERTED = {
    "llama": ("llama", "float16", 4, 32, None),
    "qwen3": ("qwen3", "bfloat16", 8, 64, None),
    "gemma3": ("gemma3_text", "bfloat16", 4, 32, None),
    "experts": ("qwen3_moe", "float32", 4, 32, None),  # mlx stacks no experts of other dtypes on a CPU
    "recipe": ("qwen2", "float32", 4, 32, "mixed_3_6"),
}
"""Row, dtype, bits, group size and recipe of the folders that mlx_lm.convert writes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source `NAME` of each of CONVERTED, mlx_lm's `NAME-mlx`, our `NAME-ours`, and their logits."""
    work = tmp_path_factory.mktemp("mlx")
    tokenizers = arch_models.write_tokenizers(work / "tokenizers", ["smollm2", "gemma3", "qwen3"], limit=600)
    jobs: list[tuple[object, ...]] = []
    for name, (row, dtype, bits, group_size, recipe) in CONVERTED.items():
        source, ours, theirs = work / name, work / f"{name}-ours", work / f"{name}-mlx"
        mlx_folders.build(row, source, tokenizers, dtype)
        asked: dict[str, Any] = {"recipe": recipe} if recipe else {"bits": bits}
        aprfmt.export_model(source, ours, format="mlx", group_size=group_size, **asked)
        jobs.append(("convert", str(source), str(theirs), bits, group_size, recipe))
        jobs += [("logits", str(folder), IDS, f"{folder}.npy") for folder in (theirs, ours)]
    mlx_peer.run(*jobs)
    return work


@pytest.mark.parametrize("name", CONVERTED)
def test_a_folder_of_mlx_comes_back_file_by_file(name: str, made: Path, tmp_path: Path) -> None:
    source, apr, back = made / f"{name}-mlx", tmp_path / "m.apr", tmp_path / "back"
    report = aprfmt.import_model(source, apr)
    assert report.lossless
    assert aprfmt.export_model(apr, back, format="mlx").proven
    assert files(back) == files(source)
    aprfmt.export_model(apr, tmp_path / "hf", format="hf")
    assert files(tmp_path / "hf") == files(source)


@pytest.mark.parametrize("name", CONVERTED)
def test_our_folder_has_the_tensors_and_the_config_of_mlx_lm(name: str, made: Path) -> None:
    theirs, ours = made / f"{name}-mlx", made / f"{name}-ours"
    assert tensors(ours) == tensors(theirs)
    for file in ("config.json", "model.safetensors.index.json"):
        assert json.loads((ours / file).read_bytes()) == json.loads((theirs / file).read_bytes())
        if name != "recipe":  # which names the modules in the order of the network's code
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()


@pytest.mark.parametrize("name", CONVERTED)
def test_our_folder_gives_the_logits_of_mlx_lms(name: str, made: Path) -> None:
    theirs, ours = np.load(f"{made / name}-mlx.npy"), np.load(f"{made / name}-ours.npy")
    assert theirs.shape[0] == len(IDS)
    assert np.isfinite(theirs).all()
    assert np.array_equal(theirs, ours)


@pytest.mark.llama
@pytest.mark.parametrize("name", CONVERTED)
def test_a_folder_of_mlx_becomes_a_gguf_that_computes_the_same(
    name: str, made: Path, tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    gguf = tmp_path / "m.gguf"
    aprfmt.export_model(made / f"{name}-mlx", gguf)
    theirs, ours = np.load(f"{made / name}-mlx.npy"), llama_cpp.logits(gguf, IDS)
    # Activations are of the model's dtype on their side, float32 on the other.
    tolerance = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.15}[CONVERTED[name][1]]
    assert arch_models.relative_error(ours, theirs) < tolerance


@pytest.mark.parametrize("name", CONVERTED)
def test_a_folder_of_mlx_validates(name: str, made: Path, tmp_path: Path) -> None:
    aprfmt.import_model(made / f"{name}-mlx", tmp_path / "m.apr")
    for path in (made / f"{name}-mlx", tmp_path / "m.apr"):
        checks = {check.id: check.status for check in aprfmt.validate(path).checks}
        assert checks["names.complete"] == checks["shapes.match"] == "pass"


def test_codes_whose_scales_f16_holds_become_blocks_of_a_gguf(made: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    report = aprfmt.export_model(made / "llama-mlx", gguf)
    assert report.dtypes["Q4_1"]["tensors"] == 16
    assert report.losses == []
    back = tmp_path / "back"
    assert aprfmt.export_model(gguf, back, format="mlx").losses == []
    own = tensors(made / "llama-mlx")
    assert tensors(back).keys() == own.keys()
    for name, tensor in tensors(back).items():  # norms are F32 in a GGUF
        assert tensor == own[name] or name.endswith("norm.weight")
    values = aprfmt.export_model(made / "qwen3-mlx", tmp_path / "q.gguf")  # 8 bits with biases of their own
    assert [loss.partition(" ")[2] for loss in values.losses] == ["tensors decoded from MLX affine"]


@pytest.mark.parametrize("name", ["experts", "gemma3"])
def test_a_folder_of_mlx_becomes_one_of_transformers(name: str, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    aprfmt.export_model(made / f"{name}-mlx", out, format="hf", dtype="f32")
    source, decoded = load_file(made / name / "model.safetensors"), load_file(out / "model.safetensors")
    assert decoded.keys() == source.keys()
    assert not any("quantization" in key for key in json.loads((out / "config.json").read_text()))
    for key, tensor in source.items():
        assert decoded[key].shape == tensor.shape
        assert (decoded[key] - tensor.float()).abs().max() <= 0.2 * tensor.float().abs().max()


@pytest.mark.turns
@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocks_of_a_gguf_go_to_mlx_and_back(dtype: str, smollm2_short: Path, tmp_path: Path) -> None:
    source = smollm2_short
    if dtype != "q4_1":
        source = tmp_path / "source.gguf"
        aprfmt.quantize_model(smollm2_short, source, dtype, pure=True, allow_requantize=True)
    folder, back = tmp_path / "folder", tmp_path / "back.gguf"
    assert aprfmt.export_model(source, folder, format="mlx").losses == []
    assert aprfmt.export_model(folder, back).losses == []
    with aprfmt.open(source) as a, aprfmt.open(back) as b:
        assert set(a.tensors) == set(b.tensors)
        for name, tensor in a.tensors.items():
            assert (tensor.dtype, tensor.shape) == (b.tensors[name].dtype, b.tensors[name].shape)
            assert bytes(tensor.raw()) == bytes(b.tensors[name].raw())


def test_blocks_that_are_no_affine_groups_are_said_to_be_rounded(made: Path, tmp_path: Path) -> None:
    gguf, out = tmp_path / "m.gguf", tmp_path / "out"
    aprfmt.export_model(made / "llama", gguf, dtype="q4_1", pure=True)
    report = aprfmt.export_model(gguf, out, format="mlx", bits=8, group_size=32)
    assert report.losses == ["16 tensors rounded from Q4_1 to MLX's 8 bits in groups of 32"]


def test_packed_weights_are_counted_as_what_they_stand_for(made: Path, tmp_path: Path) -> None:
    source = made / next(iter(CONVERTED))
    report = aprfmt.convert_model(source, tmp_path / "m", format="mlx", bits=4, plan=True)
    assert report.param_count == aprfmt.inspect(source).param_count
    assert report.bits_per_weight is not None
    assert 4 < report.bits_per_weight < 16


@pytest.mark.parametrize("name", list(CONVERTED))
def test_every_form_of_a_model_has_as_many_parameters(name: str, made: Path, tmp_path: Path) -> None:
    wanted = aprfmt.inspect(made / name).param_count
    assert aprfmt.inspect(made / f"{name}-mlx").param_count == wanted
    report = aprfmt.import_model(made / f"{name}-mlx", tmp_path / "m.apr")
    assert report.param_count == wanted
    found = aprfmt.inspect(tmp_path / "m.apr")
    assert (found.param_count, found.metadata["param_count"]) == (wanted, wanted)


def test_an_apr_of_an_mlx_folder_is_quantized_anew(made: Path, tmp_path: Path) -> None:
    aprfmt.import_model(made / "qwen3-mlx", tmp_path / "m.apr")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", format="mlx", bits=4, group_size=64)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
    assert any("4 bits" in loss for loss in report.losses)


def test_rope_parameters_reach_mlx_lm_under_the_keys_that_it_reads(tmp_path: Path) -> None:
    tokenizers = arch_models.write_tokenizers(tmp_path / "tokenizers", ["smollm2"], limit=600)
    case = arch_models.find_case("llama/llama3")
    source, ours = tmp_path / "source", tmp_path / "ours"
    arch_models.build(case, source, tokenizers)
    assert "rope_theta" not in json.loads((source / "config.json").read_text())
    aprfmt.export_model(source, ours, format="mlx", bits=8, group_size=32)
    mlx_peer.run(("logits", str(ours), IDS, str(tmp_path / "logits.npy")))
    aprfmt.export_model(ours, tmp_path / "decoded", format="hf", dtype="f32")
    expected = arch_models.transformers_logits(tmp_path / "decoded", IDS)
    assert arch_models.relative_error(np.load(tmp_path / "logits.npy"), expected) < 1e-4


# --- what is refused ---


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of mlx_lm's llama, to be damaged."""
    return Path(shutil.copytree(made / "llama-mlx", tmp_path / "damaged"))


def edit(folder: Path, **settings: object) -> None:
    """Other settings in config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("quantization", "quantization_config"):
        config[key] |= settings
    path.write_text(json.dumps(config))


def refused(folder: Path, tmp_path: Path, words: str, kind: type[AprError] = RefusedError) -> AprError:
    with pytest.raises(kind, match=words) as caught:
        aprfmt.export_model(folder, tmp_path / "out.gguf")
    with pytest.raises(kind, match=words):
        aprfmt.import_model(folder, tmp_path / "out.apr")
    assert not (tmp_path / "out.gguf").exists()
    assert not (tmp_path / "out.apr").exists()
    return caught.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 7}, "7-bit affine quantization"),
        ({"bits": 8}, "do not match scales"),
        ({"group_size": 48}, "groups of 48"),
        ({"group_size": 64}, "do not match scales"),
        ({"mode": "mxfp9"}, "mode 'mxfp9'"),
        ({"mode": "mxfp4"}, "has biases"),
        ({"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}}, "do not match scales"),
        ({"model.layers.7.mlp.up_proj": {"bits": 4, "group_size": 32}}, "model.layers.7.mlp.up_proj.scales is missing"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_weights(
    settings: dict[str, object], words: str, folder: Path, tmp_path: Path
) -> None:
    edit(folder, **settings)
    assert refused(folder, tmp_path, words).tensor is not None


@pytest.mark.parametrize(
    ("part", "words"), [("scales", "scales is missing"), ("biases", "biases is missing"), ("weight", "incomplete")]
)
def test_a_part_that_is_missing(part: str, words: str, folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[f"model.layers.1.mlp.up_proj.{part}"]
    save_file(weights, path)
    (folder / "model.safetensors.index.json").unlink()
    assert "model.layers.1.mlp.up_proj" in str(refused(folder, tmp_path, words).tensor)


@pytest.mark.parametrize(
    ("asked", "words", "kind"),
    [
        ({"bits": 7}, "7-bit affine quantization", UsageError),
        ({"bits": 4, "group_size": 16}, "groups of 16", UsageError),
        ({"bits": 4, "group_size": 128}, "no weight has rows that groups of 128 divide", RefusedError),
        ({"recipe": "mixed_1_2"}, "unknown recipe", UsageError),
        ({"recipe": "mixed_3_4", "bits": 4}, "are mutually exclusive", UsageError),
        ({"bits": 4, "dtype": "aprq4"}, "computes in f32", UsageError),
    ],
    ids=str,
)
def test_what_mlx_does_not_have(
    asked: dict[str, Any], words: str, kind: type[AprError], made: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        aprfmt.export_model(made / "llama", tmp_path / "out", format="mlx", **asked)
    assert not (tmp_path / "out").exists()


def test_weights_that_groups_do_not_divide_stay_as_mlx_lm_leaves_them(made: Path, tmp_path: Path) -> None:
    report = aprfmt.export_model(made / "llama", tmp_path / "out", format="mlx", bits=4, group_size=64)
    assert any("down_proj.weight" in warning for warning in report.warnings)
    assert "model.layers.0.mlp.down_proj.scales" not in tensors(tmp_path / "out")


def test_a_network_whose_names_are_not_known(tmp_path: Path) -> None:
    tokenizers = arch_models.write_tokenizers(tmp_path / "tokenizers", ["smollm2"], limit=600)
    arch_models.build(arch_models.find_case("bert"), tmp_path / "bert", tokenizers | {"bert": tokenizers["smollm2"]})
    with pytest.raises(RefusedError, match="its tensor names in mlx_lm are unknown"):
        aprfmt.export_model(tmp_path / "bert", tmp_path / "out", format="mlx", bits=4)


def test_every_network_is_a_row_of_the_table() -> None:
    assert NETWORKS.keys() <= ARCHITECTURES.keys()
