"""DeepSeek-OCR."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.blocks.decoder import VOCAB, WHOLE_HEADS, attention, gated_mlp, linear, norm, tensor
from aprfmt.arch.blocks.moe import (
    DENSE_LAYERS, EQUAL_HEADS, GROUPS, NO_BIAS, SHARED_COUNT, WEIGHTS_SCALE, WIDTH, moe_decoder, moe_keys,
    router_and_experts, shared_expert,
)
from aprfmt.arch.blocks.tower import IMAGE, USE_GELU, epsilon, layers, mlp, norms, projector, sees, sizes, whole
from aprfmt.arch.converter import Converter, Scope, if_given, nothing
from aprfmt.arch.converters.common import computed, gating, only_true
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow, Tower


_CLIP_CONFIG = "vision_config.width.clip-l-14-224"
_TOKENS = 256
"""Tokens of an image of DeepSeek-OCR."""


def _patches_a_token(value: object, scope: Scope) -> object:
    """Patches per token in each direction, if not the usual four."""
    image, patch = (
        scope.size(f"{_CLIP_CONFIG}.{name}") or scope.size(f"vision_config.{name}")
        for name in ("image_size", "patch_size")
    )
    tokens = isqrt(scope.size("preprocessor_config.image_seq_length") or _TOKENS)
    scale = image // patch // tokens if image and patch and tokens else 0
    return scale if scale not in (0, 4) else None


patches_a_token = Converter(_patches_a_token, nothing)
_SAM = "vision_config.width.sam_vit_b"
_SAM_WIDTH = f"{_SAM}.width"
_NECK = "256"


def _sam() -> tuple[TensorRow, ...]:
    """SAM's encoder, with windowed or global attention per layer, and its convolutions.

    Tables of relative positions are as long as the attention span of a layer, which no single config.json key states.
    """
    s, width = "model.sam_model.", _SAM_WIDTH
    return (
        tensor(f"{s}pos_embed", "v.sam.pos_embd.weight", f"1,any_side,any_side,{width}"),
        tensor(f"{s}patch_embed.proj.weight", "v.sam.patch_embd.weight", f"{width},3,16,16"),
        tensor(f"{s}patch_embed.proj.bias", "v.sam.patch_embd.bias", width),
        *layers(
            *norms("norm1", "norm2", width=width, gguf=("pre_ln", "post_ln")),
            *linear("attn.qkv", "attn.qkv", f"3*{width},{width}", REQUIRED),
            *linear("attn.proj", "attn.out", f"{width},{width}", REQUIRED),
            tensor("attn.rel_pos_h", "attn.pos_h.weight", f"any_reach,{width}/{_SAM}.heads"),
            tensor("attn.rel_pos_w", "attn.pos_w.weight", f"any_reach,{width}/{_SAM}.heads"),
            *linear("mlp.lin1", "mlp.lin1", f"4*{width},{width}", REQUIRED),
            *linear("mlp.lin2", "mlp.lin2", f"{width},4*{width}", REQUIRED), hf=f"{s}blocks.{{n}}.",
            gguf="v.sam.blk.{n}.", depth=f"{_SAM}.layers",
        ),
        tensor(f"{s}neck.0.weight", "v.sam.neck.0.weight", f"{_NECK},{width},1,1"),
        *norm(f"{s}neck.1", "v.sam.neck.1", _NECK, REQUIRED),
        tensor(f"{s}neck.2.weight", "v.sam.neck.2.weight", f"{_NECK},{_NECK},3,3"),
        *norm(f"{s}neck.3", "v.sam.neck.3", _NECK, REQUIRED),
        tensor(f"{s}net_2.weight", "v.sam.net_2.weight", f"any_downsampled,{_NECK},3,3"),
        tensor(f"{s}net_3.weight", "v.sam.net_3.weight", "any_output,any_downsampled,3,3"),
    )


def _to_text(newline: str = REQUIRED) -> tuple[TensorRow, ...]:
    return (
        *linear("model.projector.layers", "mm.model.fc", "hidden,input_dim", REQUIRED),
        tensor("model.image_newline", "v.image_newline", "hidden", newline),
        tensor("model.view_seperator", "v.view_seperator", "hidden", gguf_dims=("1,hidden",)),
    )


_OCR_F32 = (
    *("v.class_embd", "v.patch_embd.", "v.position_embd", "v.sam.pos_embd", ".pos_h", ".pos_w"),
    *(".sam.neck.", ".sam.net_"),
)


def _sam_keys(max_tiles: int) -> tuple[Key, ...]:
    return (
        Key("vision.sam.block_count", (f"{_SAM}.layers",)), Key("vision.sam.embedding_length", (_SAM_WIDTH,)),
        Key("vision.sam.head_count", (f"{_SAM}.heads",)), Key("vision.window_size", ("vision_config.window_size",)),
        Key("vision.preproc_min_tiles", constant=2), Key("vision.preproc_max_tiles", constant=max_tiles), *IMAGE,
        epsilon("vision", "vision_config.layer_norm_eps"), USE_GELU, Key("", ("projector_config.input_dim",)),
    )


_CLIP = "vision_config.width.clip-l-14-224"
_CLIP_SIZES = _CLIP.replace("-", "_")
_CLIP_WIDTH = f"{_CLIP_SIZES}.width"


def _ocr(id: str, hf_class: str, when: str, max_tiles: int) -> Tower:
    """DeepSeek-OCR: SAM's features feed CLIP's transformer, and both feed the language model."""
    v = "model.vision_model."
    return Tower(
        id=id, **whole(hf_class, types=("deepseek_vl_v2",)), hf_when=_SAM, when=when, text="",
        tensors=(
            *_sam(), tensor(f"{v}embeddings.class_embedding", "v.class_embd", _CLIP_WIDTH),
            tensor(
                f"{v}embeddings.patch_embedding.weight", "v.patch_embd.weight",
                f"{_CLIP_WIDTH},3,patch_size,patch_size",
            ),
            tensor(
                f"{v}embeddings.position_embedding.weight", "v.position_embd.weight",
                f"image_size/patch_size*image_size/patch_size+1,{_CLIP_WIDTH}",
            ),
            *norm(f"{v}pre_layrnorm", "v.pre_ln", _CLIP_WIDTH, REQUIRED),
            *layers(
                *norms("layer_norm1", "layer_norm2", width=_CLIP_WIDTH),
                *linear("self_attn.qkv_proj", "attn_qkv", f"3*{_CLIP_WIDTH},{_CLIP_WIDTH}", REQUIRED),
                *linear("self_attn.out_proj", "attn_out", f"{_CLIP_WIDTH},{_CLIP_WIDTH}", REQUIRED),
                *mlp(width=_CLIP_WIDTH, ffn=f"4*{_CLIP_WIDTH}"), hf=f"{v}transformer.layers.{{n}}.",
                depth=f"{_CLIP_SIZES}.layers",
            ),
            *_to_text(),
        ),
        f32=_OCR_F32, ignored=(".position_ids",),
        keys=sees(
            *_sam_keys(max_tiles), projector("deepseekocr"), Key("vision.image_size", (f"{_CLIP}.image_size",)),
            Key("vision.patch_size", (f"{_CLIP}.patch_size",)), Key("vision.embedding_length", (f"{_CLIP}.width",)),
            Key("vision.block_count", (f"{_CLIP}.layers",)), Key("vision.attention.head_count", (f"{_CLIP}.heads",)),
            Key("vision.feed_forward_length", converter=computed(f"4*{_CLIP_CONFIG}.heads".replace("-", "_"), nothing)),
            Key("", ("preprocessor_config.image_seq_length",), converter=if_given),
            Key("vision.projector.scale_factor", converter=patches_a_token),
        ),
        config={"vision_config.model_type": "vision", "vision_config.model_name": "deeplip_b_l"},
    )


_QWEN = "model.qwen2_model."
_OCR2 = Tower(
    id="deepseek_ocr2_vision", **whole("DeepseekOCR2ForCausalLM", types=("deepseek_vl_v2",)), hf_when=_SAM,
    when="projector_type=deepseekocr2", text="",
    tensors=(
        *_sam(),
        *layers(
            *norms("input_layernorm", "post_attention_layernorm", bias=False, width="dim"),
            *linear("self_attn.q_proj", "attn_q", "dim,dim", REQUIRED),
            *linear("self_attn.k_proj", "attn_k", "2*dim/num_attention_heads,dim", REQUIRED),
            *linear("self_attn.v_proj", "attn_v", "2*dim/num_attention_heads,dim", REQUIRED),
            *linear("self_attn.o_proj", "attn_out", "dim,dim"),
            *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj", bias=False, width="dim"),
            hf=f"{_QWEN}model.model.layers.{{n}}.", depth="vision_config.layers",
        ),
        *norm(f"{_QWEN}model.model.norm", "v.post_ln", "dim"),
        tensor(f"{_QWEN}query_768.weight", "v.resample_query_768.weight", "144,dim"),
        tensor(f"{_QWEN}query_1024.weight", "v.resample_query_1024.weight", "256,dim"), *_to_text(OPTIONAL),
    ),
    f32=_OCR_F32,
    keys=sees(
        *_sam_keys(6), projector("deepseekocr2"), *sizes(embedding_length="width.qwen2-0-5b.dim", block_count="layers"),
        Key("vision.attention.head_count_kv", constant=2),
        Key("", ("preprocessor_config.image_seq_length",), converter=if_given),
        Key("vision.projector.scale_factor", converter=patches_a_token),
    ),
    config={"vision_config.model_type": "vision", "vision_config.model_name": "deepencoderv2"},
)

ROWS: tuple[Architecture, ...] = (
    Architecture(  # DeepSeek's experts with plain attention, as in deepseek-ai/DeepSeek-OCR
        id="deepseek_ocr", gguf="deepseek2-ocr", hf_class="DeepseekOCRForCausalLM", model_type="deepseek_vl_v2",
        hf_classes=(), model_types=(),
        tensors=moe_decoder(
            *attention(), *router_and_experts("moe"),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            *GROUPS, Key("expert_gating_func", ("scoring_func",), converter=gating), DENSE_LAYERS, VOCAB, WIDTH,
            SHARED_COUNT, WEIGHTS_SCALE, Key("expert_weights_norm", ("norm_topk_prob",), "bool", converter=only_true),
            Key("rope.dimension_count", ("qk_rope_head_dim",)),
            Key("attention.sliding_window", ("sliding_window_size", "sliding_window")), EQUAL_HEADS, WHOLE_HEADS,
            NO_BIAS, count="n_routed_experts",
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    _ocr("deepseek_ocr_vision", "DeepseekOCRForCausalLM", "projector_type=deepseekocr&!vision.preproc_max_tiles=32", 9),
    _ocr(
        "unlimited_ocr_vision", "UnlimitedOCRForCausalLM", "projector_type=deepseekocr&vision.preproc_max_tiles=32", 32,
    ),
    _OCR2,
)
