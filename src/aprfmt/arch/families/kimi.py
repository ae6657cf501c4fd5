"""Kimi."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EXPERTS, GROUPED, RMS_EPS, SILU, VOCAB, class_names, experts, flag, gated_mlp, hf_names, linear, must_be,
    norm, rename, tensor,
)
from aprfmt.arch.blocks.delta import delta_attention, low_rank
from aprfmt.arch.blocks.mla import LATENT_SIZES, latent_attention
from aprfmt.arch.blocks.moe import DENSE_LAYERS, SIGMOID, WEIGHTS_SCALE, moe_decoder, packed_experts, shared_expert
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, epsilon, fused_attention, layers, mlp, norms, patches, projector, sees, sizes, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope, implied, nothing, refuse_if
from aprfmt.arch.converters.common import absent_1, computed, leading_dense, mla_value_width
from aprfmt.arch.converters.hybrid import attending, hybrid_kinds, kda_heads, latent_layers
from aprfmt.arch.converters.layers import FULL
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import PRODUCT, REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


_KDA_CONFIG = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def kda_config_from_gguf(value: object, scope: Scope) -> object:
    """The object in which Kimi's own code and llama.cpp's converter expect what transformers has at the top level."""
    kinds = layer_kinds(scope.h.extra)
    if kinds is None:
        return DEFAULT
    numbers = {name: scope.h.extra.get(key) for name, key in _KDA_CONFIG.items()}
    full = [i + 1 for i, kind in enumerate(kinds) if kind == FULL]
    kda = [i + 1 for i, kind in enumerate(kinds) if kind != FULL]
    return {**as_mapping(value), **numbers, "full_attn_layers": full, "kda_layers": kda}


kda_config = Converter(nothing, kda_config_from_gguf, normalize=kda_config_from_gguf)


def _kda_layers_normalize(value: object, scope: Scope) -> object:
    """From the list of attention layers, counted from 1; by default every fourth."""
    n_layers = scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    listed = as_mapping(scope.h.extra.get("linear_attn_config")).get("full_attn_layers")
    if listed is None:
        return hybrid_kinds(range(4, n_layers, 4), n_layers)
    return hybrid_kinds([i - 1 for i in listed if isinstance(i, int)] if isinstance(listed, list) else [], n_layers)


def _kda_layers_from_gguf(value: object, scope: Scope) -> object:
    found, n_layers = attending(scope), scope.h.num_layers
    return DEFAULT if found is None or n_layers is None else hybrid_kinds(found, n_layers)


def _k3_config(value: object, scope: Scope) -> object:
    """The same, with what only the third Kimi has there; absent means no MTP layers."""
    if not scope.h.extra.get("num_nextn_predict_layers"):
        scope.h.extra.pop("num_nextn_predict_layers", None)
    found = kda_config_from_gguf(value, scope)
    if not isinstance(found, dict):
        return found
    bound = scope.h.extra.get("linear_lower_bound")
    return {"use_full_rank_gate": True, **({"gate_lower_bound": bound} if bound is not None else {}), **found}


kda_layers = Converter(nothing, _kda_layers_from_gguf, normalize=_kda_layers_normalize)
k3_config = Converter(
    refuse_if(
        lambda value, scope: as_mapping(value).get("use_full_rank_gate") is False,
        "{name}: llama.cpp's {gguf} supports full-rank gates only",
    ),
    _k3_config, normalize=_k3_config,
)
one_group = implied(lambda scope: 1, "{name} is {value}: llama.cpp's {gguf} does not support expert groups")
no_low_rank = Converter(
    refuse_if(
        lambda value, scope: value is not None, "{name} is {value}: llama.cpp's {gguf} supports full-rank queries only",
    ),
)
_KDA, _ATTENTION = "linear_attention", "full_attention"
_HEADS, _SIZE, _KERNEL = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
_INNER = f"{_HEADS}*{_SIZE}"
_MLA = tuple(replace(row, layers=_ATTENTION) for row in latent_attention())
_MOE = (
    *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
    tensor("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias", "experts", layers="moe"),
    *shared_expert("block_sparse_moe.shared_experts", "num_shared_experts*moe_ffn", layers="moe"),
    *gated_mlp(layers="dense"), *gated_mlp(hf="block_sparse_moe", layers="dense"),  # as saved by transformers
)
_COUNT, _USED, _WIDTH = EXPERTS
_SIZES = (
    *rename(DIMS, max_position_embeddings=("model_max_length", "max_position_embeddings")),
    replace(GROUPED, kind="i32[]", converter=latent_layers, needed=REQUIRED), RMS_EPS,
    *rename(
        (_COUNT, _USED), num_experts=("num_experts", "num_local_experts"),
        num_experts_per_tok=("num_experts_per_token", "num_experts_per_tok"),
    ),
    Key("expert_group_count", ("num_expert_group", "n_group"), converter=one_group),
    Key("expert_group_used_count", ("topk_group",), converter=absent_1), SIGMOID,
    must_be("moe_router_activation_func", "sigmoid"), must_be("moe_layer_freq", 1), VOCAB,
    Key("ssm.conv_kernel", (_KERNEL, "linear_attn_config.short_conv_kernel_size")),
    Key("kda.head_dim", (_SIZE, "linear_attn_config.head_dim")),
    Key("", (_HEADS, "linear_attn_config.num_heads"), converter=kda_heads), *LATENT_SIZES,
    must_be("mla_use_nope", True), _WIDTH, Key("expert_shared_count", ("num_shared_experts", "n_shared_experts")),
    DENSE_LAYERS, Key("", ("mlp_layer_types",), "str[]", converter=leading_dense), WEIGHTS_SCALE,
    Key("", ("layer_types",), converter=kda_layers), Key("", ("linear_attn_config",), converter=kda_config),
)
_LATENT = "routed_expert_hidden_size"
_K3_PACKED = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"],
        "weights": {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
        },
    }},
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    ],
}
_K3_GATES = (
    *linear("g_proj", "ssm_g", f"{_INNER},hidden"),
    # As long as a head; only as many values as heads are read.
    tensor("A_log", "ssm_a", _SIZE, gguf_dims=(_HEADS,), value="minus_exp", cut=f"{_SIZE}-{_HEADS}"),
)


def _product(hf: str, gguf: str) -> tuple[TensorRow, ...]:
    """A norm and a projection to one value, of which only the product is used."""
    names = (f"{hf}_norm.weight", f"{hf}_proj.weight")
    return (TensorRow(names, (f"{gguf}.weight",), ("hidden", "1,hidden"), gguf_dims=("hidden",), value=PRODUCT),)


def _latent_experts() -> tuple[TensorRow, ...]:
    """Experts with fewer inputs and outputs than the hidden size."""
    hf, down, up, names = "block_sparse_moe.", f"{_LATENT},hidden", f"hidden,{_LATENT}", ("w1", "w3", "w2")
    experts_hf = f"{hf}experts.{{e}}."
    in_floats = experts(experts_hf, names, layers="moe")
    return (
        *linear(f"{hf}routed_expert_down_proj", "ffn_routed_down", down, layers="moe"),
        *linear(f"{hf}routed_expert_up_proj", "ffn_routed_up", up, layers="moe"),
        *norm(f"{hf}routed_expert_norm", "ffn_routed_norm", _LATENT, need="latent_moe_use_norm", layers="moe"),
        *packed_experts(experts_hf, names, ("weight_packed", "weight_scale"), "mxfp4", width=_LATENT, layers="moe"),
        *(replace(row, dims=(row.dims[0].replace("hidden", _LATENT),)) for row in in_floats),
    )


_LEAST_PATCHES = 8
"""Minimum number of image patches in Kimi K2.5's GGUF."""


def _merge_kernel_to_gguf(value: object, scope: Scope) -> object:
    sides = {as_int(side, scope.name) for side in value} if isinstance(value, list) else set()
    if len(sides) != 1:
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; llama.cpp merges square groups of patches only",
            hint="use another output format: -o NAME.apr, or -o NAME --format hf",
        )
    return sides.pop()


def _merge_kernel_from_gguf(value: object, scope: Scope) -> object:
    side = as_int(value, scope.name)
    return [side, side] if side else DEFAULT


def _patch_area(scope: Scope) -> int | None:
    side = scope.size("vision_config.patch_size")
    return side * side if side else None


def _pixels_to_gguf(value: object, scope: Scope) -> object:
    patches, area = as_int(value, scope.name), _patch_area(scope)
    return patches * area if patches and area else None


def _pixels_from_gguf(value: object, scope: Scope) -> object:
    pixels, side = as_int(value, scope.name), as_int(scope.gguf("vision.patch_size"), scope.name)
    return pixels // side**2 if pixels and side else DEFAULT


same_sides = Converter(_merge_kernel_to_gguf, _merge_kernel_from_gguf)
position_image = computed("vision_config.init_pos_emb_height*vision_config.patch_size", nothing)
least_pixels = computed(f"{_LEAST_PATCHES}*vision_config.patch_size*vision_config.patch_size", nothing)
patches_to_pixels = Converter(_pixels_to_gguf, _pixels_from_gguf)
_V = "vision_tower."
_GRID = "init_pos_emb_height,init_pos_emb_width"
_CELLS = "init_pos_emb_height*init_pos_emb_width"
_K25 = "vt_hidden_size"
_TURN = f"head:2*{_K25},2*vt_num_attention_heads,{_K25}/vt_num_attention_heads/4,2"
"""Q and K: the pairs of the two directions alternate in a checkpoint and are grouped in a GGUF."""


def kimi_k25(projector_names: tuple[str, str]) -> tuple[TensorRow, ...]:
    """MoonViT in three dimensions, of which an image uses two."""
    first, second = projector_names
    blocks = f"{_V}encoder.blocks.{{n}}."
    return (
        *patches(f"{_V}patch_embed.proj", width=_K25),
        tensor(f"{_V}patch_embed.pos_emb.weight", "v.position_embd.weight", f"{_GRID},{_K25}"),
        *layers(
            *norms("norm0", "norm1", width=_K25),
            tensor("wqkv.weight", "attn_qkv.weight", f"3*{_K25},{_K25}", order=(_TURN,)),
            tensor("wqkv.bias", "attn_qkv.bias", f"3*{_K25}", order=(_TURN,)),
            *linear("wo", "attn_out", f"{_K25},{_K25}", REQUIRED),
            *mlp("mlp.fc0", "mlp.fc1", width=_K25, ffn="vt_intermediate_size"), hf=blocks, depth="vt_num_hidden_layers",
        ),
        *norm(f"{_V}encoder.final_layernorm", "v.post_ln", _K25, REQUIRED),
        *norm("mm_projector.pre_norm", "mm.input_norm", _K25, REQUIRED),
        *linear(f"mm_projector.{first}", "mm.1", f"4*{_K25},4*{_K25}", REQUIRED),
        *linear(f"mm_projector.{second}", "mm.2", f"hidden,4*{_K25}", REQUIRED),
    )


K25_KEYS = sees(
    Key("vision.image_size", converter=position_image), Key("vision.patch_size", ("vision_config.patch_size",)),
    Key("vision.embedding_length", ("vision_config.vt_hidden_size", "vision_config.hidden_size")),
    Key("vision.feed_forward_length", ("vision_config.vt_intermediate_size", "vision_config.intermediate_size")),
    Key("vision.block_count", ("vision_config.vt_num_hidden_layers", "vision_config.num_hidden_layers")),
    Key("vision.attention.head_count", ("vision_config.vt_num_attention_heads", "vision_config.num_attention_heads")),
    *IMAGE, projector("kimik25"),
    Key("vision.pos_emb_height", ("vision_config.init_pos_emb_height", "vision_config.pos_emb_height")),
    Key("vision.pos_emb_width", ("vision_config.init_pos_emb_width", "vision_config.pos_emb_width")),
    Key("vision.pos_emb_time", ("vision_config.init_pos_emb_time", "vision_config.pos_emb_time")), USE_GELU,
    must_be("vision_config.projector_hidden_act", "gelu"),
    epsilon("vision", "vision_config.projector_ln_eps", "projection_layer_norm_eps"),
    Key("vision.projector.scale_factor", ("vision_config.merge_kernel_size",), converter=same_sides),
    Key("vision.image_min_pixels", converter=least_pixels),
    Key("vision.image_max_pixels", ("preprocessor_config.in_patch_limit",), converter=patches_to_pixels),
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="kimi_linear", gguf="kimi-linear", **hf_names("KimiLinear", "kimi_linear"),
        tensors=moe_decoder(
            *delta_attention(
                *low_rank("f"), *low_rank("g"), tensor("A_log", "ssm_a", f"1,1,{_HEADS},1", value="minus_exp")
            ),
            *_MLA, *_MOE, *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2"), layers="moe"),
        ),
        keys=(
            *_SIZES, Key("attention.q_lora_rank", ("q_lora_rank",), converter=no_low_rank),
            Key("attention.value_length", ("head_dim",), field="head_dim"), must_be("moe_renormalize", True),
            must_be("attention_bias", False), SILU,
        ),
    ),
    Architecture(
        id="kimi_k3", gguf="kimi-k3", **class_names("KimiK3ForConditionalGeneration", types=("kimi_k3",)),
        inside=("text_config", "kimi_linear"), packed_config=_K3_PACKED,
        prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        tensors=tuple(
            replace(row, hf=tuple(f"language_model.{name}" for name in row.hf))
            for row in (
                *moe_decoder(
                    *_product("self_attention_res", "attn_res_score"), *_product("mlp_res", "ffn_res_score"),
                    *delta_attention(*low_rank("f"), *_K3_GATES), *_MLA,
                    *linear(
                        "self_attn.g_proj", "attn_gate", "heads*v_head_dim,hidden", need="mla_use_output_gate",
                        layers=_ATTENTION,
                    ),
                    *_MOE, *_latent_experts(),
                ),
                *_product("model.output_attn_res", "output_res_score"),
            )
        ),
        keys=(
            *(key for key in _SIZES if key.converter is not kda_config), Key("attention.q_lora_rank", ("q_lora_rank",)),
            Key("attention.value_length", converter=mla_value_width),
            Key("expert_weights_norm", ("moe_renormalize",), "bool"), Key("expert_latent_length", (_LATENT,)),
            Key("kda.gate_lower_bound", ("linear_lower_bound", "linear_attn_config.gate_lower_bound"), "f32"),
            Key("activation.situ_beta", ("activation_situ_beta",), "f32"),
            Key("activation.situ_linear_beta", ("activation_situ_linear_beta",), "f32"),
            Key("attn_res.block_size", ("attn_res_block_size",)), Key("", ("linear_attn_config",), converter=k3_config),
            flag("mla_use_output_gate"), flag("latent_moe_use_norm"), must_be("attention_bias", False),
            must_be("hidden_act", "situ"),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="kimi_vl_vision", **whole("KimiVLForConditionalGeneration", types=("kimi_vl",)),
        when="projector_type=kimivl",
        tensors=(
            *patches(f"{_V}patch_embed.proj"),
            tensor(
                f"{_V}patch_embed.pos_emb.weight", "v.position_embd.weight", f"{_GRID},{TOWER_WIDTH}",
                gguf_dims=(f"{_CELLS},{TOWER_WIDTH}",),
            ),
            *layers(
                *norms("norm0", "norm1"), *fused_attention("", names=("wqkv", "wo")), *mlp("mlp.fc0", "mlp.fc1"),
                hf=f"{_V}encoder.blocks.{{n}}.",
            ),
            *norm(f"{_V}encoder.final_layernorm", "v.post_ln", TOWER_WIDTH, REQUIRED),
            *norm("multi_modal_projector.pre_norm", "mm.input_norm", TOWER_WIDTH, REQUIRED),
            *linear("multi_modal_projector.linear_1", "mm.1", f"4*{TOWER_WIDTH},4*{TOWER_WIDTH}", REQUIRED),
            *linear("multi_modal_projector.linear_2", "mm.2", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *sizes(image_size=""), Key("vision.image_size", constant=64 * 14), *IMAGE, projector("kimivl"), USE_GELU,
            Key("vision.projector.scale_factor", constant=2), must_be("vision_config.merge_kernel_size", [2, 2]),
            epsilon("vision", "vision_config.layer_norm_eps"), Key("", ("vision_config.init_pos_emb_height",)),
            Key("", ("vision_config.init_pos_emb_width",)),
        ),
        config={"vision_config.model_type": "moonvit"},
    ),
    Tower(
        id="kimi_k25_vision", **whole("KimiK25ForConditionalGeneration", types=("kimi_k25",)),
        when="projector_type=kimik25",
        tensors=kimi_k25(("proj.0", "proj.2")), f32=(".position_embd.",), keys=K25_KEYS,
        config={"vision_config.pos_emb_type": "divided_fixed", "vision_config.mm_projector_type": "patchmerger"},
    ),
    Tower(
        id="glm5v_vision", **whole("Glm5vForConditionalGeneration", types=("glm5v",)), when="projector_type=kimik25",
        tensors=kimi_k25(("linear_1", "linear_2")), f32=(".position_embd.",), keys=K25_KEYS,
        config={"vision_config.pos_emb_type": "divided_fixed", "vision_config.mm_projector_type": "patchmerger"},
    ),
)
