"""mlx_lm's names of the table's networks, and which tensors it quantizes; a row for each difference.

Most networks have the names of their checkpoints. If mlx_lm stacks experts or splits matrices, it has the tensors of a
GGUF under names of its own: a row of the table with other names on the GGUF side covers both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, RowMapping, link_of
from aprfmt.arch.names import canonical_name, matches
from aprfmt.arch.row import Architecture, TensorRow
from aprfmt.types import Shape


@dataclass(frozen=True, slots=True)
class MlxNetwork:
    """A network of mlx_lm.

    Attributes:
        rows: ids of the table's rows.
        stacked: names in a layer of a GGUF ("ffn_gate_exps.weight") -> mlx_lm's names of tensors with the same values
            and shape, after the layer's prefix.
        moved: suffixes of checkpoint names -> mlx_lm's replacement.
        convolutions: endings of the names of weights [channels, 1, width] that are [channels, width, 1] there.
        floats: endings of modules that are never quantized.
        finer: suffixes of modules that always get 8 bits in groups of 64.
    """

    rows: tuple[str, ...]
    stacked: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    convolutions: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()

    def is_quantized(self, module: str) -> bool:
        """Whether mlx_lm quantizes `module`, by its name."""
        return not module.endswith(tuple(c.removesuffix(".weight") for c in self.convolutions) + self.floats)

    def is_convolution(self, name: str) -> bool:
        """Whether the tensor is one of the `convolutions`."""
        return bool(self.convolutions) and name.endswith(self.convolutions)

    def is_finer(self, module: str) -> bool:
        """Whether `module` always gets 8 bits."""
        return bool(self.finer) and module.endswith(self.finer)


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

_NETWORKS = (
    MlxNetwork((
        "llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2",
        "ernie4_5", "exaone", "exaone4", "glm", "glm4", "hunyuan_v1_dense", "internlm2",
        "nanbeige", "nemotron", "olmo2", "olmo3", "openelm", "phi", "phi3", "seed_oss", "smollm3", "stablelm",
        "starcoder2", "xverse", "mistral3", "qwen2_vl", "qwen3_vl", "helium", "plamo", "plamo3", "talkie",
    )),
    MlxNetwork(("granite",), finer=("self_attn.o_proj", "mlp.down_proj", "lm_head")),
    MlxNetwork(("qwen2_moe", "olmoe"), _SWITCH),
    MlxNetwork(("qwen3_moe", "mellum"), _SWITCH, finer=("mlp.gate",)),
    MlxNetwork(("mixtral", "phimoe"), _experts("block_sparse_moe.switch_mlp")),
    MlxNetwork(("deepseek", "glm4_moe"), _SWITCH, floats=("mlp.gate",)),
    MlxNetwork(("deepseek_v3", "deepseek_v32"), _SWITCH | _LATENT, floats=("mlp.gate",)),
    MlxNetwork(("dots1",), _experts("mlp.experts"), floats=("mlp.gate",)),
    MlxNetwork(("afmoe",), _experts("mlp.experts"), finer=("mlp.router.gate",)),
    MlxNetwork(("bailing_moe",), _SWITCH, _GATE_PROJ, finer=("mlp.gate.gate_proj",)),
    MlxNetwork(
        ("granitemoe",),
        _experts("block_sparse_moe.switch_mlp"),
        finer=("block_sparse_moe.router.layer", "self_attn.o_proj", "mlp.down_proj", "lm_head"),
    ),
    MlxNetwork(
        ("jamba",),
        _experts("feed_forward.switch_mlp"),
        convolutions=("mamba.conv1d.weight",),
        finer=("router",),
    ),
    MlxNetwork(
        ("qwen3_next",),
        _SWITCH | _PLUS_ONE,
        convolutions=("linear_attn.conv1d.weight",),
        finer=("mlp.gate", "shared_expert_gate"),
    ),
    MlxNetwork(("mamba", "falcon_mamba", "nemotron_h"), convolutions=("mixer.conv1d.weight",)),
    MlxNetwork(
        ("nemotron_h_moe",),
        _experts("mixer.switch_mlp", "", "fc1", "fc2"),
        convolutions=("mixer.conv1d.weight",),
        floats=("mixer.gate",),
    ),
    MlxNetwork(
        ("lfm2_moe",),
        _experts("feed_forward.switch_mlp"),
        {f"feed_forward.{a}.weight": f"feed_forward.{b}.weight"
         for a, b in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))},
        convolutions=("conv.conv.weight",),
        finer=("feed_forward.gate",),
    ),
)  # fmt: skip

WRAPPERS = frozenset(("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
"""Model types of vision-language networks whose language model mlx_lm loads alone, as `language_model.`."""

NETWORKS: Mapping[str, MlxNetwork] = {row: network for network in _NETWORKS for row in network.rows}
"""By the id of the table's row."""


@cache
def mlx_row(row: Architecture) -> Architecture:
    """The tensors of the `row` that differ in mlx_lm, as a row whose GGUF side has mlx_lm's names and shapes."""
    network = NETWORKS[row.id]
    found = tuple(changed for tensor in row.tensors if (changed := _changed(network, tensor)) is not None)
    return replace(row, tensors=found, prefixes=(), drafts=())


def _changed(network: MlxNetwork, tensor: TensorRow) -> TensorRow | None:
    """The row with mlx_lm's names in place of a GGUF's, None if it has the checkpoint's."""
    begin, layer, _ = tensor.hf[0].partition("{n}.")
    in_layer = [name.removeprefix("blk.{n}.") for name in tensor.gguf]
    if in_layer and not tensor.pack and all(name in network.stacked for name in in_layer):
        beginning = begin + layer if layer else ""
        return replace(tensor, gguf=tuple(beginning + network.stacked[name] for name in in_layer))
    name = tensor.hf[0]
    own = TensorRow((name,), (), tensor.dims[:1], tensor.need, layers=tensor.layers)
    for old, new in network.moved.items():
        if len(tensor.hf) == 1 and name.endswith(f".{old}") and "{e}" not in name:
            return replace(own, gguf=(name.removesuffix(old) + new,))
    return None


def network_of(row: Architecture | None) -> MlxNetwork | None:
    """mlx_lm's network for a row of the table, None if it has none or its tensors are unknown."""
    return NETWORKS.get(row.id) if row is not None else None


def turned(row: Architecture, name: str, shape: Shape) -> RowMapping | None:
    """Maps a convolution of mlx_lm [channels, width, 1] to a checkpoint's shape, and back: the bytes are unchanged.

    None for any other tensor.
    """
    network = network_of(row)
    if network is None or not network.is_convolution(name) or len(shape) != 3 or 1 not in shape[1:]:
        return None
    return RowMapping((shape,), ((shape[0], shape[2], shape[1]),), flat=True)


def link_from(row: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape]) -> Link | None:
    """The link of a tensor that only mlx_lm calls `name`, with its names and shapes on the GGUF side; None for others.

    `shapes` are those of the folder's tensors. Raises RefusedError as `link_of` does.
    """
    if network_of(row) is None or canonical_name(row, name) is not None:
        return None
    found = matches(mlx_row(row), name, "gguf")
    return link_of(h, found[0], {name: shapes[name]}) if found else None


def values_from(row: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape]) -> Link | None:
    """The link of a tensor with other values in a folder of mlx_lm, under the checkpoint's own name."""
    found = [match for match in matches(mlx_row(row), name, "gguf") if match.row.value]
    return link_of(h, found[0], {name: shapes[name]}) if found else None


def checkpoint_shapes(row: Architecture, h: Hyperparams, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The checkpoint's names and shapes of tensors under mlx_lm's names; all others unchanged."""
    out: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if (link := link_from(row, h, name, shapes)) is not None:
            out |= zip(link.hf, link.mapping.before, strict=True)
        elif shape[1:] and shape[-1] == 1 and (mapping := turned(row, name, shape)) is not None:
            out[name] = mapping.after[0]
        else:
            out[name] = shape
    return out
