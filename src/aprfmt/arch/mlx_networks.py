"""The networks of mlx_lm: a row for each difference in tensor names, shapes and values, and what it quantizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from aprfmt.arch.grammar import evaluate, has_layer, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import TensorRow


@dataclass(frozen=True, slots=True)
class MlxNetwork:
    """A network of mlx_lm.

    Attributes:
        rows: ids of the table's rows.
        stacked: names in a layer of a GGUF ("ffn_gate_exps.weight") -> mlx_lm's names of tensors with the same values
            and shape, after the layer's prefix.
        moved: whole words of checkpoint names ("mlp.gate.weight") -> mlx_lm's.
        begins: prefixes of checkpoint names -> mlx_lm's; the first match applies, after `moved`.
        tensors: rows with mlx_lm's names and shapes on the GGUF side, in place of the table's for the same names.
        scaled: endings of checkpoint names -> factors of the rows of mlx_lm's tensor, as TensorRow.scale.
        reshaped: endings of checkpoint names -> the shapes in a checkpoint and in mlx_lm, as TensorRow.dims.
        dropped: endings of the names of tensors that mlx_lm does not read -> in which layers, as TensorRow.layers.
        convolutions: endings of the names of weights [channels, 1, width] that are [channels, width, 1] there.
        floats: endings of modules that are never quantized -> in which layers.
        absent: endings of the names of tensors that mlx_lm's network lacks, so that a model with them is refused.
        absent_alone: the same, for a model that is not part of a wrapper.
        off: switches of config.json by which mlx_lm changes the head's values; they must be false.
        finer: suffixes of modules that always get 8 bits in groups of 64.
        eight: the same, whose group size mlx_lm does not write in config.json.
    """

    rows: tuple[str, ...]
    stacked: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    begins: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[TensorRow, ...] = ()
    scaled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reshaped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    convolutions: tuple[str, ...] = ()
    floats: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    absent_alone: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()
    eight: tuple[str, ...] = ()

    def is_quantized(self, module: str, h: Hyperparams) -> bool:
        """Whether mlx_lm quantizes `module`, by its name."""
        return not self.is_convolution(f"{module}.weight") and not _is_listed(self.floats, module, h)

    def is_convolution(self, name: str) -> bool:
        """Whether the tensor is one of the `convolutions`."""
        return bool(self.convolutions) and name.endswith(self.convolutions)

    def is_dropped(self, name: str, h: Hyperparams) -> bool:
        """Whether mlx_lm does not read the tensor."""
        return _is_listed(self.dropped, name, h)

    def cut_values(self, h: Hyperparams) -> Iterator[tuple[str, int]]:
        """(checkpoint name, number of trailing values) of the tensors that mlx_lm has cut short."""
        for row in self.tensors:
            if row.cut and (count := evaluate(row.cut, sizes_of(h)) or 0) > 0:
                layers = (n for n in range(h.num_layers or 0) if has_layer(row.layers, h, n))
                yield from ((row.hf[0].replace("{n}", str(n)), count) for n in layers)

    def spell(self, name: str) -> str:
        """mlx_lm's name of a tensor, or of a template, of the checkpoint."""
        words = f".{name}."
        for old, new in self.moved.items():
            words = words.replace(f".{old}.", f".{new}.")
        spelled = words[1:-1]
        begin = next((b for b in self.begins if spelled.startswith(b)), None)
        return spelled if begin is None else self.begins[begin] + spelled.removeprefix(begin)

    def is_finer(self, module: str) -> bool:
        """Whether `module` always gets 8 bits."""
        return module.endswith((*self.finer, *self.eight))


_LAST_NUMBER = re.compile(r"\.\d+$")


def _is_listed(endings: Mapping[str, str], name: str, h: Hyperparams) -> bool:
    """Whether `name` has one of the endings, in a layer that its condition holds for."""
    bare = _LAST_NUMBER.sub("", name)
    found = [layers for ending, layers in endings.items() if bare.endswith(ending)]
    layer = next((int(word) for word in name.split(".") if word.isdecimal()), 0) if any(found) else 0
    return any(not layers or has_layer(layers, h, layer) for layers in found)


def _experts(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """The stacks of experts below `module`."""
    named = {"gate": gate, "up": up, "down": down}
    return {f"ffn_{word}_exps.weight": f"{module}.{name}.weight" for word, name in named.items() if name}


_SWITCH = _experts("mlp.switch_mlp")
_LATENT = {"attn_k_b.weight": "self_attn.embed_q.weight", "attn_v_b.weight": "self_attn.unembed_out.weight"}
_PLUS_ONE = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "output_norm.weight": "model.norm.weight",
}
"""Norms whose values in a GGUF and in mlx_lm have 1 added."""
_GATE_PROJ = {"mlp.gate.weight": "mlp.gate.gate_proj.weight"}

_BLOCK_SPARSE = _experts("block_sparse_moe.switch_mlp")
_DELTA = _PLUS_ONE | _SWITCH


def _transposed(name: str, dims: str) -> TensorRow:
    """A matrix that GPT-2 stores [inputs, outputs]."""
    return TensorRow(
        (f"transformer.h.{{n}}.{name}.weight",), (f"model.h.{{n}}.{name}.weight",), (dims,), transposed=True
    )


def _gate_up(layer: str, module: str) -> TensorRow:
    """The experts' gate and up projections, which a checkpoint has in one tensor."""
    split = tuple(f"{layer}.{module}.{word}_proj.weight" for word in ("gate", "up"))
    return TensorRow(
        (f"{layer}.experts.gate_up_proj",), split, ("experts,2*moe_ffn,hidden",),
        order=("deal:experts,moe_ffn,moe_ffn",), gguf_dims=("experts,moe_ffn,hidden",) * 2,
    )  # fmt: skip


_KIMI = "language_model.model.layers.{n}.self_attn"


def _joined(ending: str, rest: tuple[str, ...], spelled: str = "") -> TensorRow:
    """Q, K and V of Kimi's delta attention: rows of `rest` values each, which mlx_lm has in one tensor."""
    rows = "linear_num_heads*linear_head_dim"
    return TensorRow(
        tuple(f"{_KIMI}.{word}_{ending}" for word in "qkv"), (f"{_KIMI}.qkv_{spelled or ending}",),
        (",".join((rows, *rest)),), gguf_dims=(",".join((f"3*{rows}", *rest[::-1])),), layers="linear_attention",
    )  # fmt: skip


def _each_expert(word: str) -> TensorRow:
    """A matrix of each of DBRX's experts, which a checkpoint has below each other, those of w2 transposed."""
    begin = "transformer.blocks.{n}.ffn.experts"
    is_down = word == "w2"
    return TensorRow(
        (f"{begin}.mlp.{word}",), (f"{begin}.{{e}}.{word}.weight",), ("experts*ffn,hidden",),
        gguf_dims=("hidden,ffn" if is_down else "ffn,hidden",), gguf_transposed=(is_down,),
    )  # fmt: skip


_LAYER = "model.layers.{n}"
_STATES = "mamba_n_groups*mamba_d_state"
_CONVOLUTIONS = {f"{word}_conv1d": f"{word}_conv.conv" for word in "qkv"}
_NETWORKS = (
    MlxNetwork((
        "llama", "mistral", "ministral3", "qwen", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere",
        "cohere2", "ernie4_5", "exaone", "exaone4", "glm", "glm4", "gpt_bigcode", "hunyuan_v1_dense", "internlm2",
        "minicpm3", "muse_glimmer_text", "nanbeige", "nemotron", "olmo2", "olmo3", "openelm", "phi", "phi3",
        "seed_oss", "smollm3", "stablelm", "starcoder2", "xverse", "mistral3", "qwen2_vl", "qwen3_vl", "helium",
        "plamo", "plamo3", "talkie", "youtu", "mimo", "lille", "phi3small",
    )),
    MlxNetwork(("deci",), absent=("linear_attn.weight", "linear_mlp.weight")),
    MlxNetwork(("llama4_text",), _experts("feed_forward.experts"), absent_alone=("feed_forward.router.weight",)),
    MlxNetwork(("dbrx",), tensors=tuple(_each_expert(word) for word in ("w1", "v1", "w2"))),
    MlxNetwork(
        ("phixtral",),
        {f"ffn_{word}_exps.{part}": f"moe.switch_mlp.{name}.{part}"
         for word, name in (("up", "fc1"), ("down", "fc2")) for part in ("weight", "bias")},
    ),
    MlxNetwork(
        ("bailing_moe_v2_5",),
        _SWITCH | {name: to.replace("self_attn", "attention") for name, to in _LATENT.items()},
        _GATE_PROJ,
        floats=dict.fromkeys(("attention.embed_q", "attention.unembed_out"), ""),
        finer=("mlp.gate.gate_proj",),
    ),
    MlxNetwork(("iquestloopcoder",), floats={"model.gate_projections": ""}),
    MlxNetwork(("klear",), _experts("mlp.experts"), finer=("mlp.gate",)),
    MlxNetwork(("gear",), convolutions=("local_mixer.key_conv.weight", "local_mixer.value_conv.weight")),
    MlxNetwork(("hunyuan_v1_moe",), _SWITCH),
    MlxNetwork(("spark2_5",), moved={"self_attn.o_proj": "self_attn.out_proj", "model.embed_tokens": "model.embedding"},
               floats={"self_attn.g_proj": ""}),
    MlxNetwork(
        ("nanochat",),
        moved={
            **{f"self_attn.{word}_proj": f"attn.c_{word}" for word in "qkv"},
            "self_attn.o_proj": "attn.c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
        },
        begins={"model.embed_tokens.": "transformer.wte.", "model.layers.": "transformer.h."},
    ),
    MlxNetwork(
        ("rwkv7",),
        reshaped=dict.fromkeys(
            ("attn.k_k", "attn.k_a", "attn.g_norm.weight", "attn.g_norm.bias"), ("hidden", "hidden/head_dim,head_dim")
        ),
        floats={"attn.g_norm": ""},
        eight=("lora.2", "model.embeddings"),
    ),
    MlxNetwork(("granite",), finer=("self_attn.o_proj", "mlp.down_proj", "lm_head")),
    MlxNetwork(("gemma3n_text",), begins={"model.": "model.language_model."}),
    MlxNetwork(
        ("gpt2",),
        begins={"transformer.": "model."},
        tensors=(
            _transposed("attn.c_attn", "hidden,3*hidden"), _transposed("attn.c_proj", "hidden,hidden"),
            _transposed("mlp.c_fc", "hidden,ffn"), _transposed("mlp.c_proj", "ffn,hidden"),
        ),
    ),
    MlxNetwork(("gptj",), begins={"transformer.": "model."}),
    MlxNetwork(("gpt_neox",), begins={"gpt_neox.layers.": "model.h.", "gpt_neox.": "model.", "": "model."}),
    MlxNetwork(("qwen2_moe", "olmoe"), _SWITCH),
    MlxNetwork(("qwen3_moe", "mellum", "qwen3_vl_moe"), _SWITCH, finer=("mlp.gate",)),
    MlxNetwork(("mixtral", "phimoe"), _BLOCK_SPARSE),
    MlxNetwork(("minimax_m2", "minimax_m3"), _BLOCK_SPARSE, finer=("block_sparse_moe.gate",)),
    MlxNetwork(("deepseek", "deepseek_v2", "glm4_moe", "mimo_v2_flash"), _SWITCH, floats={"mlp.gate": ""}),
    MlxNetwork(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _SWITCH | _LATENT, floats={"mlp.gate": ""}
    ),
    MlxNetwork(("mistral4",), _SWITCH | _LATENT),
    MlxNetwork(
        ("exaone_moe",),
        _SWITCH,
        {"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
        floats={"mlp.gate": ""},
    ),
    MlxNetwork(("ernie4_5_moe",), _SWITCH, dropped={".e_score_correction_bias": ""}),
    MlxNetwork(("dots1",), _experts("mlp.experts"), floats={"mlp.gate": ""}),
    MlxNetwork(("afmoe",), _experts("mlp.experts"), finer=("mlp.router.gate",)),
    MlxNetwork(
        ("bailing_moe", "bailing_moe_linear"), _SWITCH, _GATE_PROJ, off=("norm_head",), finer=("mlp.gate.gate_proj",)
    ),
    MlxNetwork(
        ("laguna",),
        _SWITCH,
        {
            "mlp.gate.weight": "mlp.gate.proj.weight",
            "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        },
        finer=("mlp.gate.proj",),
    ),
    MlxNetwork(
        ("step3p5",),
        _SWITCH | _PLUS_ONE | {"ffn_norm.weight": "post_attention_layernorm.weight"},
        {
            "moe.gate.weight": "mlp.gate.gate.weight",
            "moe.router_bias": "mlp.gate.router_bias",
            "share_expert": "mlp.share_expert",
        },
        finer=("mlp.gate.gate",),
    ),
    MlxNetwork(
        ("granitemoe",),
        _BLOCK_SPARSE,
        finer=("block_sparse_moe.router.layer", "self_attn.o_proj", "mlp.down_proj", "lm_head"),
    ),
    MlxNetwork(
        ("granitemoehybrid", "granite4"),
        _BLOCK_SPARSE
        | {f"ffn_{word}.weight": f"mlp.{word}_proj.weight" for word in ("gate", "up", "down")},
        convolutions=("mamba.conv1d.weight",),
        finer=("router.layer",),
    ),
    MlxNetwork(
        ("jamba",),
        _experts("feed_forward.switch_mlp"),
        convolutions=("mamba.conv1d.weight",),
        finer=("router",),
    ),
    MlxNetwork(
        ("qwen3_next", "qwen3_5_moe_text"),
        _SWITCH | _PLUS_ONE,
        convolutions=("linear_attn.conv1d.weight",),
        finer=("mlp.gate", "shared_expert_gate"),
    ),
    MlxNetwork(("qwen3_5_text",), _PLUS_ONE, convolutions=("linear_attn.conv1d.weight",)),
    MlxNetwork(("mamba", "falcon_mamba", "mamba2", "nemotron_h", "plamo2"), convolutions=("mixer.conv1d.weight",)),
    MlxNetwork(
        ("kimi_linear",),
        _SWITCH | _LATENT,
        {
            "block_sparse_moe": "mlp",
            "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
            **_CONVOLUTIONS,
        },
        convolutions=("_conv1d.weight", "_conv.conv.weight"),
        finer=("mlp.gate",),
    ),
    MlxNetwork(
        ("kimi_k3",),
        _SWITCH | _LATENT,
        {
            **{f"block_sparse_moe.{word}": f"mlp.{word}" for word in ("gate", "shared_experts")},
            **{f"block_sparse_moe.routed_expert_{word}": f"mlp.routed_expert_{word}"
               for word in ("down_proj", "up_proj", "norm")},
            "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
        },
        tensors=(
            _joined("proj.weight", ("hidden",)),
            _joined("conv1d.weight", ("1", "linear_conv_kernel_dim"), "conv.conv.weight"),
            TensorRow(
                (f"{_KIMI}.A_log",), (f"{_KIMI}.A_log",), ("linear_head_dim",), gguf_dims=("linear_num_heads",),
                cut="linear_head_dim-linear_num_heads", value="same", layers="linear_attention",
            ),
        ),
        floats={"res_proj": ""},
        finer=("mlp.gate",),
    ),
    MlxNetwork(
        ("bailing_moe_v3",),
        _SWITCH | {name: to.replace("self_attn", "attention") for name, to in _LATENT.items()},
        convolutions=("_conv1d.weight",),
        floats={
            **dict.fromkeys(("word_embeddings", "lm_head", "mlp.gate"), ""),
            **dict.fromkeys((f"attention.{word}" for word in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")), ""),
            **dict.fromkeys((f"attention.{word}" for word in ("embed_q", "unembed_out", "b_proj")), ""),
            **dict.fromkeys(("attention.q_proj", "attention.g_proj"), "full_attention"),
        },
    ),
    MlxNetwork(
        ("gemma4_text",),
        {"ffn_down_exps.weight": "experts.switch_glu.down_proj.weight"},
        tensors=(_gate_up(_LAYER, "experts.switch_glu"),),
        dropped={f"self_attn.{word}": "shares_kv" for word in ("k_proj.weight", "v_proj.weight", "k_norm.weight")},
        finer=("router.proj",),
    ),
    MlxNetwork(("apertus",), reshaped=dict.fromkeys(("act_fn.alpha_n", "act_fn.alpha_p"), ("1", ""))),
    MlxNetwork(
        ("falcon_h1",),
        scaled={
            "embed_tokens.weight": (":embedding_multiplier",),
            "lm_head.weight": (":lm_head_multiplier",),
            **dict.fromkeys(("q_proj.weight", "k_proj.weight"), (":attention_in_multiplier",)),
            ".o_proj.weight": (":attention_out_multiplier",),
            ".out_proj.weight": (":ssm_out_multiplier",),
            "gate_proj.weight": (":mlp_multipliers.0",),
            "down_proj.weight": (":mlp_multipliers.1",),
            ".in_proj.weight": tuple(
                f"{rows}:ssm_in_multiplier*ssm_multipliers.{i}"
                for i, rows in enumerate(("mamba_d_ssm", "mamba_d_ssm", _STATES, _STATES, ""))
            ),
        },
        convolutions=("mamba.conv1d.weight",),
    ),
    MlxNetwork(("recurrent_gemma",), convolutions=("temporal_block.conv_1d.weight",)),
    MlxNetwork(
        ("nemotron_h_moe",),
        _experts("mixer.switch_mlp", "", "fc1", "fc2"),
        convolutions=("mixer.conv1d.weight",),
        floats={"mixer.gate": ""},
    ),
    MlxNetwork(("lfm2",), convolutions=("conv.conv.weight",)),
    MlxNetwork(
        ("lfm2_moe",),
        _experts("feed_forward.switch_mlp"),
        {f"feed_forward.{a}.weight": f"feed_forward.{b}.weight"
         for a, b in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))},
        convolutions=("conv.conv.weight",),
        finer=("feed_forward.gate",),
    ),
)  # fmt: skip

LANGUAGE = "language_model."
"""The usual prefix of a wrapper's language model."""
WRAPPERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("gemma3", "gemma4", "gemma4_unified", "kimi_k25", "llama4", "llava", "minimax_m3_vl"),
            *("mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        ),
        LANGUAGE,
    ),
    "gemma3n": "",
    "kimi_k3": "",
    "muse_glimmer": "",
}
"""Model types of networks with other parts, whose language model mlx_lm loads alone, and the prefix of its names."""

ONLY_INSIDE = frozenset(
    ("gemma3n_text", "muse_glimmer_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_moe", "minimax_m3")
)
"""Rows that mlx_lm has only as the language model of a wrapper."""

NETWORKS: Mapping[str, MlxNetwork] = {row: network for network in _NETWORKS for row in network.rows}
"""By the id of the table's row."""
