"""Routed experts in the spellings that checkpoints have: one tensor an expert, all in one, MXFP4 blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.convert.api import convert_model
from aprfmt.convert.presets import PRESETS
from aprfmt.errors import RefusedError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

import arch_models  # noqa: E402
from llama_peer import LlamaPeer  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

MODULES = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not arch_models.CACHE.joinpath("smollm2").exists():
        pytest.skip("run tools/fetch_material.py")
    return arch_models.write_tokenizers(tmp_path_factory.mktemp("tokenizers"), ["smollm2"], 512)


def _gguf(path: Path) -> dict[str, tuple[str, bytes]]:
    found = gguf.GGUFReader(path).tensors
    return {t.name: (t.tensor_type.name, np.asarray(t.data).tobytes()) for t in found}


def _hf(folder: Path) -> dict[str, Any]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == t.dtype and torch.equal(ours[name], t) for name, t in theirs.items()
    )


def _packed_gpt_oss(folder: Path, tokenizers: dict[str, Path]) -> dict[str, Any]:
    """A gpt-oss whose experts are random MXFP4 blocks; its tensors."""
    arch_models.build(arch_models.find_case("gpt_oss/bf16"), folder, tokenizers)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, width, rows = tensors.pop(name).shape
        shape = (experts, rows, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        tensors[f"{name}_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8, generator=random)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": MODULES}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_mxfp4_experts_stay_as_they_are_on_every_way(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    tensors = _packed_gpt_oss(tmp_path / "hf", tokenizers)
    convert_model(tmp_path / "hf", tmp_path / "a.apr")
    with aprfmt.open(tmp_path / "a.apr") as model:
        assert model.tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"].dtype == "U8"
    convert_model(tmp_path / "a.apr", tmp_path / "a.gguf")
    convert_model(tmp_path / "a.gguf", tmp_path / "b.apr")
    for source in ("a", "b"):
        convert_model(tmp_path / f"{source}.apr", tmp_path / source)
        assert _same(_hf(tmp_path / source), tensors)
        config = json.loads((tmp_path / source / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_a_foreign_gguf_with_mxfp4_experts_gets_the_config_that_tells_so(
    tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    tensors = _packed_gpt_oss(tmp_path / "hf", tokenizers)
    convert_model(tmp_path / "hf", tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    _write(tmp_path / "b.gguf", "gpt-oss", reader, {t.name: t for t in reader.tensors})
    convert_model(tmp_path / "b.gguf", tmp_path / "back")
    back = _hf(tmp_path / "back")
    sources = [name for name in tensors if name.endswith(("_blocks", "_scales"))]
    assert all(torch.equal(back[name], tensors[name]) for name in sources)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "mxfp4", "modules_to_not_convert": MODULES}


def test_mxfp4_experts_in_a_gguf_have_the_values_of_transformers(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = _packed_gpt_oss(tmp_path / "hf", tokenizers)
    convert_model(tmp_path / "hf", tmp_path / "a.gguf")
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    values = convert_moe_packed_tensors(
        tensors[f"{name}_blocks"].clone(), tensors[f"{name}_scales"].clone(), dtype=torch.float32
    )
    for half, ours in enumerate(("gate", "up")):
        tensor = found[f"blk.1.ffn_{ours}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(decoded, values[..., half::2].transpose(1, 2).numpy())


def test_experts_in_one_tensor_make_the_same_gguf(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    arch_models.build(arch_models.find_case("qwen3_moe"), tmp_path / "one", tokenizers)
    tensors = _hf(tmp_path / "one")
    convert_model(tmp_path / "one", tmp_path / "one.gguf")
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{stem}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{stem}down_proj"] = down
    save_file(tensors, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    convert_model(tmp_path / "one", tmp_path / "fused.apr")
    convert_model(tmp_path / "fused.apr", tmp_path / "fused.gguf")
    convert_model(tmp_path / "fused.apr", tmp_path / "back")
    assert _gguf(tmp_path / "fused.gguf") == _gguf(tmp_path / "one.gguf")
    assert _same(_hf(tmp_path / "back"), tensors)


def test_a_draft_layer_stays_behind_and_is_said(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    arch_models.build(arch_models.find_case("deepseek_v3"), tmp_path / "hf", tokenizers)
    tensors = _hf(tmp_path / "hf")
    convert_model(tmp_path / "hf", tmp_path / "without.gguf")
    draft = {name.replace(".2.", ".3.", 1): t.clone() for name, t in tensors.items() if ".layers.2." in name}
    draft["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | draft, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    report = convert_model(tmp_path / "hf", tmp_path / "with.gguf")
    assert _gguf(tmp_path / "with.gguf") == _gguf(tmp_path / "without.gguf")
    epsilon, loss = report.losses
    assert "rms_norm_eps 1e-05 in all norms" in epsilon
    assert "differ by 4e-06 for inputs of RMS 1, 0.0004 for RMS 0.1" in epsilon
    assert loss.startswith(f"{len(draft)} tensors of the MTP layers (model.layers.3.*, ")
    assert ") dropped: " in loss
    report = convert_model(tmp_path / "hf", tmp_path / "m.apr")
    assert report.lossless
    assert not report.losses
    assert report.tensor_count == len(tensors | draft)
    convert_model(tmp_path / "m.apr", tmp_path / "again.gguf")
    assert _gguf(tmp_path / "again.gguf") == _gguf(tmp_path / "without.gguf")
    convert_model(tmp_path / "m.apr", tmp_path / "back")
    assert _same(_hf(tmp_path / "back"), tensors | draft)


def test_a_deepseek_gguf_with_whole_keys_and_values_is_read(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """Files from before the split of kv_b_proj."""
    arch_models.build(arch_models.find_case("deepseek_v3"), tmp_path / "hf", tokenizers)
    tensors = _hf(tmp_path / "hf")
    convert_model(tmp_path / "hf", tmp_path / "new.gguf")
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    kept = {t.name: t for t in reader.tensors if not t.name.endswith(("attn_k_b.weight", "attn_v_b.weight"))}
    whole = {
        f"blk.{n}.attn_kv_b.weight": tensors[f"model.layers.{n}.self_attn.kv_b_proj.weight"].numpy() for n in range(3)
    }
    lengths = {"key_length": 24, "value_length": 12, "key_length_mla": None, "value_length_mla": None}
    _write(tmp_path / "old.gguf", "deepseek2", reader, kept | whole, **lengths)
    convert_model(tmp_path / "old.gguf", tmp_path / "back")
    assert _same(_hf(tmp_path / "back"), tensors)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (16, 12)


@pytest.mark.llama
@pytest.mark.parametrize("mix", ["mxfp4_moe", "q8_0", "q5_0"])
def test_a_mix_keeps_mxfp4_experts_or_is_told_to_quantize_them_again(
    mix: str, tmp_path: Path, tokenizers: dict[str, Path], llama_cpp: LlamaPeer
) -> None:
    small = arch_models.write_tokenizers(tmp_path / "small", list(tokenizers), limit=512)
    _packed_gpt_oss(tmp_path / "hf", small)
    convert_model(tmp_path / "hf", tmp_path / "a.gguf")
    theirs, file_type = tmp_path / "theirs.gguf", PRESETS[mix].file_type
    llama_cpp.quantize(tmp_path / "a.gguf", theirs, file_type, allow_requantize=True)
    for source in ("hf", "a.gguf"):
        # The folder is the release itself; of a GGUF nobody knows.
        again = mix != "mxfp4_moe" and source == "a.gguf"
        if again:
            with pytest.raises(RefusedError, match="MXFP4 is already quantized"):
                convert_model(tmp_path / source, tmp_path / "no.gguf", dtype=mix)
        convert_model(tmp_path / source, tmp_path / "ours.gguf", dtype=mix, force=True, allow_requantize=again)
        assert _gguf(tmp_path / "ours.gguf") == _gguf(tmp_path / "theirs.gguf")
        convert_model(tmp_path / source, tmp_path / "m.apr", dtype=mix, force=True, allow_requantize=again)
        convert_model(tmp_path / "m.apr", tmp_path / "ours.gguf", force=True)
        assert _gguf(tmp_path / "ours.gguf") == _gguf(tmp_path / "theirs.gguf")
        with aprfmt.open(tmp_path / "m.apr") as model:
            assert ("quantization_config" in model.hparams.extra) is (mix == "mxfp4_moe")


def _write(path: Path, arch: str, like: Any, tensors: dict[str, Any], **changed: int | None) -> None:
    """A GGUF with the keys of `like` (`changed` by their last word, None: absent) and no trace of its maker."""
    writer = gguf.GGUFWriter(path, arch)
    for field in like.fields.values():
        value = changed.get(field.name.rpartition(".")[2], field.contents())
        if value is not None and not field.name.startswith(("GGUF.", "general.", "aprfmt.")):
            writer.add_key_value(field.name, value, field.types[0], field.types[-1])
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
