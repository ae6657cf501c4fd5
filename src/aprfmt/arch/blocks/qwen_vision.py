"""Building blocks of rows: the vision transformers of Qwen 2 and 3."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.blocks.tower import TOWER_WIDTH, USE_GELU, layers, mlp, norms, patches_in_time, sizes
from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope
from aprfmt.arch.converters.towers import beside
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, TensorRow


_V = "visual."
_SQUARE = "4*" + TOWER_WIDTH


def merger(norm_bias: bool) -> tuple[TensorRow, ...]:
    """The projector: two layers over groups of four patches."""
    return (
        *norm(f"{_V}merger.ln_q", "v.post_ln", TOWER_WIDTH, REQUIRED if norm_bias else None),
        *linear(f"{_V}merger.mlp.0", "mm.0", f"{_SQUARE},{_SQUARE}", REQUIRED),
        *linear(f"{_V}merger.mlp.2", "mm.2", f"hidden,{_SQUARE}", REQUIRED),
    )


def _square_to_gguf(value: object, scope: Scope) -> object:
    """Positions are learned for an image of this total number of patches; the GGUF states its side in pixels."""
    positions, patch = as_int(value, scope.name), beside(scope, "patch_size")
    return int(positions**0.5 * patch) if positions and patch else None


def _square_from_gguf(value: object, scope: Scope) -> object:
    side, patch = as_int(value, scope.name), scope.gguf("vision.patch_size")
    return (side // patch) ** 2 if side and isinstance(patch, int) and patch else DEFAULT


def _deepstack_to_gguf(value: object, scope: Scope) -> object:
    listed, depth = value if isinstance(value, list) else [], beside(scope, "depth") or 0
    return GgufKeys({scope.key.gguf: ("bool[]", [layer in listed for layer in range(depth)])}) if depth else None


def _deepstack_from_gguf(value: object, scope: Scope) -> object:
    return [layer for layer, marked in enumerate(value) if marked] if isinstance(value, list) else []


deepstack = Converter(_deepstack_to_gguf, _deepstack_from_gguf)
square_of_patches = Converter(_square_to_gguf, _square_from_gguf)
MERGED = f"{TOWER_WIDTH}*spatial_merge_size*spatial_merge_size"
"""Width of a group of patches."""


def qwen3_vision(v: str) -> tuple[TensorRow, ...]:
    """Qwen3's vision transformer: patches of image pairs, learned positions."""
    return (
        *patches_in_time(f"{v}patch_embed.proj"),
        tensor(f"{v}pos_embed.weight", "v.position_embd.weight", f"num_position_embeddings,{TOWER_WIDTH}"),
        *layers(
            *norms("norm1", "norm2"), *linear("attn.qkv", "attn_qkv", f"3*{TOWER_WIDTH},{TOWER_WIDTH}", REQUIRED),
            *linear("attn.proj", "attn_out", f"{TOWER_WIDTH},{TOWER_WIDTH}", REQUIRED),
            *mlp("mlp.linear_fc1", "mlp.linear_fc2"), hf=f"{v}blocks.{{n}}.", depth="depth",
        ),
    )


def qwen3_sizes(config: str) -> tuple[Key, ...]:
    """Sizes of Qwen3's vision transformer, whose config.json states the number of positions."""
    return (
        Key("vision.image_size", (f"{config}.num_position_embeddings",), converter=square_of_patches),
        *sizes("vision", config, image_size="", block_count="depth", head_count="num_heads"),
    )


def qwen3_keys(config: str) -> tuple[Key, ...]:
    """Further keys of Qwen3's vision transformer."""
    return (
        USE_GELU, Key("vision.spatial_merge_size", (f"{config}.spatial_merge_size",)),
        Key("vision.attention.layer_norm_epsilon", ("text_config.rms_norm_eps",), "f32"),
        Key("vision.is_deepstack_layers", (f"{config}.deepstack_visual_indexes",), "bool[]", converter=deepstack),
    )


