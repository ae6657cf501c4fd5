"""Where our GGUF differs from that of llama.cpp's converter on purpose: what, and why."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Explained:
    """Differences that are meant.

    Attributes:
        cases: pattern of case ids, "gemma*".
        names: pattern of GGUF keys or tensor names, "*.rope.dimension_count".
        why: what the difference is, and why ours is right.
    """

    cases: str
    names: str
    why: str


_UNBOUNDED = "the config's own; the converter writes 2**20 where the network has no positions"
_NO_EXPERTS = "transformers always writes num_experts_per_tok, by which the converter tells networks with experts"
_NEMOTRON_H = ("nemotron_h.*", "nemotron_h_moe.*", "general.architecture")
_NO_ATTENTION = (
    "the converter looks for layers called attention, transformers writes full_attention now: it takes a network "
    "of attention layers only for one of state-space layers only"
)

_HALF_ROTATED = (
    "half of each head is rotated; the converter puts the rows in order, and llama.cpp turns them, as if all of it were"
)

_LINEAR = "cancels the factor of yarn by which llama.cpp scales scores, whatever the scaling"

_EXP = "-exp(A_log) rounded correctly from float64; torch's float32 exp is off by the last bit now and then"

_THETA = "what configs that are silent mean; llama.cpp takes the same where the key is missing"
_CENTRED = "the converter subtracts the mean, which chooses the same experts; ours are as the checkpoint has them"
_SCALED = "multiplied with the config's scales, for which a GGUF has no key: they are 1 in what is made of it"

_ROPE_PATTERN = "which layers are rotated, as layer_rope_theta says; the converter looks for no_rope_layers"
_LAGUNA_LAYERS = "which layers have a window, as layer_types says; the converter leaves it to llama.cpp's usual pattern"
_NO_HEAD = "llama.cpp's loader insists on a head"
_NORMED = "columns of length 1; their lengths are from float64 sums, torch's from float32 ones, and a GGUF holds none"
_OWN_NORM = "each head's own; the converter gives all heads the first one's"

_POOLER = "the pooler, which the classes of transformers have before the classifier; the converter leaves it out"
_OUTPUTS = (
    "outputs have names; the converter drops those that transformers makes up, and llama.cpp then takes one output"
)

EXPLAINED: tuple[Explained, ...] = (
    Explained("deepseek_v?/linear", "deepseek2.rope.scaling.yarn_log_multiplier", _LINEAR),
    Explained("bert_classifier*", "cls.weight", _POOLER),
    Explained("bert_classifier*", "cls.bias", _POOLER),
    Explained("bert_classifier/two", "cls.output.*", _OUTPUTS),
    Explained("bert_classifier/two", "bert.classifier.output_labels", _OUTPUTS),
    Explained("granite*_swa/nope", "granite_swa.attention.rope_pattern", _ROPE_PATTERN),
    Explained(
        "gemma3n_text*",
        "gemma3n.activation_sparsity_scale",
        "llama.cpp reads none: it has one sparsity in the first ten layers, and other networks are refused",
    ),
    Explained(
        "gemma3n_text/padded",
        "per_layer_token_embd.weight",
        "token 0's row from vocab_size_per_layer_input on, as transformers computes; the converter's are zeros",
    ),
    Explained("llama/sarashina2_vision", "llama.rope.freq_base", _THETA),
    Explained("laguna/layer_types", "laguna.attention.sliding_window_pattern", _LAGUNA_LAYERS),
    Explained("laguna/global", "laguna.attention.sliding_window", _LAGUNA_LAYERS),
    Explained("bitnet*", "bitnet.rope.scaling.*", "a linear scaling by 1, which is none"),
    Explained(
        "bitnet*", "blk.*.weight", "as they are; the converter rounds them to three values, which this class does not"
    ),
    Explained("dbrx*", "blk.*.ffn_gate_inp.weight", "in F32, as the routers of all families"),
    Explained("apertus/tied", "output.weight", _NO_HEAD),
    Explained("exaone_moe/tied", "output.weight", _NO_HEAD),
    Explained("mellum/tied", "output.weight", _NO_HEAD),
    Explained(
        "exaone_moe*",
        "exaone-moe.expert_gating_func",
        "sigmoid, always; the converter writes it where the config names it, and llama.cpp insists on it",
    ),
    *(
        Explained(
            "afmoe*", f"afmoe.{key}", "what the class always does; the converter writes it where the config names it"
        )
        for key in ("expert_gating_func", "expert_weights_norm")
    ),
    Explained(
        "cohere2_moe*",
        "cohere2moe.feed_forward_length",
        "the experts' width, where the config has none for layers without experts; the converter writes none at all",
    ),
    Explained(
        "cohere2_moe/no_norm_topk",
        "cohere2moe.expert_weights_norm",
        "a softmax over the chosen experts is a normalised one, whatever norm_topk_prob says",
    ),
    *(
        Explained("dspark/head", name, "the draft's own head, which llama.cpp loads and the converter leaves out")
        for name in ("output.weight", "lm_head.weight")
    ),
    Explained("orion*", "orion.rope.freq_base", _THETA),
    Explained("deepseek_ocr*", "deepseek2-ocr.rope.freq_base", _THETA),
    Explained("xverse*", "xverse.rope.freq_base", _THETA),
    Explained("pangu_embedded*", "*_length", "hidden_size over num_attention_heads, what a missing key means"),
    Explained("qwen", "qwen.attention.layer_norm*epsilon", "llama.cpp's loader asks for the key of an RMS norm"),
    *(Explained("bailing_moe/norm_head", name, _NORMED) for name in ("output.weight", "lm_head.weight")),
    *(Explained("chameleon*", name, _OWN_NORM) for name in ("blk.*.attn_[qk]_norm.*", "*.self_attn.[qk]_norm.*")),
    *(Explained("jais*", name, _SCALED) for name in ("lm_head.weight", "transformer.wte.weight")),
    Explained("grok", "grok.rope.freq_base", _THETA),
    Explained("grok2", "grok.attention.layer_norm_epsilon", "GIT's, for which the converter takes the model type git"),
    *(Explained("bailing_moe_v2/sarvam*", name, _CENTRED) for name in ("*.exp_probs_b.bias", "*.gate.expert_bias")),
    Explained("codeshell*", "codeshell.rope.scaling.*", "a linear scaling by 1, which is none"),
    Explained(
        "minimax_m3*", "*norm.weight", "1 was added, which rounds: the converter's GGUF does not say what was lost"
    ),
    *(
        Explained("granite_switch/untied", name, "the checkpoint's own head, which the converter leaves out")
        for name in ("output.weight", "lm_head.weight")
    ),
    *(
        Explained("mistral4*", name, "gate and up apart, as in all families; llama.cpp loads them so or in one")
        for name in ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight", "blk.*.ffn_gate_up_exps.weight")
    ),
    *(
        Explained(
            "mistral4*", f"mistral4.{key}", "what the class does; without the key llama.cpp does not scale queries"
        )
        for key in ("attention.temperature_scale", "attention.temperature_length")
    ),
    Explained("mistral4*", "mistral4.expert_gating_func", "softmax, which is what its absence means"),
    Explained(
        "qwen4_exp*",
        "qwen4exp.attention.compress_ratios",
        "the converter looks for full_attention, which transformers calls indexed_attention",
    ),
    Explained("qwen4_exp*", "blk.*.indexer.[qk]_proj.weight", "in F32, as those of MiniMax M3"),
    Explained("hy_v4/tied", "output.weight", "llama.cpp's loader insists on a head"),
    Explained("codeshell/tied", "output.weight", "llama.cpp's loader insists on a head"),
    *(
        Explained("mimo_v2_flash*", f"mimo2.{key}", "the converter counts three draft layers, be they there or not")
        for key in (
            "nextn_predict_layers",
            "block_count",
            "attention.head_count_kv",
            "attention.sliding_window_pattern",
        )
    ),
    Explained("exaone*", "exaone.attention.layer_norm*epsilon", "llama.cpp's loader asks for the key of an RMS norm"),
    Explained("llama_bidirec*", "llama-embed.attention.causal", "every position sees every other; the key says so"),
    Explained("llama_bidirec*", "llama-embed.pooling_type", "as config.json says where no modules.json does"),
    Explained("neobert*", "blk.*.attn_qkv.weight", "in the order in which llama.cpp's graph takes it apart"),
    Explained("neobert*", "neo-bert.attention.qkv_by_head", "tells this order from that of the converter's files"),
    Explained("eurobert/jina-v5", "eurobert.classifier.pooling_type", "llama.cpp's eurobert has no classifier"),
    Explained("granite4*", "granite.*", _NO_ATTENTION),
    Explained("granite4*", "granitehybrid.*", _NO_ATTENTION),
    Explained("granite4*", "general.architecture", _NO_ATTENTION),
    Explained("granite4*", "blk.*.attn_[qk].*", _NO_ATTENTION),
    Explained(
        "granitemoehybrid/dense",
        "granitehybrid.expert_used_count",
        "there are no experts, and llama.cpp refuses a network that uses more than it has",
    ),
    Explained(
        "granitemoehybrid*",
        "granitehybrid.attention.head_count_kv",
        "the converter looks for layers called attention, transformers writes full_attention now: it finds none",
    ),
    Explained(
        "granitemoehybrid*",
        "blk.*.attn_[qk].*",
        "the converter takes all layers for state-space ones and leaves out the rotary order of Q and K",
    ),
    Explained("granitemoehybrid*", "granitehybrid.context_length", _UNBOUNDED),
    *(
        Explained(
            "kimi_k3*", f"*_res_{part}.weight", "the converter's GGUF has the product of norm and projection alone"
        )
        for part in ("norm", "proj")
    ),
    Explained("kimi_linear*", "kimi-linear.rope.freq_base", "there are no rotated positions"),
    *(
        Explained(
            "plamo[23]*", f"model.*norm{end}.weight", "the converter's sum rounds, and its GGUF does not tell how"
        )
        for end in ("", "_*")
    ),
    Explained(
        "plamo2*",
        "plamo2.attention.head_count",
        "one number, which llama.cpp needs where the first layer has no attention: by its heads alone it knows how "
        "much of a head is rotated, and never ends its work where that is nothing",
    ),
    Explained("bamba*", "granitehybrid.rope.dimension_count", _HALF_ROTATED),
    Explained("bamba*", "blk.*.attn_[qk].*", _HALF_ROTATED),
    Explained("nemotron_h_moe*", "nemotron_h_moe.context_length", _UNBOUNDED),
    Explained("nemotron_h_puzzle", "nemotron_h_moe.context_length", _UNBOUNDED),
    *(Explained(case, name, _NO_EXPERTS) for case in ("nemotron_h", "nemotron_h/*") for name in _NEMOTRON_H),
    Explained(
        "granitemoehybrid*",
        "granitehybrid.rope.scaling.finetuned",
        "whether positions are rotated, as position_embedding_type says; the converter infers it from the layers",
    ),
    Explained(
        "granitemoehybrid/dense",
        "granitehybrid.feed_forward_length",
        "the width of the MLP that is there, shared_intermediate_size; the converter writes intermediate_size",
    ),
    *(Explained("*", name, _EXP) for name in ("blk.*.ssm_a", "*.A_log")),
    Explained(
        "gemma*",
        "gemma*.rope.freq_base",
        "the converter leaves out the base frequency, and so is right only where it is 10000",
    ),
    Explained(
        "stablelm*",
        "*.rope.freq_base",
        "the converter leaves out the base frequency, and so is right only where it is 10000",
    ),
    Explained(
        "phi*",
        "phi2.rope.freq_base",
        "the converter leaves out the base frequency, and so is right only where it is 10000",
    ),
    Explained("glm*", "chatglm.context_length", "the converter takes the width for the number of positions"),
    Explained("glm*", "chatglm.attention.*_length", "the size of a head, as the config names it"),
    Explained("phi3*", "phi3.rope.scaling.type", "says longrope; the converter leaves it to the factor tensors"),
    Explained("phi3*", "phi3.rope.scaling.attn_factor", "1, which is what its absence means"),
    Explained("bloom*", "bloom.context_length", "2048, as all of them were trained; the converter writes the width"),
    Explained("falcon*", "falcon.context_length", "what the config says; the converter writes 2048"),
    Explained(
        "falcon*",
        "falcon.rope.freq_base",
        "the converter leaves out the base frequency, and so is right only where it is 10000",
    ),
    Explained(
        "minicpm3*",
        "minicpm3.rope.freq_base",
        "the converter leaves out the base frequency, and so is right only where it is 10000",
    ),
    Explained("minicpm3/linear", "minicpm3.rope.scaling.*", "the converter leaves out the scaling"),
    Explained("minicpm3/longrope*", "minicpm3.rope.scaling.*", "says longrope; the converter leaves it to the tensors"),
    Explained(
        "minicpm3/v_head_dim",
        "minicpm3.attention.value_length",
        "the converter leaves it out, and so is right only where it is hidden_size over num_attention_heads",
    ),
    Explained(
        "deepseek_v3*",
        "deepseek2.expert_gating_func",
        "sigmoid, always; the converter writes it where the config names it, and llama.cpp takes softmax else",
    ),
)

HANGS = {"plamo2": "llama.cpp never ends its work on the converter's file: its first layer has no heads"}
"""Rows of which llama.cpp is not asked to load the converter's GGUF, and why."""


def explain(case_id: str, name: str) -> str | None:
    """Why the key or tensor differs in that case; None where nothing explains it."""
    for entry in EXPLAINED:
        if fnmatchcase(case_id, entry.cases) and fnmatchcase(name, entry.names):
            return entry.why
    return None
