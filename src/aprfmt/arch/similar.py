"""Whether a config.json of an unknown class says what that of a known family says, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch import rope
from aprfmt.arch.row import ROPE, WHOLE_HEADS, Architecture
from aprfmt.arch.scopes import TOKEN_IDS, defaults_of, keys_of

AUTO_SIMILAR = "auto-similar"
"""The `--arch` of a class without a row that is a known network in all but name."""

_NEUTRAL = frozenset(
    (
        *TOKEN_IDS, "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id", "architectures",
        "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path",
        "_attn_implementation", "attn_implementation", "tie_word_embeddings", "vocab_size", "quantization_config",
        "use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop",
        "attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop", "dropout", "classifier_dropout",
        "attention_probs_dropout", "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict",
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "id2label", "label2id", "num_labels",
        "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "gradient_checkpointing", "tokenizer_class",
        "max_length", "task_specific_params", "use_bfloat16", "pruned_heads", "tie_encoder_decoder", "finetuning_task",
    )
)  # fmt: skip
"""config.json keys that do not change what a network computes from its weights."""


SIMILAR = (
    "qwen2", "llama", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gemma2", "gemma3_text", "phi3",
    "gpt_neox", "gpt2",
)  # fmt: skip
"""Rows that a class may be in all but name, the first of several that fit: networks that others publish as their own.

Networks with the same tensors that compute something else (in both directions, without rotation, with factors) are not
among them: tensors and keys would not tell them apart.
"""


def differing_keys(row: Architecture, config: Mapping[str, object]) -> list[str]:
    """What keeps a config.json from being one of the row: keys that the row does not know, then those that it needs.

    The latter, epsilon and base of the rotation, are written "no NAME": a class of its own may have other defaults.
    """
    known = _names(row)
    unknown = [name for name, value in config.items() if value is not None and name not in known | _NEUTRAL]
    epsilon = next((key.hf for key in row.keys if key.field == "rms_norm_eps"), ())
    wanted = [epsilon, (*rope.THETAS, "rope_parameters")] if _rotates(row) else [epsilon]
    lacking = [f"no {names[0]}" for names in wanted if names and not config.keys() & {*names}]
    return [*unknown, *lacking]


def _names(row: Architecture) -> set[str]:
    defaults = defaults_of(row, row.model_type)
    names = {name for key in keys_of(row, defaults) for name in key.hf} | {*defaults}
    partial = rope.PARTIAL if row.rotates == WHOLE_HEADS else ()  # its class does not read them
    return (names | rope.NAMES) - {*partial} if _rotates(row) else names


def _rotates(row: Architecture) -> bool:
    return any(ROPE in (key.role, key.gguf) for key in row.keys)
