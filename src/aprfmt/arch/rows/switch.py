"""Rows of the architecture table: decoders with adapters of their own, of which a token chooses one."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, NO_SCALES, ROPE_DIM, SCALES, SILU, VOCAB, block, embedding, final_norm, head, hf_names, linear, norm,
    split,
)


one_more = Converter(
        lambda value, scope: value - 1 if isinstance(value, int) and value else None,
        lambda value, scope: value + 1 if isinstance(value, int) else DEFAULT,
    )

_COUNT, _RANK = "num_adapters", "max_lora_rank"
_TURNED = "head_dim/2"


def _adapters(hf: str, slices: dict[str, tuple[str, str]], width: str) -> tuple[TensorRow, ...]:
    """Two matrices an adapter for each part of a projection, behind those of none, which are zeros in a GGUF.

    `slices` are the parts: GGUF name -> (rows, words for the heads whose rows are turned, "" for none).
    """

    def stacked(name: str, gguf: str, rows: str, columns: str, order: tuple[str, ...] = ()) -> TensorRow:
        one, all_of_them = f"{_COUNT},1,{rows},{columns}", f"{_COUNT}+1,{rows},{columns}"
        return TensorRow((name,), (gguf,), (one,), gguf_dims=(all_of_them,), lead=rows, order=order)

    single = len(slices) == 1
    return tuple(
        row
        for i, (gguf, (rows, heads)) in enumerate(slices.items())
        for row in (
            stacked(f"{hf}.lora_A" if single else f"{hf}.lora_A_slices.{i}", f"{gguf}.lora_a", _RANK, width),
            stacked(
                f"{hf}.lora_B" if single else f"{hf}.lora_B_slices.{i}", f"{gguf}.lora_b", rows, _RANK,
                (f"swap:{_COUNT}*{heads},2,{_TURNED}",) if heads else (),
            ),
        )
    )


_PARTS = {"attn_q": ("q", "heads"), "attn_k": ("kv", "kv_heads"), "attn_v": ("kv", "")}
_GATE_UP = {"ffn_gate": ("ffn", ""), "ffn_up": ("ffn", "")}
_BLOCKS, *_OTHERS = DECODER

ROWS: tuple[Architecture, ...] = (
    # As ibm-granite/granite-switch-4.1-3b-preview has it; one of its layers is what chooses, and has no tensors.
    Architecture(
        id="granite_switch", gguf="graniteswitch", **hf_names("GraniteSwitch", "granite_switch"), rope_type=0,
        ignored=(".rotary_emb.inv_freq", "adapter_token_ids", "control_to_substitute_lut"),
        required={
            "logit_scale": "",
            **{f"adapters.{key}": "" for key in ("count", "lora_rank", "token_ids_activate", "token_ids_substitute")},
        },
        tensors=(
            embedding(),
            *block(
                *norm("input_layernorm", "attn_norm"),
                *linear(
                    "self_attn.qkv_proj.base_layer", "attn_qkv", "q+2*kv,hidden",
                    order=(f"head:q+kv,heads+kv_heads,2,{_TURNED}",),
                ),
                *_adapters("self_attn.qkv_proj", _PARTS, "hidden"),
                *linear("self_attn.o_proj.base_layer", "attn_output", "hidden,q"),
                *_adapters("self_attn.o_proj", {"attn_output": ("hidden", "")}, "q"),
                *norm("post_attention_layernorm", "ffn_norm"),
                split(
                    "shared_mlp.input_linear.base_layer.weight", "2*ffn,hidden",
                    {f"{name}.weight": "ffn,hidden" for name in _GATE_UP},
                ),
                *_adapters("shared_mlp.input_linear", _GATE_UP, "hidden"),
                *linear("shared_mlp.output_linear.base_layer", "ffn_down", "hidden,ffn"),
                *_adapters("shared_mlp.output_linear", {"ffn_down": ("hidden", "")}, "ffn"),
                depth="layers-1",
            ),
            *final_norm(), *head(),
        ),
        keys=(
            replace(_BLOCKS, converter=one_more), *_OTHERS, VOCAB, ROPE_DIM, *SCALES,
            Key("expert_used_count", constant=0),
            Key("", ("num_experts_per_tok",)), Key("expert_shared_feed_forward_length", ("shared_intermediate_size",)),
            Key("adapters.count", (_COUNT,)), Key("adapters.lora_rank", (_RANK,)),
            Key("adapters.token_ids_activate", ("adapter_token_ids",), "i32[]"),
            Key("adapters.token_ids_substitute", ("adapter_substitute_token_ids",), "i32[]"),
            Key("adapters.router_gain", ("control_token_gain",), "f32"), SILU,
            Key("expert_count", ("num_local_experts",), constant=0),
        ),
        defaults={"": {**NO_SCALES, "control_token_gain": 15.0, "tie_word_embeddings": True}},
    ),
)
