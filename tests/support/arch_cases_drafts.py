"""Cases of models that draft tokens for another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arch_cases_remote import remote
from arch_models import DIMS, VOCAB, ArchCase

Config = dict[str, Any]

_N_VOCAB, _N_DRAFT = 49152, 64
_LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 12}
# As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has them.
_EAGLE3: Config = {
    **DIMS,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "draft_vocab_size": _N_DRAFT,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
_TOKENS = {"d2t": (_N_DRAFT,)}
_EMBEDDING = {"embed_tokens.weight": (_N_VOCAB, 64)}


def _draft(row: str, model_class: str, config: Config, target: Config, **fields: Any) -> ArchCase:
    (case,) = remote(row, model_class, config, kind="draft", target=target, **fields)
    return case


def _variant(
    case: ArchCase,
    name: str,
    model_class: str = "",
    *,
    optional: Mapping[str, tuple[int, ...]] | None = None,
    **config: Any,
) -> ArchCase:
    return replace(
        case,
        id=f"{case.row}/{name}",
        model_class=model_class or case.model_class,
        config=case.config | config,
        optional=case.optional if optional is None else optional,
    )


_eagle3 = _draft("eagle3", "LlamaForCausalLMEagle3", _EAGLE3, _LLAMA, optional=_TOKENS)
# as RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3 has them
_OF_LAYERS = {key: value for key, value in _EAGLE3.items() if key not in ("draft_vocab_size", "tie_word_embeddings")}
_speculator = replace(
    _eagle3,
    id="eagle3/speculator",
    model_class="Eagle3Speculator",
    config={
        "draft_vocab_size": _N_DRAFT,
        "norm_before_residual": True,
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": _OF_LAYERS,
    },
    begins={"midlayer.": "layers.0."},
)

CASES: tuple[ArchCase, ...] = (
    _eagle3,
    # as nvidia/gpt-oss-120b-Eagle3-v3 has them
    _variant(
        _eagle3,
        "norms",
        "Eagle3LlamaForCausalLM",
        norm_before_fc=True,
        target_hidden_size=48,
        eagle_aux_hidden_state_layer_ids=[1, 5, 8],
    ),
    _variant(_eagle3, "plain", "Eagle3DraftModel", draft_vocab_size=_N_VOCAB, optional=_EMBEDDING),
    _speculator,
)
