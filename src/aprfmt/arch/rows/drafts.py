"""Rows of the architecture table: models that draft tokens for another one, from hidden states of its layers."""

from __future__ import annotations

from aprfmt.arch.row import OPTIONAL, PLUS_ROW, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import DECODER, PAIRS, ROPE_DIM, SILU, VOCAB, block, gated_mlp, linear, norm, tensor

_OWN_VOCABULARY = (
    TensorRow(("d2t",), ("d2t",), ("draft_vocab_size",), OPTIONAL, value=PLUS_ROW),
    TensorRow(("t2d",), (), ("vocab",), OPTIONAL),
)
"""Of a draft with fewer tokens: how far the other model's number of each is from its own, and which ones they are."""

_EAGLE3_DEFAULTS = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    "norm_before_residual": False, "norm_before_fc": False, "attention_bias": False,
}  # fmt: skip


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="eagle3",
        required={"target_layers": "", "target_hidden_size": ""},
        gguf="eagle3",
        hf_class="LlamaForCausalLMEagle3",
        model_type="llama",
        hf_classes=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        model_types=(),
        rope_type=0,
        prefixes=(("layers.0.", "midlayer."), ("model.layers.0.", "midlayer."), ("model.", "")),
        tensors=(
            tensor("embed_tokens.weight", "token_embd.weight", "vocab,hidden", OPTIONAL),
            *linear("fc", "fc", "hidden,3*target_hidden_size"),
            *norm("input_norm", "enc.output_norm", "3*target_hidden_size", need="norm_before_fc"),
            *block(
                *norm("input_layernorm", "attn_norm"),
                *norm("hidden_norm", "attn_norm_2"),
                *linear("self_attn.q_proj", "attn_q", "q,2*hidden", order=PAIRS["q"]),
                *linear("self_attn.k_proj", "attn_k", "kv,2*hidden", order=PAIRS["kv"]),
                *linear("self_attn.v_proj", "attn_v", "kv,2*hidden"),
                *linear("self_attn.o_proj", "attn_output", "hidden,q"),
                *norm("post_attention_layernorm", "ffn_norm"),
                *gated_mlp(),
                hf="midlayer.",
                gguf="blk.0.",
            ),
            *norm("norm", "output_norm"),
            *linear("lm_head", "output", "draft_vocab_size,hidden"),
            *_OWN_VOCABULARY,
        ),
        keys=(
            *DECODER,
            VOCAB,
            ROPE_DIM,
            Key("target_layers", ("eagle_aux_hidden_state_layer_ids",), "i32[]", via="eagle_layers"),
            Key("target_hidden_size", ("target_hidden_size",), via="target_width"),
            Key("norm_before_residual", ("norm_before_residual",), "bool"),
            Key("norm_before_fc", ("norm_before_fc",), "bool"),
            Key("", ("draft_vocab_size",)),
            Key("", ("attention_bias",), "bool", constant=False),
            SILU,
        ),
        defaults={"": _EAGLE3_DEFAULTS},
    ),
)
