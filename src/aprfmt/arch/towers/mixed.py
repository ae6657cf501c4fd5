"""Towers that other towers do not look like: experts in some layers, layers that stay behind. Data only."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.towers import text_width
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, must_be, norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    SILU,
    WIDTH,
    attention,
    epsilon,
    hears,
    layers,
    mlp,
    norms,
    patches,
    projector,
    sees,
    sizes,
)
from aprfmt.arch.towers.vit import vision
from aprfmt.errors import RefusedError


def _counts_to(value: object, scope: Scope) -> object:
    """Numbers of experts a layer; a config says -1 where there are none."""
    if not isinstance(value, list) or not all(type(count) is int for count in value):
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a list of numbers of experts")
    return [max(0, count) for count in value]


def _all_but_last_to(value: object, scope: Scope) -> object:
    depth = as_int(value, scope.name)
    return depth - 1 if depth else None


def _all_but_last_from(value: object, scope: Scope) -> object:
    depth = as_int(value, scope.name)
    return depth + 1 if depth is not None else DEFAULT


def _patch(scope: Scope) -> int:
    """Pixels along one side of a patch, which only the preprocessor says."""
    return scope.size("preprocessor_config.patch_size") or as_int(scope.gguf("vision.patch_size"), scope.name) or 0


def _grid_to(value: object, scope: Scope) -> object:
    """The side of the image whose patches have a learned position each."""
    positions, patch = as_int(value, scope.name) or 0, _patch(scope)
    if isqrt(positions) ** 2 != positions:
        raise RefusedError(f"{scope.name} is {positions}; llama.cpp's positions are those of a square image")
    return isqrt(positions) * patch or None


def _grid_from(value: object, scope: Scope) -> object:
    side, patch = as_int(value, scope.name) or 0, _patch(scope)
    return (side // patch) ** 2 if side and patch else DEFAULT


def _patches_to(value: object, scope: Scope) -> object:
    return (as_int(value, scope.name) or 0) * _patch(scope) ** 2 or None


def _patches_from(value: object, scope: Scope) -> object:
    pixels, patch = as_int(value, scope.name) or 0, _patch(scope)
    return pixels // patch**2 if pixels and patch else DEFAULT


counts = Converter(_counts_to)
all_but_last = Converter(_all_but_last_to, _all_but_last_from)
grid_of_patches = Converter(_grid_to, _grid_from)
pixels_of_patches = Converter(_patches_to, _patches_from)

_V = "vision_encoder."
_P = "model.vision_tower.vision_tower.vision_model."
_A = "audio_encoder.dots_encoder.speech_encoder."
_WHISPER = "audio_config.whisper_config"
_EXPERTS = "vision_config.pyramid_num_routed"
_MERGED = "spatial_merge_size*spatial_merge_size*embed_dim"


def _of_image(gguf: str, name: str, kind: str = "u32") -> Key:
    """A key of the preprocessor, which has those of images in an object of their own."""
    return Key(gguf, (f"preprocessor_config.vision_config.{name}", f"preprocessor_config.{name}"), kind)


def _stem() -> tuple[TensorRow, ...]:
    """Three convolutions over time and frequency."""
    many = "downsample_hidden_size"
    return tuple(
        row
        for n, n_in in ((1, "1"), (2, many), (3, many))
        for row in (
            tensor(f"{_A}conv2d{n}.weight", f"a.conv2d.{n}.weight", f"{many},{n_in},3,3"),
            tensor(f"{_A}conv2d{n}.bias", f"a.conv2d.{n}.bias", many),
        )
    )


def _gate_and_up(end: str, dims: str) -> TensorRow:
    """Gate over up in a checkpoint."""
    return TensorRow((f"fc1.{end}",), (f"ffn_gate.{end}", f"ffn_up.{end}"), (f"2*{dims}",), gguf_dims=(dims, dims))


def _phi4_layer(where: str) -> tuple[TensorRow, ...]:
    rows = (*norms("layer_norm1", "layer_norm2"), *attention(), *mlp())
    return tuple(replace(row, layers=where) for row in rows)


def _behind(*rows: TensorRow) -> tuple[TensorRow, ...]:
    """The rows of tensors for which a GGUF has no place and which a checkpoint may lack."""
    return tuple(replace(row, gguf=(), gguf_dims=(), need=OPTIONAL) for row in rows)


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="dots3_note_towers",
        gguf="clip",
        hf_class="Dots3NoteForConditionalGeneration",
        model_type="dots3_note",
        hf_classes=("Dots3NoteForConditionalGeneration", "Dots3NoteForCausalLM"),
        model_types=("dots3_note",),
        when="vision.projector_type=dots3note_v",
        text="",
        prefixes=((f"model.{_V}", _V), ("model.audio_encoder.", "audio_encoder.")),
        tensors=(
            *patches(f"{_V}patch_embed.proj", width="embed_dim"),
            *norm(f"{_V}patch_embed.norm", "v.pre_ln", "embed_dim"),
            *layers(
                *norms("norm_1", "norm_2", bias=False, width="embed_dim"),
                *linear("attn.qkv", "attn_qkv", "3*embed_dim,embed_dim"),
                *norm("attn.q_norm", "attn_q_norm", "embed_dim/num_attention_heads"),
                *norm("attn.k_norm", "attn_k_norm", "embed_dim/num_attention_heads"),
                *linear("attn.proj", "attn_out", "embed_dim,embed_dim"),
                *(
                    tensor(f"mlp.{hf}.weight", f"ffn_{name}.weight", dims, layers="!pyramid")
                    for hf, name, dims in (
                        ("fc1", "gate", "intermediate_size,embed_dim"),
                        ("fc3", "up", "intermediate_size,embed_dim"),
                        ("fc2", "down", "embed_dim,intermediate_size"),
                    )
                ),
                tensor("mlp.gate_weight", "ffn_gate_inp.weight", f"{_EXPERTS},embed_dim", layers="pyramid"),
                tensor("mlp.router_bias", "exp_probs_b.weight", _EXPERTS, layers="pyramid"),
                *(
                    TensorRow(
                        (f"mlp.experts.{{e}}.{hf}.weight",),
                        (f"ffn_{name}_exps.weight",),
                        (dims,),
                        layers="pyramid",
                        count=_EXPERTS,
                    )
                    for hf, name, dims in (
                        ("fc1", "gate", "moe_intermediate_size,embed_dim"),
                        ("fc3", "up", "moe_intermediate_size,embed_dim"),
                        ("fc2", "down", "embed_dim,moe_intermediate_size"),
                    )
                ),
                hf=f"{_V}blocks.{{n}}.",
            ),
            *norm(f"{_V}post_trunk_norm", "mm.post_norm", "embed_dim"),
            *norm(f"{_V}adapter.ln_q", "mm.input_norm", "embed_dim", REQUIRED),
            *linear(f"{_V}adapter.mlp.0", "mm.0", f"{_MERGED},{_MERGED}", REQUIRED),
            *linear(f"{_V}adapter.mlp.2", "mm.2", f"hidden,{_MERGED}", REQUIRED),
            *_stem(),
            *linear(f"{_A}conv_out", "a.conv_out", "d_model,num_mel_bins/8*downsample_hidden_size"),
            *layers(
                *norms("self_attn_layer_norm", "final_layer_norm", bias=False, width="d_model"),
                *linear("self_attn.q_proj", "attn_q", "d_model,d_model", REQUIRED),
                *linear("self_attn.k_proj", "attn_k", "d_model,d_model"),
                *linear("self_attn.v_proj", "attn_v", "d_model,d_model", REQUIRED),
                *linear("self_attn.out_proj", "attn_out", "d_model,d_model", REQUIRED),
                _gate_and_up("weight", "encoder_ffn_dim,d_model"),
                _gate_and_up("bias", "encoder_ffn_dim"),
                *linear("fc2", "ffn_down", "d_model,encoder_ffn_dim", REQUIRED),
                hf=f"{_A}layers.{{n}}.",
                gguf="a.blk.{n}.",
                depth="encoder_layers",
            ),
            *norm(f"{_A}layer_norm", "a.post_ln", "d_model"),
            *norm("audio_encoder.audio_adapter.proj.0", "mm.a.norm_pre", "d_model", REQUIRED),
            *linear("audio_encoder.audio_adapter.proj.1", "mm.a.mlp.1", "hidden,d_model", REQUIRED),
            *linear("audio_encoder.audio_adapter.proj.3", "mm.a.mlp.3", "hidden,hidden", REQUIRED),
        ),
        f32=(".ffn_gate_inp.", ".exp_probs_b.", ".conv2d.", "a.conv_out."),
        keys=(
            *sees(
                *sizes(image_size="", embedding_length="embed_dim", head_count=("num_attention_heads", "num_heads")),
                Key("vision.image_size", constant=0),
                Key("", ("vision_config.hidden_size",), converter=text_width),
                _of_image("vision.image_mean", "image_mean", "f32[]"),
                _of_image("vision.image_std", "image_std", "f32[]"),
                projector("dots3note_v", part="vision"),
                SILU,
                epsilon("vision", "vision_config.rms_norm_eps"),
                Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",)),
                _of_image("vision.image_min_pixels", "min_pixels"),
                _of_image("vision.image_max_pixels", "max_pixels"),
                Key("vision.expert_count_per_layer", (_EXPERTS,), "i32[]", converter=counts),
                Key("vision.expert_used_count", ("vision_config.capacity_factor",)),
                Key("", ("vision_config.moe_intermediate_size",)),
                must_be("vision_config.adapter_type", "patch_merger"),
                must_be("vision_config.pre_pixel_shuffle", True),
                must_be("vision_config.use_qk_norm", True),
                must_be("vision_config.router_scoring_func", "sigmoid"),
                must_be("vision_config.router_scale", 1.0),
            ),
            *hears(
                Key("audio.embedding_length", (f"{_WHISPER}.d_model",)),
                Key("audio.feed_forward_length", (f"{_WHISPER}.encoder_ffn_dim",)),
                Key("audio.block_count", (f"{_WHISPER}.encoder_layers",)),
                Key("audio.attention.head_count", (f"{_WHISPER}.encoder_attention_heads",)),
                projector("dots3note_a", part="audio"),
                Key("audio.num_mel_bins", (f"{_WHISPER}.num_mel_bins",)),
                Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-6),
                Key("", ("audio_config.downsample_hidden_size",)),
                must_be(f"{_WHISPER}.activation_function", "swiglu"),
                must_be("audio_config.use_conv2d_stem", True),
                must_be("audio_config.use_rope", True),
                must_be("audio_config.use_rms_norm", True),
                must_be("audio_config.merge_factor", 1),
                must_be("audio_config.chunk_seconds", 60),
                must_be("audio_config.rope_parameters.partial_rotary_factor", 0.5),
                must_be("audio_config.rope_parameters.rope_theta", 10000.0),
            ),
        ),
        defaults={
            "": {
                **vision(embed_dim=1536, intermediate_size=4224, num_hidden_layers=42, num_attention_heads=24),
                **vision(patch_size=14, spatial_merge_size=2, rms_norm_eps=1e-5, moe_intermediate_size=2112),
                **vision(pyramid_num_routed=[-1] * 25 + [*range(4, 65, 4), 64], capacity_factor=2),
                **vision(adapter_type="patch_merger", pre_pixel_shuffle=True, use_qk_norm=True),
                **vision(router_scoring_func="sigmoid", router_scale=1.0),
                **{f"{_WHISPER}.d_model": 1280, f"{_WHISPER}.encoder_ffn_dim": 5120, f"{_WHISPER}.encoder_layers": 32},
                **{f"{_WHISPER}.encoder_attention_heads": 20, f"{_WHISPER}.num_mel_bins": 128},
                **{f"{_WHISPER}.activation_function": "swiglu", "audio_config.downsample_hidden_size": 480},
                **{f"audio_config.use_{name}": True for name in ("conv2d_stem", "rope", "rms_norm")},
                **{"audio_config.merge_factor": 1, "audio_config.chunk_seconds": 60},
                **{
                    f"audio_config.rope_parameters.{k}": v
                    for k, v in (("partial_rotary_factor", 0.5), ("rope_theta", 10000.0))
                },
            }
        },
        config={"vision_config.temporal_patch_size": 1, "vision_config.use_bias": False},
    ),
    Tower(
        id="phi4_vision",
        gguf="clip",
        hf_class="Phi4ForCausalLMV",
        model_type="phi4-siglip",
        hf_classes=("Phi4ForCausalLMV",),
        model_types=("phi4-siglip",),
        when="projector_type=phi4",
        text="",
        prefixes=(("vision_tower.", "model.vision_tower.vision_tower."), ("mm_projector.", "model.mm_projector.")),
        tensors=(
            tensor(
                f"{_P}embeddings.patch_embedding.weight",
                "v.patch_embd.weight",
                f"{WIDTH},3*patch_size*patch_size",
                gguf_dims=(f"{WIDTH},3,patch_size,patch_size",),
                columns=("swap:1,patch_size*patch_size,3",),
            ),
            tensor(f"{_P}embeddings.patch_embedding.bias", "v.patch_embd.bias", WIDTH),
            tensor(f"{_P}embeddings.position_embedding.weight", "v.position_embd.weight", f"num_patches,{WIDTH}"),
            *layers(*_phi4_layer("!unread"), hf=f"{_P}encoder.layers.{{n}}."),
            *_behind(*layers(*_phi4_layer("unread"), hf=f"{_P}encoder.layers.{{n}}.")),
            *_behind(
                *norm(f"{_P}post_layernorm", "", WIDTH, REQUIRED),
                tensor(f"{_P}head.probe", "", f"1,1,{WIDTH}"),
                tensor(f"{_P}head.attention.in_proj_weight", "", f"3*{WIDTH},{WIDTH}"),
                tensor(f"{_P}head.attention.in_proj_bias", "", f"3*{WIDTH}"),
                *linear(f"{_P}head.attention.out_proj", "", f"{WIDTH},{WIDTH}", REQUIRED),
                *norm(f"{_P}head.layernorm", "", WIDTH, REQUIRED),
                *linear(f"{_P}head.mlp.fc1", "", f"intermediate_size,{WIDTH}", REQUIRED),
                *linear(f"{_P}head.mlp.fc2", "", f"{WIDTH},intermediate_size", REQUIRED),
            ),
            *linear("model.mm_projector.0", "mm.0", f"hidden,{WIDTH}", REQUIRED),
            *linear("model.mm_projector.2", "mm.2", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            Key("vision.patch_size", ("preprocessor_config.patch_size",)),
            *sizes(image_size="", patch_size="", block_count=""),
            Key("vision.block_count", ("vision_config.num_hidden_layers",), converter=all_but_last),
            Key("vision.image_size", ("vision_config.num_patches",), converter=grid_of_patches),
            *IMAGE,
            projector("phi4"),
            Key(
                "vision.image_min_pixels",
                ("preprocessor_config.min_num_patches", "min_num_patches"),
                converter=pixels_of_patches,
            ),
            Key(
                "vision.image_max_pixels",
                ("preprocessor_config.max_num_patches", "max_num_patches"),
                converter=pixels_of_patches,
            ),
            GELU,
            epsilon("vision", "vision_config.layer_norm_eps"),
        ),
        defaults={
            "": {
                **vision(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
                **vision(num_patches=256, layer_norm_eps=1e-6),
            }
        },
        config={"vision_config.model_type": "siglip2_vision_model"},
    ),
)
