"""Towers that are not there, not whole, or another model's: each is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arch_models import CACHE, build, find_case, write_tokenizers
from safetensors.numpy import load_file, save_file
from tower_models import TowerCase, all_tower_cases, build_tower
from tower_steps import tokenizer_folder

import aprfmt
from aprfmt.errors import AprError, RefusedError, UsageError

CASES = {case.id: case for case in all_tower_cases()}
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tower."""
    return _build(CASES["gemma3_vision"], tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one."""
    return _build(CASES["qwen2_vl_vision"], tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that hears in codes, whose encoder lies in a subfolder."""
    return _build(CASES["mimo_v2_towers"], tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that sees by convolutions."""
    return _build(CASES["gemma3n_towers"], tmp_path_factory.mktemp("gemma3n"))


def _build(case: TowerCase, work: Path) -> Path:
    pytest.importorskip("transformers")
    if not CACHE.is_dir():
        pytest.skip("needs a real tokenizer")
    build_tower(case, work / "folder", tokenizer_folder(work))
    return work / "folder"


def _config(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def _tensors(folder: Path, keep: Callable[[str], bool]) -> None:
    path = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if keep(name)}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("case_id", "lacks"),
    [
        ("cohere2/aya_vision", "a SwiGLU projector behind a pixel shuffle"),
        ("gemma/paligemma", "a single linear layer"),
        ("llama/llava_next", "image_newline at the end of each row of tiles"),
        ("qwen2/llava_onevision", "image_newline at the end of each row of tiles"),
        ("llama/vip_llava", "the norm of its projector's input"),
        ("qwen2/got_ocr2", "a SAM tower by itself"),
        ("lfm3/vl", "gated convolutions over the patches"),
        ("qwen3/moss_transcribe", "the norm of its projector's output"),
    ],
)
def test_towers_of_which_mtmd_lacks_a_part_say_which(case_id: str, lacks: str, tmp_path: Path) -> None:
    case = find_case(case_id)
    build(case, tmp_path / "m", write_tokenizers(tmp_path / "tok", [case.tokenizer], 512))
    with pytest.raises(
        RefusedError, match=f"the towers of {case.model_class} are not supported: .*mtmd lacks .*{lacks}"
    ):
        aprfmt.export_model(tmp_path / "m", tmp_path / "mmproj.gguf", mmproj=True)
    assert not (tmp_path / "mmproj.gguf").exists()


@pytest.mark.parametrize(
    ("edit", "message", "hint"),
    [
        (
            lambda f: _config(f, lambda config: config.pop("vision_config")),
            "config.json lacks vision_config",
            "whole model",
        ),
        (
            lambda f: _tensors(f, lambda name: name.startswith("language_model.")),
            "has no tower tensors",
            "import the whole folder",
        ),
        (
            lambda f: _tensors(f, lambda name: "layers.1.mlp.fc1.weight" not in name or "vision" not in name),
            "1 tensors of the gemma3_vision network are missing: .*layers.1.mlp.fc1.weight",
            "all its shards",
        ),
        (
            lambda f: _config(
                f,
                lambda config: config.update(
                    vision_config={**json.loads(json.dumps(config["vision_config"])), "hidden_size": 40}
                ),
            ),
            r"its shape is \[32",
            "another model",
        ),
        (
            lambda f: _config(f, lambda config: config.update(architectures=["Nobody"], model_type="nobody")),
            "the towers of Nobody are not supported",
            "docs/towers.md",
        ),
    ],
    ids=["config", "tensors", "layer", "size", "class"],
)
def test_towers_that_are_not_whole(gemma: Path, tmp_path: Path, edit: Edit, message: str, hint: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(gemma, folder)
    edit(folder)
    with pytest.raises(AprError, match=message) as caught:
        aprfmt.export_model(folder, tmp_path / "mmproj.gguf", mmproj=True)
    assert hint in str(caught.value.hint)
    assert not (tmp_path / "mmproj.gguf").exists()


def test_what_a_missing_preprocessor_file_would_say_is_told(gemma: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gemma, tmp_path / "folder"))
    assert aprfmt.export_model(folder, tmp_path / "a.gguf", mmproj=True, plan=True).warnings == []
    (folder / "preprocessor_config.json").unlink()
    told = aprfmt.export_model(folder, tmp_path / "a.gguf", mmproj=True, plan=True).warnings
    assert [line for line in told if "image_mean, image_std" in line]


def test_a_language_model_alone_has_none(gemma: Path, tmp_path: Path) -> None:
    aprfmt.export_model(gemma, tmp_path / "text.gguf")
    with pytest.raises(RefusedError, match="has no towers") as caught:
        aprfmt.export_model(tmp_path / "text.gguf", tmp_path / "mmproj.gguf", mmproj=True)
    assert "leave out --mmproj" in str(caught.value.hint)


def test_towers_of_another_model(gemma: Path, qwen: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(gemma, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "multi_modal_projector.mm_input_projection_weight"
    aprfmt.export_model(gemma, tmp_path / "mmproj.gguf", mmproj=True)
    data = (tmp_path / "mmproj.gguf").read_bytes()
    key = b"clip.vision.projection_dim" + (4).to_bytes(4, "little")
    at = data.index(key) + len(key)
    assert tensors[name].shape[1] == int.from_bytes(data[at : at + 4], "little") == 64
    (tmp_path / "other.gguf").write_bytes(data[:at] + (96).to_bytes(4, "little") + data[at + 4 :])
    aprfmt.export_model(qwen, tmp_path / "text.gguf")
    with pytest.raises(RefusedError, match="outputs 96 values, but the language model's embedding has 64"):
        aprfmt.import_model(tmp_path / "text.gguf", tmp_path / "one.apr", mmproj=tmp_path / "other.gguf")
    assert not (tmp_path / "one.apr").exists()


def test_towers_of_another_family_are_named(gemma: Path, qwen: Path, tmp_path: Path) -> None:
    """The widths agree, and nothing else tells: somebody may have trained the two together."""
    for folder, name in ((gemma, "gemma"), (qwen, "qwen")):
        aprfmt.export_model(folder, tmp_path / f"{name}.gguf")
        aprfmt.export_model(folder, tmp_path / f"{name}-mmproj.gguf", mmproj=True)
    own = aprfmt.import_model(tmp_path / "qwen.gguf", tmp_path / "own.apr", mmproj=tmp_path / "qwen-mmproj.gguf")
    assert not any("mmproj" in warning for warning in own.warnings)
    report = aprfmt.import_model(tmp_path / "qwen.gguf", tmp_path / "one.apr", mmproj=tmp_path / "gemma-mmproj.gguf")
    (warning,) = [warning for warning in report.warnings if "mmproj" in warning]
    assert (
        "are from Gemma3ForConditionalGeneration, trained with a gemma3 language model, but this one is qwen2vl"
        in warning
    )


def test_what_is_no_gguf_of_towers(gemma: Path, qwen: Path, tmp_path: Path) -> None:
    aprfmt.export_model(gemma, tmp_path / "text.gguf")
    aprfmt.export_model(gemma, tmp_path / "mmproj.gguf", mmproj=True)
    one = tmp_path / "one.apr"
    with pytest.raises(RefusedError, match="--mmproj needs a GGUF of towers"):
        aprfmt.import_model(tmp_path / "text.gguf", one, mmproj=tmp_path / "text.gguf")
    with pytest.raises(RefusedError, match="the model already has towers"):
        aprfmt.import_model(gemma, one, mmproj=tmp_path / "mmproj.gguf")
    with pytest.raises(RefusedError, match="contains towers and projectors, not a language model"):
        aprfmt.import_model(tmp_path / "mmproj.gguf", one, mmproj=tmp_path / "mmproj.gguf")
    data = (tmp_path / "mmproj.gguf").read_bytes()
    assert data.count(b"gemma3") == 1
    (tmp_path / "odd.gguf").write_bytes(data.replace(b"gemma3", b"gemma9"))
    with pytest.raises(RefusedError, match="the projector 'gemma9' are not supported"):
        aprfmt.import_model(tmp_path / "text.gguf", one, mmproj=tmp_path / "odd.gguf")
    assert not one.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mmproj": True, "dtype": "q4_k_m"}, "towers are written as floats"),
        ({"mmproj": True, "verify": True}, "--mmproj cannot be combined with"),
        ({"mmproj": True, "shard_size": "1GB"}, "--mmproj cannot be combined with"),
        ({"mmproj": "x.gguf"}, "--mmproj takes a file when writing an .apr"),
    ],
)
def test_options_that_towers_do_not_go_with(
    gemma: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        aprfmt.export_model(gemma, tmp_path / "mmproj.gguf", **options)  # type: ignore[arg-type]


def test_the_commands(gemma: Path, tmp_path: Path) -> None:
    def apr(*words: object) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "aprfmt", *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    plan = json.loads(apr("export", gemma, "-o", tmp_path / "m.gguf", "--mmproj", "--plan", "--json"))
    assert plan["plan"]
    assert {tensor["name"].partition(".")[0] for tensor in plan["tensors"]} == {"v", "mm"}
    assert not (tmp_path / "m.gguf").exists()
    apr("export", gemma, "-o", tmp_path / "m.gguf", "--mmproj", "--dtype", "bf16")
    text = json.loads(apr("export", gemma, "-o", tmp_path / "t.gguf", "--json"))
    assert any("vision tower" in loss for loss in text["losses"])
    assert f"write the towers to a separate GGUF: apr export {gemma} -o mmproj.gguf --mmproj" in text["losses"]
    apr("import", tmp_path / "t.gguf", "--mmproj", tmp_path / "m.gguf", "-o", tmp_path / "one.apr")
    shown = json.loads(apr("inspect", tmp_path / "m.gguf", "--json"))
    assert shown["towers"] == {
        "row": "gemma3_vision",
        "projectors": ["gemma3"],
        "sees": True,
        "hears": False,
        "width": 64,
        "classes": ["Gemma3ForConditionalGeneration"],
    }
    assert "for images, projector gemma3, 64 values per position" in apr("inspect", tmp_path / "m.gguf")
    rules = {rule["id"]: rule for rule in json.loads(apr("validate", tmp_path / "m.gguf", "--json"))["checks"]}
    assert rules["names.complete"]["status"] == "pass"


def test_a_gguf_of_towers_that_lacks_a_tensor_is_not_valid(gemma: Path, tmp_path: Path) -> None:
    import gguf

    aprfmt.export_model(gemma, tmp_path / "m.gguf", mmproj=True)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "cut.gguf", "clip")
    for key in ("projector_type", "vision.projection_dim", "vision.block_count", "vision.embedding_length"):
        field = reader.fields[f"clip.{key}"]
        value = field.contents()
        if isinstance(value, str):
            writer.add_string(f"clip.{key}", value)
        else:
            writer.add_uint32(f"clip.{key}", int(value))
    for tensor in reader.tensors:
        if tensor.name != "v.post_ln.weight":
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {check.id: check for check in aprfmt.validate(tmp_path / "cut.gguf").checks}
    assert found["names.complete"].status == "fail"
    assert "post_layernorm.weight" in found["names.complete"].message


def test_quantized_towers_are_kept(gemma: Path, tmp_path: Path) -> None:
    """As llama-quantize writes them: into an `.apr` and out again as they are, and decoded into a folder."""
    import gguf

    aprfmt.export_model(gemma, tmp_path / "text.gguf")
    aprfmt.export_model(gemma, tmp_path / "m.gguf", mmproj=True)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "clip")
    for name, field in reader.fields.items():
        if name.startswith("clip.") and len(field.types) > 1:
            writer.add_array(name, field.contents())
        elif name.startswith("clip."):
            writer.add_key_value(name, field.contents(), field.types[0])
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name.endswith("attn_q.weight"):
            writer.add_tensor(tensor.name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    aprfmt.import_model(tmp_path / "text.gguf", tmp_path / "one.apr", mmproj=tmp_path / "q.gguf")
    aprfmt.export_model(tmp_path / "one.apr", tmp_path / "again.gguf", mmproj=True)
    report = aprfmt.export_model(tmp_path / "one.apr", tmp_path / "back", format="hf")
    assert "3 tensors rounded from Q8_0 to F16" in report.losses
    with aprfmt.open(tmp_path / "q.gguf") as a, aprfmt.open(tmp_path / "again.gguf") as b:
        assert {name: (t.dtype, bytes(t.raw())) for name, t in a.tensors.items()} == {
            name: (t.dtype, bytes(t.raw())) for name, t in b.tensors.items()
        }
        wanted = a.tensors["v.blk.0.attn_q.weight"].numpy().astype(np.float16)
    with aprfmt.open(tmp_path / "back") as folder:
        found = folder.tensors["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"]
        assert found.dtype == "F16"
        assert np.array_equal(found.numpy().astype(np.float16), wanted)


@pytest.mark.parametrize(("part", "key"), [("projector_config", "hidden_size"), ("encoder_config", "dim_head")])
def test_widths_that_llama_cpp_takes_for_one_are_one(tmp_path: Path, part: str, key: str) -> None:
    """Its loader would not see another, and its network die of it."""
    case = CASES["granite_speech_tower"]
    inner = case.config[part]
    folder = _build(replace(case, config={**case.config, part: {**inner, key: 2 * inner[key]}}), tmp_path)
    with pytest.raises(AprError, match=f"{part}.*{key}"):
        aprfmt.export_model(folder, tmp_path / "towers.gguf", mmproj=True)
    assert not (tmp_path / "towers.gguf").exists()


def test_what_llama_cpp_takes_for_granted_of_a_codec_must_hold(tmp_path: Path) -> None:
    """No key tells it, so another network would speak nonsense."""
    case = CASES["qwen3_tts_codec"]
    ((name, told),) = case.files.items()
    other = {**told, "decoder_config": {**told["decoder_config"], "sliding_window": 64}}
    folder = _build(replace(case, files={name: other}), tmp_path)
    with pytest.raises(AprError, match="sliding_window is 64"):
        aprfmt.export_model(folder, tmp_path / "towers.gguf", mmproj=True)
    (folder / name).unlink()
    with pytest.raises(RefusedError, match=r"speech_tokenizer/config\.json is missing"):
        aprfmt.export_model(folder, tmp_path / "towers.gguf", mmproj=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("encoder_skip_layer_id", 2, "encoder_skip_layer_id is 2"),
        ("encoder_causal", False, "encoder_causal is False"),
        ("hybrid_attention", False, "hybrid_attention is False"),
        ("encoder_attn_window_size", [8, 8], r"encoder_attn_window_size is \[8, 8\].*left context only"),
        ("encoder_attn_window_size", [-1, 0], r"encoder_attn_window_size is \[-1, 0\]"),
        ("codebook_size", [24, 16, 12], "8 entries, but config.json says 12"),
        ("codebook_size", "24", "codebook_size is '24'"),
        ("num_quantizers", 2, "audio_channels is 3, but audio_tokenizer/config.json has 2 codebooks"),
    ],
)
def test_what_llama_cpp_takes_for_granted_of_codes_of_sounds_must_hold(
    mimo: Path, tmp_path: Path, name: str, value: object, message: str
) -> None:
    """Its network is of one kind, and its loader sees no other."""
    shutil.copytree(mimo, tmp_path / "folder")
    path = tmp_path / "folder/audio_tokenizer/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(AprError, match=message):
        aprfmt.export_model(tmp_path / "folder", tmp_path / "towers.gguf", mmproj=True)
    assert not (tmp_path / "towers.gguf").exists()


def test_a_folder_of_two_ggufs_has_the_encoder_of_sounds_in_its_subfolder(mimo: Path, tmp_path: Path) -> None:
    """Where the network looks for it, with its own config.json."""
    aprfmt.export_model(mimo, tmp_path / "text.gguf", no_tokenizer=True)
    aprfmt.export_model(mimo, tmp_path / "towers.gguf", mmproj=True)
    aprfmt.import_model(tmp_path / "text.gguf", tmp_path / "one.apr", mmproj=tmp_path / "towers.gguf")
    aprfmt.export_model(tmp_path / "one.apr", tmp_path / "back", format="hf")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "audio_tokenizer" not in config
    told, source = (json.loads((at / "audio_tokenizer/config.json").read_text()) for at in (tmp_path / "back", mimo))
    assert {key: source[key] for key in told if key in source} == {key: told[key] for key in told if key in source}
    assert {"swa_per_block", "hybrid_attention", "encoder_attn_window_size", "codebook_size"} <= told.keys()
    inside = load_file(tmp_path / "back/audio_tokenizer/model.safetensors")
    original = load_file(mimo / "audio_tokenizer/model.safetensors")
    names = {name for name in original if name.startswith("encoder.") and "_codebook." not in name}
    assert names
    assert names <= inside.keys()
    assert all(np.array_equal(inside[name], original[name]) for name in names)
    assert not any(name.startswith("audio_tokenizer.") for name in load_file(tmp_path / "back/model.safetensors"))


def test_codebooks_that_are_not_all_there_are_refused(mimo: Path, tmp_path: Path) -> None:
    """The quantizer subtracts one after the other."""
    shutil.copytree(mimo, tmp_path / "folder")
    path = tmp_path / "folder/audio_tokenizer/model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.quantizer.vq.layers.1._codebook.embed"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(AprError, match=r"layers\.1\._codebook\.embed"):
        aprfmt.export_model(tmp_path / "folder", tmp_path / "towers.gguf", mmproj=True)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda folder: _tensors(folder, lambda name: "blocks.2.9.attn.key.down_conv" not in name), "down_conv"),
        (lambda folder: _tensors(folder, lambda name: "blocks.3.38." not in name), r"blocks\.3\.38"),
        (
            lambda folder: _config(
                folder,
                lambda config: config.update(
                    vision_config={"architecture": "resnet50", "hidden_size": 32, "vocab_size": 8}
                ),
            ),
            "architecture is 'resnet50'",
        ),
        (
            lambda folder: (folder / "preprocessor_config.json").write_text('{"image_seq_length": 250}'),
            "image_seq_length is 250",
        ),
    ],
    ids=["a part of a block", "a block", "another network", "tokens that do not divide"],
)
def test_blocks_of_a_convolutional_tower_are_those_of_its_network(
    gemma3n: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    """Each of the 84 has a kind of its own."""
    shutil.copytree(gemma3n, tmp_path / "folder")
    edit(tmp_path / "folder")
    with pytest.raises(AprError, match=message):
        aprfmt.export_model(tmp_path / "folder", tmp_path / "towers.gguf", mmproj=True)


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("vision_config", {"image_size": [56, 28]}, r"image_size is \[56, 28\]; llama.cpp supports squares only"),
        ("vision_config", {"norm_type": "rms_norm"}, "norm_type is rms_norm: .*45 layers of 3200"),
        ("vision_config", {"use_mean_pooling": False}, "use_mean_pooling is False"),
        ("", {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ("", {"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'"),
    ],
)
def test_what_llama_cpp_takes_for_granted_of_internvl_must_hold(
    tmp_path: Path, part: str, changed: dict[str, object], message: str
) -> None:
    """No key of a GGUF tells it."""
    case = CASES["internvl_vision"]
    inner = {**case.config[part], **changed} if part else {}
    folder = _build(case, tmp_path)
    _config(folder, lambda config: config.update({part: {**config[part], **inner}} if part else changed))  # type: ignore[dict-item]
    with pytest.raises(AprError, match=message):
        aprfmt.export_model(folder, tmp_path / "towers.gguf", mmproj=True)
    assert not (tmp_path / "towers.gguf").exists()


def test_janus_and_deepseek_vl_are_told_apart(tmp_path: Path) -> None:
    """Their GGUFs have one projector; the converter writes only those of Janus."""
    for name in ("deepseek_vl_vision", "janus_vision"):
        (tmp_path / name).mkdir()
        aprfmt.export_model(_build(CASES[name], tmp_path / name), tmp_path / f"{name}.gguf", mmproj=True)
        towers = aprfmt.inspect(tmp_path / f"{name}.gguf").towers
        assert towers is not None
        assert towers.row == name


def test_depthwise_kernels_are_halves_whatever_is_asked_for(gemma3n: Path, tmp_path: Path) -> None:
    """llama.cpp dies of others."""
    aprfmt.export_model(gemma3n, tmp_path / "towers.gguf", mmproj=True, dtype="f32")
    with aprfmt.open(tmp_path / "towers.gguf") as model:
        depthwise = {name: t.dtype for name, t in model.tensors.items() if t.shape[1:2] == (1,) and "v.blk" in name}
        assert len(depthwise) == 14 + 28 + 3
        assert {*depthwise.values()} == {"F16"}
        assert model.tensors["v.blk.1.0.pw_exp.conv.weight"].dtype == "F32"
        assert model.tensors["v.blk.1.0.layer_scale.gamma"].shape == (1, 10, 1, 1)
