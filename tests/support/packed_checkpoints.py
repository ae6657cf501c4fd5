"""Tiny checkpoints packed as their families publish them: FP8 in blocks, experts as MXFP4, the rest in bfloat16.

The values are rounded to what the packing holds first, so that the same network is there in plain floats beside it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import arch_models
from tiny_models import BYTES, write_byte_tokenizer

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32
FP8: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True)
class PackedCheckpoint:
    """A family whose published checkpoints are packed.

    Attributes:
        case: id of the case whose network it is.
        rules: patterns of names -> how such a tensor is packed, a name of PACKINGS; the first that is found counts.
        settings: `quantization_config` of the published config.json.
        config: what differs from the case's config.
        published: the config.json where transformers writes another than the published one: what stands in it, None
            for keys that it lacks.
        floats: pattern of names that are published in F32; all else that is not packed is bfloat16.
        options: of llama.cpp's converter; {source} stands for the folder.
        converter: whether llama.cpp's converter takes the config as transformers reads it.
        raw: whether it gets the config.json as it is, and not as transformers reads it.
        drafts: what a draft layer has beside the tensors of a layer (see draft_models.Drafted.own), as published.
        draft_tensors: further tensors of it, by their published names, with their shapes.
    """

    case: str
    rules: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=lambda: FP8)
    config: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    floats: str = r"bias|A_log"
    options: tuple[str, ...] = ()
    converter: bool = True
    raw: bool = False
    drafts: Sequence[str] = ()
    draft_tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _fp8(values: Any, size: Sequence[int], exponents: bool) -> tuple[Any, Any, Any]:
    """(codes, scales, the values that they mean): a scale for each block, a power of two for `exponents`."""
    import torch

    (*lead, rows, columns), (height, width) = values.shape, size
    high, wide = -(-rows // height), -(-columns // width)
    padded = torch.zeros(*lead, high * height, wide * width)
    padded[..., :rows, :columns] = values
    most = padded.reshape(*lead, high, height, wide, width).abs().amax((-3, -1)) / 448
    scale = torch.exp2(torch.log2(most).ceil()) if exponents else most
    spread = scale.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width, -1)[..., :columns]
    codes = (values / spread).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu) if exponents else scale, codes.float() * spread


def _mxfp4(values: Any) -> tuple[Any, Any, Any]:
    """(bytes of two codes, biased exponents, the values that they mean)."""
    import torch

    rows, columns = values.shape
    groups = values.reshape(rows, columns // _GROUP, _GROUP)
    exponent = torch.log2(groups.abs().amax(-1) / 6).ceil().clamp(-126, 126)
    scaled = groups / torch.exp2(exponent)[..., None]
    table = torch.tensor(_FP4)
    index = (scaled.abs()[..., None] - table).abs().argmin(-1)
    codes = (index + 8 * (scaled < 0)).to(torch.uint8)
    meant = table[index] * torch.where(scaled < 0, -1.0, 1.0) * torch.exp2(exponent)[..., None]
    pairs = codes.reshape(rows, -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8), meant.reshape(rows, columns)


Parts = tuple[dict[str, Any], Any]
"""Stored tensors by name, and the values that they stand for."""


def _inverse_scales(name: str, values: Any, size: Sequence[int]) -> Parts:
    codes, scale, meant = _fp8(values, size, False)
    return {name: codes, f"{name}_scale_inv": scale}, meant


def _fp8_exponents(name: str, values: Any, size: Sequence[int]) -> Parts:
    codes, scale, meant = _fp8(values, size, True)
    return {name: codes, name.replace(".weight", ".scale"): scale}, meant


def _fp4_exponents(name: str, values: Any, size: Sequence[int]) -> Parts:
    import torch

    pairs, exponents, meant = _mxfp4(values)
    scale = exponents.view(torch.float8_e8m0fnu)
    return {name: pairs.view(torch.int8), name.replace(".weight", ".scale"): scale}, meant


def _compressed_mxfp4(name: str, values: Any, size: Sequence[int]) -> Parts:
    pairs, exponents, meant = _mxfp4(values)
    return {f"{name}_packed": pairs, f"{name}_scale": exponents}, meant


def _nvfp4(values: Any) -> tuple[Any, Any, Any, Any]:
    """(bytes of two codes, E4M3 scales, the scale of the tensor, the values that they mean)."""
    import torch

    rows, columns = values.shape
    groups = values.reshape(rows, columns // 16, 16)
    overall = torch.exp2(torch.log2(values.abs().max() / (6 * 448)).ceil())  # its inverse is exact, too
    scale = (groups.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)
    own = scale.float() * overall
    table = torch.tensor(_FP4)
    index = ((groups / own[..., None]).abs()[..., None] - table).abs().argmin(-1)
    codes = (index + 8 * (groups < 0)).to(torch.uint8).reshape(rows, columns // 2, 2)
    meant = table[index] * torch.where(groups < 0, -1.0, 1.0) * own[..., None]
    return codes[..., 0] | codes[..., 1] << 4, scale, overall, meant.reshape(rows, columns)


def _modelopt_nvfp4(name: str, values: Any, size: Sequence[int]) -> Parts:
    import torch

    pairs, scale, overall, meant = _nvfp4(values)
    inputs = torch.tensor(0.5 if "mlp" in name else 0.25)
    base = name.removesuffix("weight")
    parts = {name: pairs, f"{name}_scale": scale, f"{name}_scale_2": overall, f"{base}input_scale": inputs}
    return parts, meant


def _compressed_nvfp4(name: str, values: Any, size: Sequence[int]) -> Parts:
    pairs, scale, overall, meant = _nvfp4(values)
    return {f"{name}_packed": pairs, f"{name}_scale": scale, f"{name}_global_scale": (1 / overall).reshape(1)}, meant


PACKINGS: Mapping[str, Callable[[str, Any, Sequence[int]], Parts]] = {
    "scale_inv": _inverse_scales,
    "fp8": _fp8_exponents,
    "fp4": _fp4_exponents,
    "mxfp4": _compressed_mxfp4,
    "modelopt_nvfp4": _modelopt_nvfp4,
    "nvfp4": _compressed_nvfp4,
}

_V4_FP8 = r"attn\.w(q_a|q_b|kv|o_a|o_b)\.weight|indexer\.wq_b|shared_experts\.w\d|\.[eh]_proj|main_proj"
_V4_FP4 = r"ffn\.experts\.\d+\.w\d\.weight"
_V4_SIZES = {"q_lora_rank": 32, "o_lora_rank": 32}
_V4_ROPE = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}

_K3 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*", "re:.*vision_tower.*"],
}

_PROJECTIONS = (
    r"(self_attn|linear_attn|attention|mlp|moe|indexer|block_sparse_moe|share_expert)\..*"
    r"((?<!weights)_(proj|proj_with_mqa|proj_qkvz?|proj_z)|query_key_value|dense)\.weight$"
    r"|\.w[123]\.weight$|indexer\.w(q_b|k)\.weight$"
)
"""What FP8 checkpoints have packed: the weights of linear layers, but for routers and heads."""


def _fp8_of(case: str, **more: Any) -> PackedCheckpoint:
    """A family whose linear layers are FP8 in blocks; a tiny weight has several of these, and parts of some."""
    return PackedCheckpoint(case, {_PROJECTIONS: "scale_inv"}, {**FP8, "weight_block_size": [16, 32]}, **more)


_LINEAR = r"\.(q|k|v|o|gate|up|down)_proj\.weight$"
_SIZES_OF_64 = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mlp.gate"]}
_CT_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip


def nvfp4_checkpoint(case: str) -> PackedCheckpoint:
    """A case as ModelOpt quantizes it to NVFP4."""
    return PackedCheckpoint(case, {_LINEAR: "modelopt_nvfp4"}, _MODELOPT, config=_SIZES_OF_64)


PACKED: dict[str, PackedCheckpoint] = {
    # As deepseek-ai/DeepSeek-V4-Flash has them.
    "deepseek_v4": PackedCheckpoint(
        "deepseek_v4/yarn",
        {_V4_FP4: "fp4", _V4_FP8: "fp8"},
        {**FP8, "scale_fmt": "ue8m0"},
        config=_V4_SIZES,
        published={
            **dict.fromkeys(("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")),
            "rope_parameters": None,
            "rope_scaling": _V4_ROPE,
            "compress_ratios": [0, 4, 128, 4, 0],
            "num_hash_layers": 1,
            "qk_rope_head_dim": 16,
            "expert_dtype": "fp4",
            "topk_method": "noaux_tc",
        },
        floats=r"hc_|\.ape|attn_sink|bias|compressor\.w",
        drafts=("e_proj", "h_proj", "enorm", "hnorm", "norm"),
        draft_tensors={"mtp.0.hc_head_fn": (4, 256), "mtp.0.hc_head_base": (4,), "mtp.0.hc_head_scale": (1,)},
    ),
    # As deepseek-ai/DeepSeek-V4-Flash-DSpark has them.
    "deepseek_v4_dspark": PackedCheckpoint(
        "deepseek_v4_dspark",
        {_V4_FP4: "fp4", _V4_FP8: "fp8"},
        {**FP8, "scale_fmt": "ue8m0"},
        config=_V4_SIZES,
        floats=r"hc_|attn_sink|bias",
        options=("--target-model-dir", "{source}"),
    ),
    # As moonshotai/Kimi-K3 has them, which says so of its language model.
    "kimi_k3": PackedCheckpoint(
        "kimi_k3", {r"block_sparse_moe\.experts\.\d+\.w\d\.weight": "mxfp4"}, _K3, floats=r"A_log|bias|conv1d|o_norm"
    ),
    # As deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct have them.
    "deepseek_v3": _fp8_of("deepseek_v3"),
    # As deepseek-ai/DeepSeek-V3.2-Exp has them.
    "deepseek_v32": _fp8_of("deepseek_v32"),
    "glm_moe_dsa": _fp8_of("glm_moe_dsa/shared"),
    # As XiaomiMiMo/MiMo-V2-Flash has them.
    "mimo_v2_flash": _fp8_of("mimo_v2_flash", converter=False),
    # As MiniMaxAI/MiniMax-M2 has them.
    "minimax_m2": _fp8_of("minimax_m2", published={"scoring_func": "sigmoid"}),
    "minimax_m3": _fp8_of("minimax_m3"),
    "hy_v3": _fp8_of("hy_v3"),
    # As Qwen/Qwen3-30B-A3B-FP8 and Qwen/Qwen3-Next-80B-A3B-Instruct-FP8 have them.
    "qwen3_moe": _fp8_of("qwen3_moe"),
    "qwen3_next": _fp8_of("qwen3_next", options=("--no-mtp",)),
    "qwen3_5_moe": _fp8_of("qwen3_5_moe_text", options=("--no-mtp",)),
    "step3p5": _fp8_of("step3p5", raw=True),
    "bailing_moe_v2": _fp8_of("bailing_moe_v2"),
    "bailing_moe_v3": _fp8_of("bailing_moe_v3"),
    "dots3_note": _fp8_of("dots3_note", raw=True),
    "glm5_next": _fp8_of("glm5_next"),
    # As nvidia/Llama-3.1-8B-Instruct-FP4 and nvidia/Qwen3-30B-A3B-FP4 have them.
    "llama_nvfp4": nvfp4_checkpoint("llama"),
    "qwen3_moe_nvfp4": nvfp4_checkpoint("qwen3_moe"),
    # As llm-compressor writes them.
    "qwen3_nvfp4": PackedCheckpoint("qwen3", {_LINEAR: "nvfp4"}, _CT_NVFP4, config=_SIZES_OF_64),
}
"""Name -> the family."""


def write_packed(name: str, folder: Path, plain: Path) -> None:
    """Writes the packed Hugging Face folder of PACKED[name], and a folder of the same network in plain floats."""
    write_packed_case(PACKED[name], folder, plain)


def write_packed_case(packed: PackedCheckpoint, folder: Path, plain: Path) -> None:
    """The same for a checkpoint that is not in the table."""
    import torch
    from safetensors.torch import load_file, save_file

    found = arch_models.find_case(packed.case)
    case = replace(found, config={**found.config, **packed.config}, tokenizer=BYTES)
    tokenizer = folder.parent / f".{folder.name}-{plain.name}-tokenizer"
    if not tokenizer.is_dir():
        tokenizer.mkdir(parents=True)
        write_byte_tokenizer(tokenizer)
    make: Callable[..., Any] = arch_models.build if case.computable else arch_models.write_checkpoint
    make(case, plain, {BYTES: tokenizer})
    shutil.copytree(plain, folder)
    tensors: dict[str, Any] = {}
    floats = load_file(plain / "model.safetensors")
    drafts = _draft_tensors(packed, plain)
    floats |= drafts
    for tensor_name, values in floats.items():
        how = next((how for pattern, how in packed.rules.items() if re.search(pattern, tensor_name)), None)
        if how is not None:
            parts, floats[tensor_name] = PACKINGS[how](
                tensor_name, values, packed.settings.get("weight_block_size", ())
            )
            tensors |= parts
        elif values.is_floating_point() and not re.search(packed.floats, tensor_name):
            tensors[tensor_name] = values.to(torch.bfloat16)
            floats[tensor_name] = tensors[tensor_name].float()
        else:
            tensors[tensor_name] = values
    floats = {key: values for key, values in floats.items() if key not in drafts}
    for path, held in ((plain, floats), (folder, tensors)):
        save_file(
            {key: tensor.contiguous() for key, tensor in held.items()}, path / "model.safetensors", {"format": "pt"}
        )
    config = json.loads((folder / "config.json").read_text())
    config |= {**packed.published, "torch_dtype": "bfloat16"}
    config.get("text_config", config)["quantization_config"] = dict(packed.settings)
    config.pop("dtype", None)
    dropped = [key for key, value in packed.published.items() if value is None]
    kept = {key: value for key, value in config.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(kept, indent=2))


def _draft_tensors(packed: PackedCheckpoint, folder: Path) -> dict[str, Any]:
    """Tensors of one draft layer under their published names."""
    import torch

    from aprfmt.arch.hparams import from_hf_config
    from aprfmt.arch.names import draft_spelling
    from aprfmt.arch.table import ARCHITECTURES

    if not packed.drafts:
        return {}
    config = json.loads((folder / "config.json").read_text())
    h = from_hf_config(config)
    row, first = ARCHITECTURES[str(h.architecture)], h.num_layers or 0
    made = arch_models.row_tensors(config, [first], packed.drafts)
    shapes = {draft_spelling(row, h, name): shape for name, shape in made} | dict(packed.draft_tensors)
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in shapes.items()}
