"""MiMo."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    SLIDING_LAYERS, WINDOW, convert, gated_mlp, hf_names, linear, must_be, network, norm, rename, tensor,
)
from aprfmt.arch.blocks.hearing import whisper
from aprfmt.arch.blocks.moe import (
    GROUPS, MTP, NO_BIAS, WIDTH, draft_layer, moe_keys, router_and_experts, selection_bias,
)
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_SILU, hears, layers, mlp, norms, patches_in_time, preprocessor, projector, sees, sizes,
    whole,
)
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.converters.common import gating, numbers, shared_rotary_dim, unless_named
from aprfmt.arch.converters.experts import dense_by_tensors
from aprfmt.arch.converters.towers import book_sizes
from aprfmt.arch.converters.windows import hybrid_layers, of_kind
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import MOST, OPTIONAL, REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


_WINDOWED = "swa_num_key_value_heads"


def _heads_by_window_to_gguf(value: object, scope: Scope) -> list[int] | None:
    """Key-value heads per layer: of sliding-window layers, and of the others."""
    full, windowed = as_int(value, scope.name), as_int(scope.h.extra.get(_WINDOWED), _WINDOWED)
    kinds = layer_kinds(scope.h.extra)
    if full is None or windowed is None or kinds is None:
        return None
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _heads_by_window_from_gguf(value: object, scope: Scope) -> object:
    """Those of full-attention layers; without any, half of the others, as transformers doubles them."""
    full, windowed = (of_kind(value, scope, slides=slides) for slides in (False, True))
    if full is not None or windowed is None:
        return full
    return windowed if windowed % 2 else windowed // 2


def _windowed_from_gguf(value: object, scope: Scope) -> object:
    heads = scope.gguf("attention.head_count_kv")
    found = of_kind(heads, scope, slides=True)
    return DEFAULT if found is None else found


def _twice_the_heads(scope: Scope) -> int | None:
    """What transformers' class gives sliding-window layers."""
    return None if scope.h.num_kv_heads is None else 2 * scope.h.num_kv_heads


def _inclusive_window(value: object, scope: Scope) -> object:
    """`sliding_window_size` excludes the last position."""
    size = as_int(scope.h.extra.pop("sliding_window_size", None), "sliding_window_size")
    return DEFAULT if size is None or scope.h.hf_model_type != "mimo_v2_flash" else size + 1


def _fused_to_gguf(value: object, scope: Scope) -> None:
    """FP8 releases store the fused rows in tensor-parallel order."""
    packed = as_mapping(scope.h.extra.get("quantization_config"))
    if value == "fused_qkv" and packed.get("quant_method") == "fp8":
        raise RefusedError(
            f"{scope.name} is {value!r} and the weights are FP8: the rows of qkv_proj are ordered by device, and the "
            "config lacks the number of devices",
            hint="write an .apr or a folder; for a GGUF use the BF16 release",
        )


heads_by_window = Converter(_heads_by_window_to_gguf, _heads_by_window_from_gguf)
fused_by_tensors = Converter(
    _fused_to_gguf, lambda value, scope: "fused_qkv" if "blk.0.attn_qkv.weight" in scope.names else DEFAULT,
)
absent_null = unless_named(None)


def _mimo_attention() -> tuple[TensorRow, ...]:
    """A separate value size; more key-value heads and a sink in sliding-window layers."""
    fused, split, bias = (
        "attention_projection_layout=fused_qkv", "!attention_projection_layout=fused_qkv", "attention_bias",
    )
    rows: list[TensorRow] = []
    for kind, kv in (("full_attention", "kv_heads"), ("sliding_attention|draft", "swa_num_key_value_heads")):
        keys, values = f"{kv}*head_dim", f"{kv}*v_head_dim"
        rows += [
            *linear("self_attn.q_proj", "attn_q", "q,hidden", bias, split, layers=kind),
            *linear("self_attn.k_proj", "attn_k", f"{keys},hidden", bias, split, layers=kind),
            *linear("self_attn.v_proj", "attn_v", f"{values},hidden", bias, split, layers=kind),
            *linear("self_attn.qkv_proj", "attn_qkv", f"q+{keys}+{values},hidden", need=fused, layers=kind),
        ]
    sink = tensor("self_attn.attention_sink_bias", "attn_sinks.weight", "heads", layers="sliding_attention|draft")
    return (*rows, sink, *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim"))


_WHOLE, _WINDOW = -1, 0
"""A GGUF's markers of layers with global and with local attention."""


def _beside(scope: Scope, name: str) -> str:
    return f"{scope.name.rpartition('.')[0]}.{name}"


def _whole_to_gguf(value: object, scope: Scope) -> object:
    """Every n-th layer has global attention."""
    step, depth = as_int(value, scope.name) or 1, scope.size(_beside(scope, "encoder_layers")) or 0
    return [_WHOLE if layer % step == step - 1 else _WINDOW for layer in range(depth)]


def _whole_from_gguf(value: object, scope: Scope) -> object:
    marks = numbers(value, scope.name)
    step = marks.index(_WHOLE) + 1 if _WHOLE in marks else len(marks) + 1
    if [_WHOLE if layer % step == step - 1 else _WINDOW for layer in range(len(marks))] != marks:
        raise RefusedError(
            f"{scope.row.gguf}.{scope.key.gguf} is {marks!r:.60}: full-attention layers are not evenly spaced",
            hint="a config.json of this family cannot express that; check the program that wrote the GGUF",
        )
    return ConfigKeys({scope.name: step, _beside(scope, "hybrid_attention"): True})


def _behind_to_gguf(value: object, scope: Scope) -> object:
    sides = numbers(value, scope.name)
    if len(sides) != 2 or sides[0] <= 0 or sides[1] != 0:
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; llama.cpp supports left context only: [number, 0]",
            hint="use another output format: -o NAME.apr, or -o NAME --format hf",
        )
    return sides[0]


def _behind_from_gguf(value: object, scope: Scope) -> object:
    side = as_int(value, scope.name)
    return [side, 0] if side is not None else DEFAULT


_CODE_BOOKS = "audio_tokenizer.num_quantizers"


def _channels(value: object, scope: Scope) -> object:
    channels, books = as_int(value, scope.name), scope.size(_CODE_BOOKS)
    if channels is not None and books is not None and channels != books:
        raise RefusedError(
            f"{scope.name} is {channels}, but audio_tokenizer/config.json has {books} codebooks",
            hint="the files belong to different models; download the repository again",
        )
    return DEFAULT if channels is None else channels


codebook_sizes = Converter(lambda value, scope: book_sizes(value, scope.size(_beside(scope, "num_quantizers")) or 0))
whole_after_windows = Converter(_whole_to_gguf, _whole_from_gguf)
channels_of_books = Converter(normalize=_channels, derive=lambda scope: scope.size(_CODE_BOOKS))
behind_only = Converter(_behind_to_gguf, _behind_from_gguf)
_V = "visual."
_T = "audio_tokenizer.encoder."
_L = "audio_encoder.input_local_transformer."
_VISION, _AUDIO, _TOKENIZER = "vision_config", "audio_config", "audio_tokenizer"
_Q, _KV = (f"{name}*qk_channels" for name in ("num_heads", "num_key_value_heads"))
_SQUARE = f"4*{TOWER_WIDTH}"
_BOOKS = f"{_T}quantizer.vq.layers"
_FFN = "input_local_intermediate_size"
_FIXED: dict[str, object] = {
    f"{_TOKENIZER}.encoder_skip_layer_id": 3, f"{_TOKENIZER}.rope_theta": 10000, f"{_TOKENIZER}.stride_size": 2,
    f"{_TOKENIZER}.avg_pooler": 2, f"{_TOKENIZER}.encoder_causal": True, f"{_TOKENIZER}.scale_embedding": False,
    f"{_AUDIO}.rope_theta": 640000, f"{_AUDIO}.partial_rotary_factor": 1, f"{_AUDIO}.input_full_attention": True,
    f"{_AUDIO}.add_post_norm": True, f"{_AUDIO}.projection_layers": 2,
}
"""What llama.cpp's network implies, since no key states it."""


def _local() -> tuple[TensorRow, ...]:
    """The small transformer over a group of steps, whose heads llama.cpp takes from the tokenizer's keys."""
    return (
        *layers(
            *norm("input_layernorm", "ln1", "d_model"),
            *(
                row
                for letter in "qkv"
                for row in linear(f"self_attn.{letter}_proj", f"attn_{letter}", "d_model,d_model", REQUIRED)
            ),
            *linear("self_attn.o_proj", "attn_out", "d_model,d_model"),
            *norm("post_attention_layernorm", "ln2", "d_model"),
            *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj", bias=False, width="d_model", ffn=_FFN),
            hf=f"{_L}layers.{{n}}.", gguf="mm.a.local_blk.{n}.", depth="input_local_layers",
        ),
        *norm(f"{_L}norm", "mm.a.local_norm", "d_model"),
        *linear("audio_encoder.projection.mlp.0", "mm.a.mlp.1", "any_wide,group_size*d_model"),
        *linear("audio_encoder.projection.mlp.2", "mm.a.mlp.2", "hidden,any_wide"),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="mimo_v2_flash", gguf="mimo2", **hf_names("MiMoV2Flash", "mimo_v2_flash", "MiMoV2", also=("mimo_v2",)),
        nested_rope=True, drafts=(("model.mtp.layers.{m}.", "model.layers.{n}."),),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *_mimo_attention(),
            *norm("post_attention_layernorm", "ffn_norm", layers="!draft"),
            *norm("pre_mlp_layernorm", "ffn_norm", layers="draft"),
            *router_and_experts("moe&!draft", (selection_bias("moe&!draft"),)), *gated_mlp(layers="dense|draft"),
            *draft_layer(), *norm("final_layernorm", "layer_output_norm", layers="draft"),
        ),
        keys=(
            Key("attention.value_length", ("v_head_dim",)),
            *rename(
                convert(
                    tuple(
                        replace(key, kind="i32[]", draft=MOST) if key.field == "num_kv_heads" else key
                        for key in moe_keys(
                            *(replace(key, allowed=(1,)) for key in GROUPS), WIDTH, count="n_routed_experts"
                        )
                    ),
                    num_kv_heads=heads_by_window,
                ),
                rms_norm_eps=("rms_norm_eps", "layernorm_epsilon"),
            ),
            Key("", ("swa_num_key_value_heads",), converter=Converter(nothing, _windowed_from_gguf, _twice_the_heads)),
            Key("expert_gating_func", ("scoring_func",), converter=gating, allowed=("sigmoid",)),
            Key("rope.dimension_count", converter=shared_rotary_dim),
            replace(WINDOW, converter=Converter(normalize=_inclusive_window)), Key("", ("sliding_window_size",)),
            replace(SLIDING_LAYERS, converter=hybrid_layers, draft=True), Key("", ("hybrid_layer_pattern",), "u32[]"),
            Key("attention.value_scale", ("attention_value_scale",), "f32", converter=absent_null),
            Key("", ("mlp_layer_types",), "str[]", converter=dense_by_tensors), Key("", ("moe_layer_freq",)), MTP,
            must_be("norm_topk_prob", True), Key("", ("routed_scaling_factor",), "f32", allowed=(1.0,)), NO_BIAS,
            must_be("add_swa_attention_sink_bias", True), must_be("add_full_attention_sink_bias", False),
            Key("", ("attention_projection_layout",), "str", converter=fused_by_tensors),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="mimo_v2_towers", **whole("MiMoV2ForCausalLM", types=("mimo_v2",)), when="vision.projector_type=mimovl",
        text="",
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False),
                *linear("attn.qkv", "attn_qkv", f"{_Q}+2*{_KV},{TOWER_WIDTH}", REQUIRED),
                *linear("attn.proj", "attn_out", f"{TOWER_WIDTH},{_Q}", REQUIRED),
                tensor("attn.sinks", "attn_sinks", "num_heads", OPTIONAL, layers="windowed"),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"), hf=f"{_V}blocks.{{n}}.", depth="depth",
            ),
            *norm(f"{_V}merger.ln_q", "v.post_ln", TOWER_WIDTH, OPTIONAL),
            *linear(f"{_V}merger.mlp.0", "mm.0", f"{_SQUARE},{_SQUARE}", OPTIONAL),
            *linear(f"{_V}merger.mlp.2", "mm.2", f"hidden,{_SQUARE}", OPTIONAL),
            *whisper(_T, "d_model", "encoder_ffn_dim", "encoder_layers", positions=False, mel="n_mels"),
            tensor(f"{_T}down_sample_layer.0.weight", "a.downsample.conv.weight", "d_model,d_model,avg_pooler"),
            *norm(f"{_T}down_sample_norm", "a.downsample.norm", "d_model", REQUIRED),
            *layers(
                TensorRow(("_codebook.embed",), (), ("any_entries,d_model",)), hf=f"{_BOOKS}.{{n}}.",
                depth="num_quantizers",
            ),
            TensorRow(
                ("speech_embeddings.{e}.weight",), ("mm.a.code_embd.weight",), ("any_codes,d_model",),
                count="num_quantizers",
            ),
            *_local(),
        ),
        made={"a.rvq.codebook.weight": f"padded_books:{_BOOKS},num_quantizers,{_TOKENIZER}.codebook_size"},
        ignored=("_codebook.cluster_size", "_codebook.embed_avg", "_codebook.inited"),
        f32=("^a.conv1d.", "^a.downsample.conv.", "^a.rvq.codebook.", "^mm.a.code_embd."),
        keys=(
            *sees(
                *sizes("vision", block_count="depth", head_count="num_heads"), *IMAGE,
                projector("mimovl", part="vision"), USE_SILU,
                Key("vision.attention.head_count_kv", (f"{_VISION}.num_key_value_heads",)),
                Key("vision.spatial_merge_size", (f"{_VISION}.spatial_merge_size",), allowed=(2,)),
                Key("vision.window_size", (f"{_VISION}.visual_token_window_size",)),
                Key("vision.wa_pattern_mode", (f"{_VISION}.vit_window_attn_types",), "i32[]"),
                Key("vision.attention.layer_norm_epsilon", (f"{_VISION}.rms_norm_eps",), "f32"),
                preprocessor("vision.image_min_pixels", "min_pixels"),
                preprocessor("vision.image_max_pixels", "max_pixels"), Key("", (f"{_VISION}.qk_channels",)),
            ),
            *hears(
                *sizes(
                    "audio", _TOKENIZER, embedding_length="d_model", feed_forward_length="encoder_ffn_dim",
                    block_count="encoder_layers", head_count="encoder_attention_heads",
                ),
                projector("mimo_audio", part="audio"), Key("audio.num_mel_bins", (f"{_TOKENIZER}.n_mels",)),
                Key("audio.attention.layer_norm_epsilon", (f"{_TOKENIZER}.layer_norm_eps",), "f32"),
                Key("audio.rvq.num_quantizers", (f"{_TOKENIZER}.num_quantizers",)),
                Key("audio.rvq.codebook_size", (f"{_TOKENIZER}.codebook_size",), "i32[]", converter=codebook_sizes),
                Key("", (f"{_TOKENIZER}.hybrid_attention",), "bool", allowed=(True,)),
                Key("audio.wa_pattern_mode", (f"{_TOKENIZER}.swa_per_block",), "i32[]", converter=whole_after_windows),
                Key("audio.window_size", (f"{_TOKENIZER}.encoder_attn_window_size",), converter=behind_only),
                Key("audio.local_block_count", (f"{_AUDIO}.input_local_layers",)),
                Key("audio.local_group_size", (f"{_AUDIO}.group_size",)),
                Key("", (f"{_AUDIO}.audio_channels",), converter=channels_of_books), Key("", (f"{_AUDIO}.{_FFN}",)),
                *(Key("", (path,), allowed=(value,)) for path, value in _FIXED.items()),
            ),
        ),
        files={_TOKENIZER: "audio_tokenizer/config.json"},
    ),
)
