"""Qwen's vision and audio towers."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.blocks.hearing import (
    CONVOLUTIONS, HEARING_EPS, MEL, MM, POSITIONS, PREFIXES, QWEN3_KEYS, convolutions_2d, whisper,
)
from aprfmt.arch.blocks.qwen_vision import MERGED, merger, qwen3_keys, qwen3_sizes, qwen3_vision
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_SILU, fused_attention, hears, layers, mlp, norms, patches_in_time, projector, sees, sizes,
    tower_attention, whole,
)
from aprfmt.arch.converters.towers import window_pattern
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower


_OMNI_V = "thinker.visual."
_A = "thinker.audio_tower."
_VISION = "thinker_config.vision_config"
_AUDIO = "thinker_config.audio_config"
_SQUARE = f"4*{TOWER_WIDTH}"
_V = "visual."
_PREFIXES = (("model.visual.", _V),)
_EPS = Key("vision.attention.layer_norm_epsilon", ("rms_norm_eps",), "f32")
QWEN2_VISION = (
    *patches_in_time(f"{_V}patch_embed.proj", width="embed_dim"),
    *layers(
        *norms("norm1", "norm2", width="embed_dim"), *fused_attention(width="embed_dim"),
        *mlp(width="embed_dim", ffn="embed_dim*mlp_ratio"), hf=f"{_V}blocks.{{n}}.", depth="depth",
    ),
    *norm(f"{_V}merger.ln_q", "v.post_ln", "embed_dim", REQUIRED),
    *linear(f"{_V}merger.mlp.0", "mm.0", "4*embed_dim,4*embed_dim", REQUIRED),
    *linear(f"{_V}merger.mlp.2", "mm.2", "hidden,4*embed_dim", REQUIRED),
)
QWEN2_KEYS = sees(
    *sizes(
        embedding_length="embed_dim", feed_forward_length="hidden_size", block_count="depth", head_count="num_heads",
    ),
    Key("", ("vision_config.mlp_ratio",)), *IMAGE, projector("qwen2vl_merger"), _EPS,
)
_DEEPSTACK = f"{_V}deepstack_merger_list."
_OMNI = "thinker.visual."
_THINKER = "thinker_config.vision_config"


def _projectors(listed: str, last: str, first: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """Projectors of the layers whose features the language model gets, and of the last layer."""
    return (
        *layers(
            *norm(first, "norm", MERGED, REQUIRED, layers="deepstack"),
            *linear(up, "fc1", f"{MERGED},{MERGED}", REQUIRED, layers="deepstack"),
            *linear(down, "fc2", f"hidden,{MERGED}", REQUIRED, layers="deepstack"), hf=listed + "{n}.",
            gguf="v.deepstack.{n}.", depth="depth",
        ),
        *norm(last + first, "v.post_ln", TOWER_WIDTH, REQUIRED),
        *linear(last + up, "mm.0", f"{MERGED},{MERGED}", REQUIRED),
        *linear(last + down, "mm.2", f"hidden,{MERGED}", REQUIRED),
    )


def qwen3_audio(hf: str) -> tuple[TensorRow, ...]:
    """The encoder of Qwen 3 ASR and Qwen 3 Omni, with its projector."""
    return (
        *convolutions_2d(hf, columns=True),
        *linear(f"{hf}conv_out", "a.conv_out", "d_model,num_mel_bins/8*downsample_hidden_size"),
        *layers(
            *norms("self_attn_layer_norm", "final_layer_norm", width="d_model"), *tower_attention(width="d_model"),
            *mlp("fc1", "fc2", width="d_model", ffn="encoder_ffn_dim"), hf=f"{hf}layers.{{n}}.", gguf="a.blk.{n}.",
            depth="encoder_layers",
        ),
        *norm(f"{hf}ln_post", "a.post_ln", "d_model", REQUIRED),
        *linear(f"{hf}proj1", "mm.a.mlp.1", "d_model,d_model", REQUIRED),
        *linear(f"{hf}proj2", "mm.a.mlp.2", "hidden,d_model", REQUIRED),
    )


QWEN3_POSITIONS = {"a.position_embd.weight": "sinusoids:1500,d_model"}
QWEN3_CONVOLUTIONS = (".conv2d.1.weight", ".conv2d.2.weight", ".conv2d.3.weight", ".conv_out.weight")
_D_MODEL = ("d_model", "encoder_ffn_dim", "encoder_layers")
_SIZES = sizes(
    "audio", embedding_length="d_model", feed_forward_length="encoder_ffn_dim", block_count="encoder_layers",
    head_count="encoder_attention_heads",
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="qwen2_vl_vision", **whole("Qwen2VLForConditionalGeneration", "Qwen2VLModel", types=("qwen2_vl",)),
        when="projector_type=qwen2vl_merger", text="", prefixes=_PREFIXES,
        tensors=QWEN2_VISION, keys=QWEN2_KEYS, config={"vision_config.model_type": "qwen2_vl"},
    ),
    Tower(
        id="qwen2_5_vl_vision", **whole("Qwen2_5_VLForConditionalGeneration", types=("qwen2_5_vl",)),
        when="projector_type=qwen2.5vl_merger", text="", prefixes=_PREFIXES,
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False), *fused_attention(),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"), hf=f"{_V}blocks.{{n}}.", depth="depth",
            ),
            *merger(norm_bias=False),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *sizes(block_count="depth", head_count="num_heads"), *IMAGE, projector("qwen2.5vl_merger"), USE_SILU,
            Key("vision.n_wa_pattern", ("vision_config.fullatt_block_indexes",), converter=window_pattern), _EPS,
        ),
        config={"vision_config.model_type": "qwen2_5_vl"},
    ),
    Tower(
        id="sarashina2_vision", **whole("Sarashina2VisionForCausalLM", types=("sarashina2_vision",)),
        when="projector_type=qwen2vl_merger", text="llm.", prefixes=_PREFIXES,
        tensors=QWEN2_VISION, keys=QWEN2_KEYS,
    ),
    Tower(
        id="qwen3_vl_vision",
        **whole(
            "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration", "OpenJevModel",
            types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen3_5"),
        ),
        when="projector_type=qwen3vl_merger", text="model.language_model.", prefixes=(("model.visual.", _V),),
        listed={_DEEPSTACK: "vision_config.deepstack_visual_indexes"},
        tensors=(
            tensor(f"{_V}patch_embed.proj.bias", "v.patch_embd.bias", TOWER_WIDTH), *qwen3_vision(_V),
            *_projectors(_DEEPSTACK, f"{_V}merger.", "norm", "linear_fc1", "linear_fc2"),
        ),
        keys=sees(*qwen3_sizes("vision_config"), *IMAGE, projector("qwen3vl_merger"), *qwen3_keys("vision_config")),
    ),
    Tower(
        id="qwen3_omni_towers", **whole("Qwen3OmniMoeForConditionalGeneration", types=("qwen3_omni_moe",)),
        when="vision.projector_type=qwen3vl_merger&audio.projector_type=qwen3a", text="thinker.",
        listed={f"{_OMNI}merger_list.": f"{_THINKER}.deepstack_visual_indexes"},
        tensors=(
            tensor(f"{_OMNI}patch_embed.proj.bias", "v.patch_embd.bias", TOWER_WIDTH), *qwen3_vision(_OMNI),
            *_projectors(f"{_OMNI}merger_list.", f"{_OMNI}merger.", "ln_q", "mlp.0", "mlp.2"),
            *qwen3_audio("thinker.audio_tower."),
        ),
        made=QWEN3_POSITIONS, f32=(".position_embd.",), f16=QWEN3_CONVOLUTIONS,
        keys=(
            *sees(*qwen3_sizes(_THINKER), *IMAGE, *qwen3_keys(_THINKER), projector("qwen3vl_merger", part="vision")),
            *hears(*QWEN3_KEYS, projector("qwen3a", part="audio")),
        ),
    ),
    Tower(
        id="qwen2_audio_tower", **whole("Qwen2AudioForConditionalGeneration", types=("qwen2_audio",)),
        when="projector_type=qwen2a", prefixes=PREFIXES,
        tensors=(*whisper("audio_tower.", *_D_MODEL), *linear(f"{MM}linear", "mm.a.fc", "hidden,d_model", REQUIRED)),
        f32=(".position_embd.",), f16=CONVOLUTIONS,
        keys=hears(*_SIZES, projector("qwen2a"), MEL, HEARING_EPS, POSITIONS),
        config={"audio_config.model_type": "qwen2_audio_encoder"},
    ),
    Tower(
        id="qwen3_asr_tower", **whole("Qwen3ASRForConditionalGeneration", types=("qwen3_asr",)),
        when="audio.projector_type=qwen3a&!has_vision_encoder", text="thinker.",
        tensors=qwen3_audio("thinker.audio_tower."), made=QWEN3_POSITIONS, f32=(".position_embd.",),
        f16=QWEN3_CONVOLUTIONS, keys=hears(*QWEN3_KEYS, projector("qwen3a", part="audio")),
    ),
    Tower(
        id="qwen2_5_omni_towers",
        **whole("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", types=("qwen2_5_omni",)),
        inside=("thinker_config", "qwen2_5_omni_thinker"), when="projector_type=qwen2.5o", text="thinker.",
        prefixes=(("visual.", _OMNI_V), ("audio_tower.", _A)),
        tensors=(
            *patches_in_time(f"{_OMNI_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False), *tower_attention("attn", names=("q", "k", "v", "proj")),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"), hf=f"{_OMNI_V}blocks.{{n}}.", depth="depth",
            ),
            *norm(f"{_OMNI_V}merger.ln_q", "v.post_ln", TOWER_WIDTH),
            *linear(f"{_OMNI_V}merger.mlp.0", "mm.0", f"{_SQUARE},{_SQUARE}", REQUIRED),
            *linear(f"{_OMNI_V}merger.mlp.2", "mm.2", f"hidden,{_SQUARE}", REQUIRED),
            *whisper(_A, "d_model", "encoder_ffn_dim", "encoder_layers", positions=False, last="ln_post"),
            *linear(f"{_A}proj", "mm.a.fc", "hidden,d_model", REQUIRED),
        ),
        made={"a.position_embd.weight": "sinusoids:1500,d_model"}, ignored=("audio_bos_eos_token.weight",),
        f32=(".position_embd.",), f16=(".conv1d.1.weight", ".conv1d.2.weight"),
        keys=(
            *sees(
                *sizes("vision", _VISION, block_count="depth", head_count="num_heads"), *IMAGE, projector("qwen2.5o"),
                USE_SILU, Key("vision.n_wa_pattern", (f"{_VISION}.fullatt_block_indexes",), converter=window_pattern),
                Key("vision.attention.layer_norm_epsilon", ("rms_norm_eps",), "f32"),
            ),
            *hears(
                *sizes(
                    "audio", _AUDIO, embedding_length="d_model", feed_forward_length="encoder_ffn_dim",
                    block_count="encoder_layers", head_count="encoder_attention_heads",
                ),
                Key("audio.num_mel_bins", (f"{_AUDIO}.num_mel_bins",)),
                Key("audio.attention.layer_norm_epsilon", (f"{_AUDIO}.layer_norm_eps",), "f32"),
            ),
        ),
    ),
)
