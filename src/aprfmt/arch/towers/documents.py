"""Towers that read documents: SAM before another transformer, and plain ones with convolutions behind. Data only."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.converter import Converter, Scope, nothing
from aprfmt.arch.converters.towers import optional
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, must_be, norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    SILU,
    WIDTH,
    attention,
    epsilon,
    layers,
    mlp,
    norms,
    patches,
    patches_in_time,
    projector,
    sees,
    sizes,
)
from aprfmt.arch.towers.vit import vision

_CLIP_CONFIG = "vision_config.width.clip-l-14-224"
_TOKENS = 256
"""Tokens of an image of DeepSeek-OCR."""


def _four_a_head(value: object, scope: Scope) -> object:
    heads = scope.size(f"{_CLIP_CONFIG}.heads")
    return 4 * heads if heads else None


def _patches_a_token(value: object, scope: Scope) -> object:
    """Patches that one token stands for in each direction, where they are not the usual four."""
    image, patch = (
        scope.size(f"{_CLIP_CONFIG}.{name}") or scope.size(f"vision_config.{name}")
        for name in ("image_size", "patch_size")
    )
    tokens = isqrt(scope.size("preprocessor_config.image_seq_length") or _TOKENS)
    scale = image // patch // tokens if image and patch and tokens else 0
    return scale if scale not in (0, 4) else None


def _sixteen_tokens(value: object, scope: Scope) -> object:
    side, ratio = scope.size("vision_patch_size"), scope.size("vision_downsample_ratio")
    return 16 * side * ratio if side and ratio else None


four_a_head = Converter(_four_a_head, nothing)
patches_a_token = Converter(_patches_a_token, nothing)
sixteen_tokens = Converter(_sixteen_tokens, nothing)

_HALVES = {"preprocessor_config.image_mean": [0.5, 0.5, 0.5], "preprocessor_config.image_std": [0.5, 0.5, 0.5]}
_CLIP_COLOURS = {
    "preprocessor_config.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "preprocessor_config.image_std": [0.26862954, 0.26130258, 0.27577711],
}

# --- DeepSeek-OCR ---

_SAM = "vision_config.width.sam_vit_b"
_SAM_WIDTH = f"{_SAM}.width"
_NECK = "256"


def _sam() -> tuple[TensorRow, ...]:
    """SAM's encoder, whose layers attend to windows or to the whole image, and the convolutions behind it.

    Tables of relative positions are as long as what a layer attends to, which no config.json says in one place.
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
            *linear("mlp.lin2", "mlp.lin2", f"{width},4*{width}", REQUIRED),
            hf=f"{s}blocks.{{n}}.",
            gguf="v.sam.blk.{n}.",
            depth=f"{_SAM}.layers",
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
        Key("vision.sam.block_count", (f"{_SAM}.layers",)),
        Key("vision.sam.embedding_length", (_SAM_WIDTH,)),
        Key("vision.sam.head_count", (f"{_SAM}.heads",)),
        Key("vision.window_size", ("vision_config.window_size",)),
        Key("vision.preproc_min_tiles", constant=2),
        Key("vision.preproc_max_tiles", constant=max_tiles),
        *IMAGE,
        epsilon("vision", "vision_config.layer_norm_eps"),
        GELU,
        Key("", ("projector_config.input_dim",)),
    )


_OCR_DEFAULTS = {
    **_HALVES,
    **{f"{_SAM}.layers": 12, _SAM_WIDTH: 768, f"{_SAM}.heads": 12},
    **vision(window_size=14, layer_norm_eps=1e-6),
}
_CLIP = "vision_config.width.clip-l-14-224"
_CLIP_SIZES = _CLIP.replace("-", "_")
_CLIP_WIDTH = f"{_CLIP_SIZES}.width"


def _ocr(id: str, hf_class: str, when: str, max_tiles: int) -> Tower:
    """DeepSeek-OCR: SAM's features go into CLIP's transformer, and both of them into the language model."""
    v = "model.vision_model."
    return Tower(
        id=id,
        gguf="clip",
        hf_class=hf_class,
        model_type="deepseek_vl_v2",
        hf_classes=(hf_class,),
        model_types=("deepseek_vl_v2",),
        hf_when=_SAM,
        when=when,
        text="",
        tensors=(
            *_sam(),
            tensor(f"{v}embeddings.class_embedding", "v.class_embd", _CLIP_WIDTH),
            tensor(
                f"{v}embeddings.patch_embedding.weight", "v.patch_embd.weight", f"{_CLIP_WIDTH},3,patch_size,patch_size"
            ),
            tensor(
                f"{v}embeddings.position_embedding.weight",
                "v.position_embd.weight",
                f"image_size/patch_size*image_size/patch_size+1,{_CLIP_WIDTH}",
            ),
            *norm(f"{v}pre_layrnorm", "v.pre_ln", _CLIP_WIDTH, REQUIRED),
            *layers(
                *norms("layer_norm1", "layer_norm2", width=_CLIP_WIDTH),
                *linear("self_attn.qkv_proj", "attn_qkv", f"3*{_CLIP_WIDTH},{_CLIP_WIDTH}", REQUIRED),
                *linear("self_attn.out_proj", "attn_out", f"{_CLIP_WIDTH},{_CLIP_WIDTH}", REQUIRED),
                *mlp(width=_CLIP_WIDTH, ffn=f"4*{_CLIP_WIDTH}"),
                hf=f"{v}transformer.layers.{{n}}.",
                depth=f"{_CLIP_SIZES}.layers",
            ),
            *_to_text(),
        ),
        f32=_OCR_F32,
        ignored=(".position_ids",),
        keys=sees(
            *_sam_keys(max_tiles),
            projector("deepseekocr"),
            Key("vision.image_size", (f"{_CLIP}.image_size",)),
            Key("vision.patch_size", (f"{_CLIP}.patch_size",)),
            Key("vision.embedding_length", (f"{_CLIP}.width",)),
            Key("vision.block_count", (f"{_CLIP}.layers",)),
            Key("vision.attention.head_count", (f"{_CLIP}.heads",)),
            Key("vision.feed_forward_length", converter=four_a_head),
            Key("", ("preprocessor_config.image_seq_length",), converter=optional),
            Key("vision.projector.scale_factor", converter=patches_a_token),
        ),
        defaults={
            "": {
                **_OCR_DEFAULTS,
                **{f"{_CLIP}.image_size": 224, f"{_CLIP}.patch_size": 14, f"{_CLIP}.width": 1024},
                **{f"{_CLIP}.layers": 24, f"{_CLIP}.heads": 16},
            }
        },
        config={"vision_config.model_type": "vision", "vision_config.model_name": "deeplip_b_l"},
    )


_QWEN = "model.qwen2_model."

_OCR2 = Tower(
    id="deepseek_ocr2_vision",
    gguf="clip",
    hf_class="DeepseekOCR2ForCausalLM",
    model_type="deepseek_vl_v2",
    hf_classes=("DeepseekOCR2ForCausalLM",),
    model_types=("deepseek_vl_v2",),
    hf_when=_SAM,
    when="projector_type=deepseekocr2",
    text="",
    tensors=(
        *_sam(),
        *layers(
            *norms("input_layernorm", "post_attention_layernorm", bias=False, width="dim"),
            *linear("self_attn.q_proj", "attn_q", "dim,dim", REQUIRED),
            *linear("self_attn.k_proj", "attn_k", "2*dim/num_attention_heads,dim", REQUIRED),
            *linear("self_attn.v_proj", "attn_v", "2*dim/num_attention_heads,dim", REQUIRED),
            *linear("self_attn.o_proj", "attn_out", "dim,dim"),
            *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj", bias=False, width="dim"),
            hf=f"{_QWEN}model.model.layers.{{n}}.",
            depth="vision_config.layers",
        ),
        *norm(f"{_QWEN}model.model.norm", "v.post_ln", "dim"),
        tensor(f"{_QWEN}query_768.weight", "v.resample_query_768.weight", "144,dim"),
        tensor(f"{_QWEN}query_1024.weight", "v.resample_query_1024.weight", "256,dim"),
        *_to_text(OPTIONAL),
    ),
    f32=_OCR_F32,
    keys=sees(
        *_sam_keys(6),
        projector("deepseekocr2"),
        *sizes(embedding_length="width.qwen2-0-5b.dim", block_count="layers"),
        Key("vision.attention.head_count_kv", constant=2),
        Key("", ("preprocessor_config.image_seq_length",), converter=optional),
        Key("vision.projector.scale_factor", converter=patches_a_token),
    ),
    defaults={
        "": {
            **_OCR_DEFAULTS,
            **vision(image_size=1024, patch_size=16, intermediate_size=4864, num_attention_heads=14, layers=24),
            "vision_config.width.qwen2-0-5b.dim": 896,
        }
    },
    config={"vision_config.model_type": "vision", "vision_config.model_name": "deepencoderv2"},
)

# --- Hunyuan OCR, DeepSeek V4, MiniMax M3, Step 3 ---

_V4_SIDE = "vision_patch_size"
_V4_NAMES = {
    "patch_size": _V4_SIDE,
    "embedding_length": "vision_dim",
    "feed_forward_length": "vision_inter_dim",
    "block_count": "vision_n_layers",
    "attention.head_count": "vision_n_heads",
}
_M3_V = "vision_tower.vision_model."
_M3_TURN = ("each:num_attention_heads,80,2,3,13",)
"""Q and K of a head: halves of three directions each become three directions of two halves; two rows stay."""

TOWERS: tuple[Tower, ...] = (
    _ocr("deepseek_ocr_vision", "DeepseekOCRForCausalLM", "projector_type=deepseekocr&!vision.preproc_max_tiles=32", 9),
    _ocr(
        "unlimited_ocr_vision", "UnlimitedOCRForCausalLM", "projector_type=deepseekocr&vision.preproc_max_tiles=32", 32
    ),
    _OCR2,
    Tower(
        id="hunyuan_vl_vision",
        gguf="clip",
        hf_class="HunYuanVLForConditionalGeneration",
        model_type="hunyuan_vl",
        hf_classes=("HunYuanVLForConditionalGeneration",),
        model_types=("hunyuan_vl",),
        when="projector_type=hunyuanvl",
        text="",
        prefixes=(("model.vit.", "vit."),),
        tensors=(
            *patches("vit.embeddings.patch_embedding"),
            tensor(
                "vit.embeddings.position_embedding.weight",
                "v.position_embd.weight",
                f"max_image_size/patch_size*max_image_size/patch_size+1,{WIDTH}",
                gguf_dims=(f"max_image_size/patch_size*max_image_size/patch_size,{WIDTH}",),
                skip="1",
            ),
            *layers(
                *norms("input_layernorm", "post_attention_layernorm"),
                *attention(names=("q_proj", "k_proj", "v_proj", "o_proj")),
                *mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                hf="vit.layers.{n}.",
            ),
            *norm("vit.perceive.before_rms", "mm.pre_norm", WIDTH),
            tensor(
                "vit.perceive.proj.0.weight", "mm.0.weight", f"2*{WIDTH},{WIDTH},spatial_merge_size,spatial_merge_size"
            ),
            tensor("vit.perceive.proj.0.bias", "mm.0.bias", f"2*{WIDTH}"),
            tensor("vit.perceive.proj.2.weight", "mm.2.weight", f"4*{WIDTH},2*{WIDTH},1,1"),
            tensor("vit.perceive.proj.2.bias", "mm.2.bias", f"4*{WIDTH}"),
            tensor("vit.perceive.image_newline", "v.image_newline", f"4*{WIDTH}"),
            *linear("vit.perceive.mlp", "mm.model.fc", f"hidden,4*{WIDTH}", REQUIRED),
            *norm("vit.perceive.after_rms", "mm.post_norm", "hidden"),
            tensor("vit.perceive.image_begin", "mm.image_begin", "hidden"),
            tensor("vit.perceive.image_end", "mm.image_end", "hidden"),
            tensor("vit.perceive.image_sep", "v.view_seperator", "hidden", OPTIONAL),
        ),
        f32=(".position_embd.",),
        convolutions=("mm.0.weight", "mm.2.weight"),
        keys=sees(
            *sizes(image_size="max_image_size"),
            *IMAGE,
            projector("hunyuanvl"),
            GELU,
            must_be("vision_config.hidden_act", "gelu"),
            epsilon("vision", "vision_config.rms_norm_eps"),
            Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",)),
            Key("vision.image_min_pixels", ("preprocessor_config.min_pixels",)),
            Key("vision.image_max_pixels", ("preprocessor_config.max_pixels",)),
        ),
        defaults={
            "": {
                **_CLIP_COLOURS,
                **vision(max_image_size=2048, patch_size=16, hidden_size=1152, intermediate_size=4304),
                **vision(num_hidden_layers=27, num_attention_heads=16, rms_norm_eps=1e-5, spatial_merge_size=2),
                **vision(hidden_act="gelu"),
                "preprocessor_config.min_pixels": 512 * 512,
                "preprocessor_config.max_pixels": 2048 * 2048,
            }
        },
        config={"vision_config.model_type": "hunyuan_vl_vision"},
    ),
    Tower(
        id="deepseek_v4_vision",
        gguf="clip",
        hf_class="DeepseekV4ForCausalLM",
        model_type="deepseek_v4",
        hf_classes=("DeepseekV4ForCausalLM",),
        model_types=("deepseek_v4",),
        hf_when="vision_n_layers",
        when="projector_type=deepseek4v",
        text="",
        tensors=(
            tensor(
                "vision.patch_embed.proj.weight",
                "v.patch_embd.weight",
                f"vision_dim,3*{_V4_SIDE}*{_V4_SIDE}",
                gguf_dims=(f"vision_dim,3,{_V4_SIDE},{_V4_SIDE}",),
            ),
            tensor("vision.patch_embed.proj.bias", "v.patch_embd.bias", "vision_dim", OPTIONAL),
            *layers(
                *norms("norm1", "norm2", bias=False, width="vision_dim"),
                *linear("attn.wqkv", "attn_qkv", "3*vision_dim,vision_dim", OPTIONAL),
                *linear("attn.wo", "attn_out", "vision_dim,vision_dim", OPTIONAL),
                TensorRow(
                    ("mlp.w1.weight",),
                    ("ffn_gate.weight", "ffn_up.weight"),
                    ("2*vision_inter_dim,vision_dim",),
                    gguf_dims=("vision_inter_dim,vision_dim",) * 2,
                ),
                *linear("mlp.w2", "ffn_down", "vision_dim,vision_inter_dim", OPTIONAL),
                hf="vision.blocks.{n}.",
                depth="vision_n_layers",
            ),
            *norm("vision.norm", "v.post_ln", "vision_dim"),
            *linear(
                "aligner.w1", "mm.1", "any_width,vision_dim*vision_downsample_ratio*vision_downsample_ratio", REQUIRED
            ),
            *linear("aligner.w2", "mm.2", "hidden,any_width", REQUIRED),
            tensor("image_newline", "v.image_newline", "hidden"),
            tensor("image_start", "v.token_embd.img_start", "hidden"),
            tensor("image_end", "v.token_embd.img_end", "hidden"),
            tensor("image_pad", "v.token_embd.img_pad", "hidden"),
        ),
        keys=sees(
            Key("vision.image_size", converter=sixteen_tokens),
            *(Key(f"vision.{gguf}", (name,)) for gguf, name in _V4_NAMES.items()),
            *IMAGE,
            projector("deepseek4v"),
            Key("vision.attention.layer_norm_epsilon", kind="f32", constant=1e-6),
            SILU,
            Key("vision.projector.scale_factor", ("vision_downsample_ratio",)),
            Key("vision.image_min_pixels", ("vision_min_pixels",)),
            must_be("vision_max_n_token", 384),
            must_be("vision_max_wh_ratio", 8),
            must_be("vision_rope_theta", 10000.0),
        ),
        defaults={"": {**_HALVES, "vision_max_n_token": 384, "vision_max_wh_ratio": 8, "vision_rope_theta": 10000.0}},
    ),
    Tower(
        id="minimax_m3_vision",
        gguf="clip",
        hf_class="MiniMaxM3SparseForConditionalGeneration",
        model_type="minimax_m3_vl",
        hf_classes=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration"),
        model_types=("minimax_m3_vl",),
        when="projector_type=minimax_m3",
        tensors=(
            *patches_in_time(f"{_M3_V}embeddings.patch_embedding"),
            *norm(f"{_M3_V}pre_layrnorm", "v.pre_ln", WIDTH, REQUIRED),
            *layers(
                *norms("layer_norm1", "layer_norm2"),
                *attention(order=_M3_TURN),
                *mlp(),
                hf=f"{_M3_V}encoder.layers.{{n}}.",
            ),
            *linear("multi_modal_projector.linear_1", "mm.1", f"projector_hidden_size,{WIDTH}", REQUIRED),
            *linear("multi_modal_projector.linear_2", "mm.2", "hidden,projector_hidden_size", REQUIRED),
            *linear(
                "patch_merge_mlp.linear_1",
                "mm.merger.fc1",
                "projector_hidden_size,hidden*spatial_merge_size*spatial_merge_size",
                REQUIRED,
            ),
            *linear("patch_merge_mlp.linear_2", "mm.merger.fc2", "hidden,projector_hidden_size", REQUIRED),
        ),
        keys=sees(
            *sizes(),
            *IMAGE,
            projector("minimax_m3"),
            GELU,
            epsilon("vision", "vision_config.layer_norm_eps"),
            Key(
                "vision.spatial_merge_size",
                ("vision_config.img_token_compression_config.spatial_merge_size", "vision_config.spatial_merge_size"),
            ),
            Key("", ("projector_hidden_size",)),
        ),
        defaults={
            "": {
                **_CLIP_COLOURS,
                **vision(image_size=2016, patch_size=14, hidden_size=1280, intermediate_size=5120),
                **vision(num_hidden_layers=32, num_attention_heads=16, layer_norm_eps=1e-5),
                "vision_config.img_token_compression_config.spatial_merge_size": 2,
            }
        },
        config={"vision_config.model_type": "minimax_m3_vl_vision"},
    ),
)
