"""Tiny random models with layers that predict further tokens (MTP, nextn), named and counted as they are published.

A draft layer is made of what the row names; llama.cpp's converter and loader judge whether that is all, and right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import arch_models
import numpy as np
from carried_models import edit_config, read_arrays, write_arrays
from tiny_models import BYTES, write_byte_tokenizer

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.names import draft_spelling
from aprfmt.arch.table import ARCHITECTURES

USUAL = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""What every draft layer has beside the tensors of a layer."""
WITH_HEAD = (*USUAL, "embed_tokens", "shared_head.head")
"""The same with an embedding and a head of its own."""


@dataclass(frozen=True)
class Drafted:
    """A family whose checkpoints have draft layers.

    Attributes:
        case: id of the case whose network it is; it counts no draft layers.
        counted: config.json keys that count the draft layers, with the count; {} where published configs are silent.
        n: number of draft layers.
        own: modules of a draft layer beside those of a layer, as the row names them.
        config: what differs from the case's config.
        converter: what llama.cpp's converter does with them: "writes" them, leaves them "aside", or "fails" at the
            config as transformers reads it.
        options: whether it takes --no-mtp and --mtp.
        loads: whether llama.cpp loads a GGUF with them.
        out_type: in which the converter is asked to write.
        raw: whether it gets the config.json as it is, and not as transformers reads it.
    """

    case: str
    counted: Mapping[str, int]
    n: int = 1
    own: tuple[str, ...] = USUAL
    config: Mapping[str, Any] = field(default_factory=dict)
    converter: str = "writes"
    options: bool = True
    loads: bool = True
    out_type: str = "f16"
    raw: bool = False


_SLIDING = "sliding_attention"
NEXTN = {"num_nextn_predict_layers": 1}

DRAFTED: dict[str, Drafted] = {
    # As zai-org/GLM-4.5-Air has them.
    "glm4_moe": Drafted("glm4_moe", NEXTN, own=WITH_HEAD, config={"attention_bias": True}),
    # As zai-org/GLM-4.7-Flash has them.
    "glm4_moe_lite": Drafted(
        "deepseek_v3/glm4_lite", NEXTN, own=WITH_HEAD, config={"num_hidden_layers": 3, "first_k_dense_replace": 1}
    ),
    # As deepseek-ai/DeepSeek-V3 has them.
    "deepseek_v3": Drafted("deepseek_v3", NEXTN, own=WITH_HEAD, converter="aside", options=False),
    # As deepseek-ai/DeepSeek-V3.2 and zai-org/GLM-5 have them.
    "deepseek_v32": Drafted("deepseek_v32", NEXTN, own=WITH_HEAD),
    "glm_moe_dsa": Drafted("glm_moe_dsa/shared", NEXTN, own=WITH_HEAD),
    # As tencent/Hy3-preview has them.
    "hy_v3": Drafted("hy_v3", NEXTN, own=("eh_proj", "enorm", "hnorm", "final_layernorm")),
    # As XiaomiMiMo/MiMo-V2.5 has them; its config does not count them.
    "mimo_v2": Drafted("mimo_v2_flash/v2_5", {}, n=3, own=("eh_proj", "enorm", "hnorm", "final_layernorm")),
    # As Qwen/Qwen3.5-0.8B and Qwen/Qwen3.5-35B-A3B have them; configs of Qwen3.6 may not count them.
    "qwen3_5": Drafted("qwen3_5_text", {"mtp_num_hidden_layers": 1}),
    "qwen3_5_silent": Drafted("qwen3_5_text/heads", {}),
    "qwen3_5_two": Drafted("qwen3_5_text/same-heads", {"mtp_num_hidden_layers": 2}, n=2),
    "qwen3_5_moe": Drafted("qwen3_5_moe_text", {"mtp_num_hidden_layers": 1}),
    # As Qwen/Qwen3-Next-80B-A3B-Instruct has them; its config does not count them.
    "qwen3_next": Drafted("qwen3_next", {}),
    # As LGAI-EXAONE/K-EXAONE-236B-A23B has them.
    "exaone_moe": Drafted("exaone_moe", NEXTN, options=False),
    # As CohereLabs/North-Mini-Code-1.0 has them.
    "cohere2_moe": Drafted("cohere2_moe", NEXTN, options=False),
    # As inclusionAI/Ling-mini-2.0 has them.
    "bailing_moe_v2": Drafted(
        "bailing_moe_v2", NEXTN, own=("eh_proj", "enorm", "hnorm", "final_layernorm"), options=False
    ),
    # As zai-org/GLM-OCR has them.
    "glm_ocr": Drafted("glm4v/ocr", NEXTN, own=WITH_HEAD, options=False),
    # As LGAI-EXAONE/EXAONE-4.5-33B has them.
    "exaone4_5": Drafted("exaone4/exaone4_5", NEXTN, options=False),
    # As zai-org/GLM-5.3-Flash has them.
    "glm5_next": Drafted("glm5_next", NEXTN),
    # As stepfun-ai/Step-3.5-Flash has them, whose lists count the draft layers.
    "step3p5": Drafted(
        "step3p5",
        NEXTN,
        own=("eh_proj", "enorm", "hnorm", "transformer.shared_head.norm"),
        config={
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", _SLIDING],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
            "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0, 10000.0],
            "swiglu_limits": [None, 7.0, None, 7.0, None],
            "swiglu_limits_shared": [None, None, 16.0, None, None],
        },
        converter="fails",
        options=False,
    ),
    # As inclusionAI/Ling-3.0-flash has them.
    "bailing_moe_v3": Drafted("bailing_moe_v3", NEXTN, own=("eh_proj", "enorm", "hnorm", "final_layernorm")),
    "bailing_moe_v3_limits": Drafted(
        "bailing_moe_v3/limits",
        NEXTN,
        own=("eh_proj", "enorm", "hnorm", "final_layernorm"),
        config={"expert_swiglu_limit_list": [None, 7.0, 7.0, 7.0, 6.0]},
    ),
    # As dots-studio/dots3-note-prev has them, whose config does not count them.
    "dots3_note": Drafted(
        "dots3_note", {}, own=("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens"), raw=True
    ),
    # As nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 has them.
    # In f16 the converter, which looks for layer 1 here, rounds the router of the draft layer.
    "nemotron_h_moe": Drafted("nemotron_h_moe", NEXTN, config={"mtp_hybrid_override_pattern": "*E"}, out_type="f32"),
    "nemotron_h_moe_latent": Drafted("nemotron_h_moe/latent", NEXTN, out_type="f32"),
}
"""Name -> the family. A row of a network with draft layers has one here."""


def write_drafted(name: str, folder: Path) -> None:
    """Writes the Hugging Face folder of DRAFTED[name]."""
    drafted = DRAFTED[name]
    found = arch_models.find_case(drafted.case)
    case = replace(found, config={**found.config, **drafted.config}, tokenizer=BYTES)
    if case.computable and not case.wrapped:
        case = replace(case, config={**case.config, "vocab_size": 320})
    tokenizer = folder.parent / f".{name}-tokenizer"
    if not tokenizer.is_dir():
        tokenizer.mkdir(parents=True)
        write_byte_tokenizer(tokenizer)
    make: Callable[..., Any] = arch_models.build if case.computable else arch_models.write_checkpoint
    make(case, folder, {BYTES: tokenizer})
    edit_config(folder, **drafted.config, **drafted.counted)
    if case.wrapped:
        whole = json.loads((folder / "config.json").read_text())
        edit_config(folder, text_config={**whole["text_config"], **drafted.counted})
    config = json.loads((folder / "config.json").read_text())
    h = from_hf_config(config)
    row, first = ARCHITECTURES[str(h.architecture)], h.num_layers or 0
    rng, arrays = np.random.default_rng(1), read_arrays(folder / "model.safetensors")
    made = arch_models.row_tensors(config, range(first, first + drafted.n), drafted.own)
    for table_name, shape in made:
        own = draft_spelling(row, h, table_name)
        arrays.setdefault(own, rng.normal(size=shape).astype(np.float32))
    write_arrays(folder / "model.safetensors", arrays)
