"""Nemotron: dense, pruned layer by layer, and hybrid with Mamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, HEAD_DIM, PAIRS, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, WHOLE_HEADS, attention, class_names, flag,
    gated_mlp, hf_names, layer_eps, linear, must_be, network, norm, plain_mlp, tensor,
)
from aprfmt.arch.blocks.moe import (
    COUNT, GROUPS, MTP, SHARED_COUNT, USED, WEIGHTS_NORM, WEIGHTS_SCALE, WIDTH, draft_layer,
)
from aprfmt.arch.blocks.ssm import dual, mixer
from aprfmt.arch.blocks.tower import IMAGE, TOWER_WIDTH, USE_GELU, layers, mlp, norms, projector, sees, sizes, whole
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope, default, nothing
from aprfmt.arch.converters.common import attention_layers, inner_size, is_list, largest, per_layer, unscaled
from aprfmt.arch.converters.layers import FULL, LINEAR, of_layers
from aprfmt.arch.converters.towers import inverse
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import MOST, OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow, Tower
from aprfmt.errors import CorruptError, RefusedError


_UNSCALED = Key("rope.scaling.type", kind="str", converter=unscaled)


def _per_layer_or_scalar(word: str) -> Converter:
    """A number, or a list if `block_configs` says that layers differ."""

    def to_gguf(value: object, scope: Scope) -> object:
        if isinstance(scope.config("block_configs"), list):
            value = of_layers(scope, word)
        elif word == "kv_heads" and isinstance(listed := scope.config("num_key_value_heads_per_layer"), list):
            value = listed
        kind = "u32[]" if isinstance(value, list) else "u32"
        return None if value is None else GgufKeys({scope.key.gguf: (kind, value)})

    def from_gguf(value: object, scope: Scope) -> object:
        if not isinstance(value, list):
            return DEFAULT if value is None else value
        return max(value, default=None) if word == "heads" else None

    return Converter(to_gguf, from_gguf)


def _listed_kv_from_gguf(value: object, scope: Scope) -> object:
    listed = scope.gguf("attention.head_count_kv")
    return list(listed) if is_list(listed) and not is_list(scope.gguf("attention.head_count")) else DEFAULT


def _blocks_from_gguf(value: object, scope: Scope) -> object:
    """The `block_configs` of layers with these heads, key-value heads and widths."""
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    heads, kv_heads, widths = (scope.gguf(name) for name in names)
    if not (is_list(heads) and is_list(kv_heads) and is_list(widths)):
        return DEFAULT
    hidden = scope.h.hidden_size or 1
    blocks = []
    for item in zip(heads, kv_heads, widths, strict=False):
        n_heads, n_kv, width = (as_int(number, name) or 0 for number, name in zip(item, names, strict=True))
        attention = {
            "n_heads_in_group": n_heads // n_kv if n_kv else None, "no_op": not n_heads,
            "replace_with_linear": bool(n_heads and not n_kv),
        }
        blocks.append(
            {
                "attention": attention,
                "ffn": {"ffn_mult": 3 * width / (2 * hidden) if width else None, "no_op": not width},
            },
        )
    return blocks


def _blocks_normalize(value: object, scope: Scope) -> object:
    if isinstance(value, list) and len(value) != scope.h.num_layers:
        raise CorruptError(f"{scope.name} describes {len(value)} layers, but the network has {scope.h.num_layers}")
    return DEFAULT


def _block_head_dim_to_gguf(value: object, scope: Scope) -> GgufKeys | None:
    """The head size, which cannot be derived from a first layer without heads."""
    if not isinstance(scope.config("block_configs"), list):
        return None
    return GgufKeys({f"attention.{name}_length": ("u32", scope.h.head_dim) for name in ("key", "value")})


block_widths = _per_layer_or_scalar("ffn")
block_heads = _per_layer_or_scalar("heads")
block_kv_heads = _per_layer_or_scalar("kv_heads")
blocks = Converter(from_gguf=_blocks_from_gguf, normalize=_blocks_normalize)
block_head_dim = Converter(_block_head_dim_to_gguf, default)
_SIZES = (*DIMS, GROUPED)
_DECI_BY_BLOCK = {"intermediate_size": block_widths, "num_heads": block_heads, "num_kv_heads": block_kv_heads}
_BLOCK_CONFIGS = "block_configs"


def _puzzle_blocks(scope: Scope) -> list[Mapping[str, object]]:
    blocks = scope.h.extra.get(_BLOCK_CONFIGS)
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise CorruptError(f"{_BLOCK_CONFIGS} is not a list of objects")
    return blocks


def _puzzle_normalize(value: object, scope: Scope) -> object:
    """Layer types and their number, from the blocks."""
    kinds = [block.get("block_type") for block in _puzzle_blocks(scope)]
    return ConfigKeys({"layers_block_type": kinds, "num_hidden_layers": len(kinds)})


def _puzzle_from_gguf(value: object, scope: Scope) -> object:
    names = ("expert_feed_forward_length", "expert_used_count", "attention.head_count_kv")
    widths, used, heads = map(scope.gguf, names)
    if not (isinstance(widths, list) and isinstance(used, list) and isinstance(heads, list)):
        return DEFAULT
    return [
        {"block_type": "moe", "moe_intermediate_size": width, "num_experts_per_tok": n}
        if width else {"block_type": "attention" if n_heads else "mamba"}
        for width, n, n_heads in zip(widths, used, heads, strict=False)
    ]


def _of_blocks(name: str) -> Converter:
    """Each block's value under a name, 0 if absent."""
    return Converter(
        lambda value, scope: [as_int(block.get(name), name) or 0 for block in _puzzle_blocks(scope)],
        lambda value, scope: DEFAULT,
    )


puzzle_widths = _of_blocks("moe_intermediate_size")
puzzle_used = _of_blocks("num_experts_per_tok")
_BLOCK_OF = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _block_types(value: object, scope: Scope) -> object:
    """Nemotron-H's layer types, which older configs spell as a string with one letter each."""
    pattern = scope.h.extra.pop("hybrid_override_pattern", None)
    if value is not None or pattern is None:
        return DEFAULT
    if not isinstance(pattern, str) or not set(pattern) <= set(_BLOCK_OF):
        raise CorruptError(f"hybrid_override_pattern {pattern!r:.40} may contain only the letters {''.join(_BLOCK_OF)}")
    return [_BLOCK_OF[letter] for letter in pattern]


def _block_types_from_gguf(value: object, scope: Scope) -> object:
    """From the KV heads and the MLP widths: a layer without either is a Mamba layer."""
    heads, widths = scope.gguf("attention.head_count_kv"), scope.gguf("feed_forward_length")
    if not isinstance(heads, list) or not isinstance(widths, list):
        return DEFAULT
    mlp = "moe" if scope.gguf("expert_count") else "mlp"
    return ["full_attention" if n else mlp if width else LINEAR for n, width in zip(heads, widths, strict=False)]


def _count_layers(scope: Scope) -> int | None:
    kinds = scope.h.extra.get("layers_block_type") or scope.h.extra.get("hybrid_override_pattern")
    return len(kinds) if isinstance(kinds, list | str) else None


def _block_types_to_gguf(value: object, scope: Scope) -> None:
    """Refuses dense MLPs in MoE networks: llama.cpp loads experts in every layer with an MLP."""
    if isinstance(value, list) and {"mlp", "moe"} <= set(map(str, value)):
        raise RefusedError(
            f"{scope.name} has moe layers and mlp layers (the first is layer {value.index('mlp')}); llama.cpp's "
            f"{scope.row.gguf} loads one of these kinds only"
        )


block_types = Converter(_block_types_to_gguf, _block_types_from_gguf, normalize=_block_types)
mlp_layers = Converter(lambda value, scope: per_layer(value, scope, "mlp"), largest)
moe_layers = Converter(lambda value, scope: per_layer(scope.h.moe_intermediate_size or 0, scope, "moe"), default)
_SSM, _ATTENTION, _MLP, _MOE = "linear_attention|mamba", "full_attention|attention|draft", "mlp", "kind=moe|draft"
_SHARED = "moe_shared_expert_intermediate_size"
_BLOCKS, _CONTEXT, _WIDTH, _FFN, _HEADS = DIMS


def _attention() -> tuple[TensorRow, ...]:
    """Without positions; llama.cpp's converter still permutes Q and K, which has no effect."""
    return (
        *linear("q_proj", "attn_q", "q,hidden", order=PAIRS["q"]),
        *linear("k_proj", "attn_k", "kv,hidden", order=PAIRS["kv"]), *linear("v_proj", "attn_v", "kv,hidden"),
        *linear("o_proj", "attn_output", "hidden,q"),
    )


def _mlp() -> tuple[TensorRow, ...]:
    return (
        *linear("up_proj", "ffn_up", "ffn,hidden", "mlp_bias"),
        *linear("down_proj", "ffn_down", "hidden,ffn", "mlp_bias"),
    )


def _ungated(width: str, need: str) -> tuple[TensorRow, ...]:
    return (
        tensor("experts.{e}.up_proj.weight", "ffn_up_exps.weight", f"moe_ffn,{width}", need),
        tensor("experts.{e}.down_proj.weight", "ffn_down_exps.weight", f"{width},moe_ffn", need),
    )


def _experts() -> tuple[TensorRow, ...]:
    """Experts without a gate and a shared one; they may use a narrower projection of the hidden state."""
    latent = "moe_latent_size"
    return (
        *linear("gate", "ffn_gate_inp", "experts,hidden"),
        tensor("gate.e_score_correction_bias", "exp_probs_b.bias", "experts"),
        *linear("fc1_latent_proj", "ffn_latent_down", f"{latent},hidden", f"mlp_bias&{latent}", need=latent),
        *linear("fc2_latent_proj", "ffn_latent_up", f"hidden,{latent}", f"mlp_bias&{latent}", need=latent),
        *_ungated("hidden", f"!{latent}"),
        *_ungated(latent, latent), *linear("shared_experts.up_proj", "ffn_up_shexp", f"{_SHARED},hidden", "mlp_bias"),
        *linear("shared_experts.down_proj", "ffn_down_shexp", f"hidden,{_SHARED}", "mlp_bias"),
    )


_MIXER = dual(
    "mamba_num_heads*mamba_head_dim", "ssm_state_size", "mamba_num_heads", "n_groups", "conv_kernel", "use_bias",
    "use_conv_bias",
)
_EPS = Key("attention.layer_norm_epsilon", ("layer_norm_epsilon", "norm_eps"), "f32", field="rms_norm_eps")


def _drafts() -> tuple[tuple[str, str], ...]:
    """Attention and experts of an MTP layer are two layers in a checkpoint."""
    layer, first, second = "backbone.layers.{n}.", "mtp.layers.0.", "mtp.layers.1."
    own = ("enorm.", "hnorm.", "eh_proj.", "norm.", *(f"mixer.{name}_proj." for name in "qkvo"))
    renamed = {"final_layernorm.": "shared_head.norm.", "norm.": "post_attention_layernorm."}
    return (
        *((first + name, layer + name) for name in own),
        *((second + name, layer + instead) for name, instead in renamed.items()), (second, layer),
    )


def _row(id: str, feed_forward: tuple[TensorRow, ...], keys: tuple[Key, ...], hf_when: str = "") -> Architecture:
    """One of the two rows of the class: GGUF has a separate architecture for MoE."""
    return Architecture(
        id=id, gguf=id, **class_names("NemotronHForCausalLM", types=("nemotron_h",)),
        prefixes=(("model.", "backbone."),), drafts=_drafts(),
        tensors=network(
            *norm("norm", "attn_norm"), *mixer("mixer.", _MIXER, _SSM), *mixer("mixer.", _attention(), _ATTENTION),
            *feed_forward, *draft_layer(), *norm("post_attention_layernorm", "post_attention_norm", layers="draft"),
            hf="backbone.layers.{n}.", embed="backbone.embeddings", last="backbone.norm_f",
        ),
        keys=(
            replace(_BLOCKS, converter=Converter(derive=_count_layers)), _CONTEXT, _WIDTH, *keys, _HEADS,
            replace(GROUPED, kind="i32[]", converter=attention_layers, draft=MOST, needed=REQUIRED), MTP, _EPS, VOCAB,
            ROPE_DIM, Key("ssm.conv_kernel", ("conv_kernel",)), Key("ssm.state_size", ("ssm_state_size",)),
            Key("ssm.group_count", ("n_groups",)), Key("ssm.inner_size", ("mamba_head_dim",), converter=inner_size),
            Key("ssm.time_step_rank", ("mamba_num_heads",)), Key("rope.scaling.finetuned", kind="bool", constant=False),
            HEAD_DIM, Key("", ("layers_block_type",), converter=block_types),
            Key("", ("hybrid_override_pattern",), "str"), must_be("mlp_hidden_act", "relu2"),
            must_be("mamba_hidden_act", "silu"), must_be("use_bias", False), flag("use_conv_bias"),
            flag("mlp_bias"), Key("", ("time_step_min", "mamba_dt_min"), "f32"),
        ),
        differs=(Difference("llama.cpp does not raise time steps to time_step_min", "least_step"),),
        hf_when=hf_when,
    )


_MOE_ROW = _row(
    "nemotron_h_moe", (*mixer("mixer.", _experts(), _MOE), *mixer("mixer.", _mlp(), _MLP)),
    (
        Key("feed_forward_length", kind="i32[]", converter=moe_layers, draft=MOST, needed=REQUIRED),
        replace(COUNT, hf=("n_routed_experts",)), USED, *GROUPS, WIDTH,
        Key("expert_shared_feed_forward_length", (_SHARED,)), SHARED_COUNT, WEIGHTS_NORM, WEIGHTS_SCALE,
        Key("moe_latent_size", ("moe_latent_size",)),
    ),
    hf_when="layer_types=moe",
)
_BY_BLOCK = {
    "feed_forward_length": Key("feed_forward_length", kind="i32[]", converter=puzzle_widths, needed=REQUIRED),
    "expert_feed_forward_length": Key("expert_feed_forward_length", kind="i32[]", converter=puzzle_widths),
    "expert_used_count": Key("expert_used_count", kind="i32[]", converter=puzzle_used),
}
_PUZZLE = replace(  # as in nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-BF16: each block has its own number of experts
    _MOE_ROW, id="nemotron_h_puzzle", when="expert_used_count=0", hf_when="",
    **class_names("NemotronHPuzzleForCausalLM", types=("nemotron_h_puzzle",)), drafts=(),
    tensors=tuple(row for row in _MOE_ROW.tensors if row.layers != "draft"),
    keys=(
        *(_BY_BLOCK.get(key.gguf, key) for key in _MOE_ROW.keys if key is not MTP),
        Key("", ("block_configs",), converter=Converter(nothing, _puzzle_from_gguf, normalize=_puzzle_normalize)),
    ),
)
_V = "vision_model.radio_model.model."
_PATCHES = f"{_V}patch_generator."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="nemotron", gguf="nemotron", **hf_names("Nemotron", "nemotron"),
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED, value="plus_one"),
            *attention("attention_bias", "attention_bias"),
            *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED, value="plus_one"),
            *plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"), norm_bias=REQUIRED, norm_value="plus_one",
        ),
        keys=(
            *DIMS, GROUPED, ROPE, layer_eps("norm_eps"), replace(RMS_EPS, hf=("norm_eps",)), HEAD_DIM, VOCAB, ROPE_DIM,
            _UNSCALED, WHOLE_HEADS, flag("attention_bias"), flag("mlp_bias"), must_be("hidden_act", "relu2"),
        ),
    ),
    _row(
        "nemotron_h", mixer("mixer.", _mlp(), _MLP),
        (replace(_FFN, kind="i32[]", converter=mlp_layers, needed=REQUIRED),),
    ),
    _MOE_ROW,
    _PUZZLE,
    # As Deci/DeciLM-7B and nvidia/Llama-3_1-Nemotron-51B-Instruct have it.
    Architecture(
        id="deci", gguf="deci", **hf_names("DeciLM", "nemotron-nas", also=("deci",)), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm", layers="heads"), *attention(permuted=True, layers="kv_heads"),
            *linear("self_attn.linear_attn", "attn_output", "hidden,hidden", layers="heads&!kv_heads"),
            *norm("post_attention_layernorm", "ffn_norm", layers="ffn"), *gated_mlp(layers="ffn"),
        ),
        keys=(
            *(
                replace(key, kind="u32[]", converter=_DECI_BY_BLOCK[key.field]) if key.field in _DECI_BY_BLOCK else key
                for key in _SIZES
            ),
            Key("", ("num_key_value_heads_per_layer",), "u32[]", converter=Converter(from_gguf=_listed_kv_from_gguf)),
            Key("", ("block_configs",), converter=blocks), Key("attention.key_length", converter=block_head_dim), ROPE,
            RMS_EPS, VOCAB, ROPE_DIM, WHOLE_HEADS, must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
        ),
        differs=(Difference("llama.cpp's deci skips layers that have attention but no MLP", "lone_attention"),),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="nemotron_vl_vision", **whole("NemotronH_Nano_VL_V2", "RADIOModel", types=("NemotronH_Nano_VL_V2",)),
        hf_when="!sound_config", when="projector_type=nemotron_v2_vl",
        tensors=(
            tensor(f"{_PATCHES}cls_token.token", "v.class_embd", f"any_tokens,{TOWER_WIDTH}"),
            tensor(
                f"{_PATCHES}embedder.weight", "v.patch_embd.weight", f"{TOWER_WIDTH},3*patch_size*patch_size",
                gguf_dims=(f"{TOWER_WIDTH},3,patch_size,patch_size",),
            ),
            tensor(f"{_PATCHES}pos_embed", "v.position_embd.weight", f"1,any_positions,{TOWER_WIDTH}"),
            *layers(
                *norms("norm1", "norm2"), *linear("attn.qkv", "attn_qkv", f"3*{TOWER_WIDTH},{TOWER_WIDTH}", REQUIRED),
                *linear("attn.proj", "attn_out", f"{TOWER_WIDTH},{TOWER_WIDTH}", REQUIRED), *mlp(),
                hf=f"{_V}blocks.{{n}}.",
            ),
            *norm("mlp1.0", "mm.model.mlp.0", f"4*{TOWER_WIDTH}"),
            *linear("mlp1.1", "mm.model.mlp.1", f"projector_hidden_size,4*{TOWER_WIDTH}", OPTIONAL),
            *linear("mlp1.3", "mm.model.mlp.3", "hidden,projector_hidden_size", OPTIONAL),
        ),
        made={"v.position_embd.weight": f"grid:{_PATCHES}pos_embed,force_image_size/patch_size"},
        f32=(".position_embd.",),
        keys=sees(
            *sizes(image_size=""), Key("vision.image_size", ("force_image_size",)), *IMAGE, projector("nemotron_v2_vl"),
            Key("vision.attention.layer_norm_epsilon", kind="f32", constant=1e-6), USE_GELU,
            Key("vision.projector.scale_factor", ("downsample_ratio",), converter=inverse),
            Key("", ("projector_hidden_size",)),
        ),
        config={"vision_config.architectures": ["RADIOModel"]},
    ),
)
