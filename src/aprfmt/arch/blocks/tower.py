"""Building blocks of rows: vision and audio towers, and their projectors."""

from __future__ import annotations

from typing import TypedDict

from aprfmt.arch.blocks.decoder import block, linear, norm, tensor
from aprfmt.arch.converter import Converter
from aprfmt.arch.converters.towers import activation
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow


TOWER_WIDTH = "hidden_size"
"""The size word of a tower's own width; `hidden` is the language model's."""


class Whole(TypedDict):
    """Fields of a Tower: the classes and model types of the whole network."""

    gguf: str
    hf_class: str
    model_type: str
    hf_classes: tuple[str, ...]
    model_types: tuple[str, ...]


def whole(*names: str, types: tuple[str, ...]) -> Whole:
    """The classes and model types of the whole network, the first of each for a new config.json."""
    return {"gguf": "clip", "hf_class": names[0], "model_type": types[0], "hf_classes": names, "model_types": types}


def projector(name: str, *, part: str = "") -> Key:
    """The key with the projector type; `part` ("vision", "audio") if a file contains two."""
    return Key(f"{part}.projector_type" if part else "projector_type", kind="str", constant=name)


def width(part: str) -> Key:
    """The tower's output width per position."""
    return Key(f"{part}.projection_dim", field="hidden_size")


def sees(*keys: Key) -> tuple[Key, ...]:
    """Keys of a vision tower, after those common to all towers."""
    return (Key("has_vision_encoder", kind="bool", constant=True), width("vision"), *keys)


def hears(*keys: Key) -> tuple[Key, ...]:
    """Keys of an audio tower, after those common to all towers."""
    return (Key("has_audio_encoder", kind="bool", constant=True), width("audio"), *keys)


_SIZES = {
    "image_size": "image_size", "patch_size": "patch_size", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}


def sizes(part: str = "vision", config: str = "", **names: str | tuple[str, ...]) -> tuple[Key, ...]:
    """Sizes of a transformer in a tower: keys of the GGUF's `part`, of the object `config` of a config.json.

    `names` gives other spellings by the last word of the GGUF key: sizes(block_count="depth"); "" leaves one out. An
    audio tower has no image size and no patches.
    """
    config = config or f"{part}_config"
    found = []
    for gguf, own in _SIZES.items():
        stated = names.get(
            gguf.rpartition(".")[2], "" if part == "audio" and gguf in ("image_size", "patch_size") else own,
        )
        spelled = (stated,) if isinstance(stated, str) else stated
        if spelled != ("",):
            found.append(Key(f"{part}.{gguf}", tuple(f"{config}.{name}" for name in spelled)))
    return tuple(found)


def preprocessor(gguf: str, name: str, kind: str = "u32", converter: Converter | None = None) -> Key:
    """A key of preprocessor_config.json."""
    return Key(gguf, (f"preprocessor_config.{name}",), kind, converter=converter)


IMAGE = (
    preprocessor("vision.image_mean", "image_mean", "f32[]"), preprocessor("vision.image_std", "image_std", "f32[]"),
)
"""Mean and standard deviation of image channels."""


def epsilon(part: str, *names: str) -> Key:
    """The epsilon of the tower's norms, by its config.json keys, full paths."""
    return Key(f"{part}.attention.layer_norm_epsilon", names, "f32")


USE_GELU = Key("use_gelu", kind="bool", constant=True)
USE_SILU = Key("use_silu", kind="bool", constant=True)


def layers(
    *rows: TensorRow, hf: str, gguf: str = "v.blk.{n}.", depth: str = "num_hidden_layers"
) -> tuple[TensorRow, ...]:
    """Rows of a layer of a tower."""
    return block(*rows, hf=hf, gguf=gguf, depth=depth)


def tower_attention(
    hf: str = "self_attn", *, names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
    bias: bool = True, k_bias: bool = True, order: tuple[str, ...] = (),
    width: str = TOWER_WIDTH,
) -> tuple[TensorRow, ...]:
    """Separate Q, K, V and output projections with equal numbers of heads; `order` is that of the rows of Q and K."""
    need = REQUIRED if bias else None
    q, k, v, o = (f"{hf}.{name}" if hf else name for name in names)
    square = f"{width},{width}"
    return (
        *linear(q, "attn_q", square, need, order=order),
        *linear(k, "attn_k", square, need if k_bias else None, order=order), *linear(v, "attn_v", square, need),
        *linear(o, "attn_out", square, need),
    )


def fused_attention(
    hf: str = "attn", *, names: tuple[str, str] = ("qkv", "proj"), bias: bool = True, width: str = TOWER_WIDTH
) -> tuple[TensorRow, ...]:
    """Q, K and V as one projection in a checkpoint, three in a GGUF."""
    qkv, proj = (f"{hf}.{name}" if hf else name for name in names)
    three = ("attn_q", "attn_k", "attn_v")

    def split(end: str, dims: str, columns: str) -> TensorRow:
        return TensorRow(
            (f"{qkv}.{end}",), tuple(f"{name}.{end}" for name in three), (dims,), gguf_dims=(columns,) * 3
        )  # fmt: skip

    return (
        split("weight", f"3*{width},{width}", f"{width},{width}"),
        *((split("bias", f"3*{width}", width),) if bias else ()),
        *linear(proj, "attn_out", f"{width},{width}", REQUIRED if bias else None),
    )


def norms(
    first: str, second: str, *, bias: bool = True, width: str = TOWER_WIDTH, gguf: tuple[str, str] = ("ln1", "ln2")
) -> tuple[TensorRow, ...]:
    """The norms before attention and MLP."""
    need = REQUIRED if bias else None
    return (*norm(first, gguf[0], width, need), *norm(second, gguf[1], width, need))


def mlp(
    up: str = "mlp.fc1", down: str = "mlp.fc2", gate: str = "", *,
    bias: bool = True, width: str = TOWER_WIDTH, ffn: str = "intermediate_size",
) -> tuple[TensorRow, ...]:
    """Up and down projections, and a gate if it is named."""
    need = REQUIRED if bias else None
    gates = linear(gate, "ffn_gate", f"{ffn},{width}", need) if gate else ()
    return (*gates, *linear(up, "ffn_up", f"{ffn},{width}", need), *linear(down, "ffn_down", f"{width},{ffn}", need))


def patches(hf: str, *, bias: bool = True, width: str = TOWER_WIDTH, size: str = "patch_size") -> tuple[TensorRow, ...]:
    """The patch convolution, [width, 3, size, size]."""
    weight = tensor(f"{hf}.weight", "v.patch_embd.weight", f"{width},3,{size},{size}")
    return (weight, tensor(f"{hf}.bias", "v.patch_embd.bias", width)) if bias else (weight,)


def patches_in_time(hf: str, *, width: str = TOWER_WIDTH, size: str = "patch_size") -> tuple[TensorRow, ...]:
    """The same over image pairs, [width, 3, 2, size, size]; a GGUF has one convolution for each of the two."""
    one = f"{width},3,{size},{size}"
    return (
        TensorRow(
            (f"{hf}.weight",), ("v.patch_embd.weight", "v.patch_embd.weight.1"), (f"{width},3,2,{size},{size}",),
            gguf_dims=(one, one), order=(f"swap:1,3*{width},2",),
        ),
    )


VISION_EPS = epsilon("vision", "vision_config.layer_norm_eps")
ACTIVATION = Key("", ("vision_config.hidden_act",), "str", converter=activation)
PATCHES = "image_size/patch_size*image_size/patch_size"


def vision(**values: object) -> dict[str, object]:
    """Defaults of a vision_config."""
    return {f"vision_config.{name}": value for name, value in values.items()}


def siglip(hf: str, *, positions: str = f"{PATCHES},{TOWER_WIDTH}", part: str = "") -> tuple[TensorRow, ...]:
    """SigLIP: patches, positions, layers, and a final norm.

    `part` ("vision_config.") prefixes size words that another part has too.
    """
    return (
        *patches(f"{hf}embeddings.patch_embedding"),
        tensor(f"{hf}embeddings.position_embedding.weight", "v.position_embd.weight", positions),
        *layers(
            *norms("layer_norm1", "layer_norm2"), *tower_attention(), *mlp(ffn=f"{part}intermediate_size"),
            hf=f"{hf}encoder.layers.{{n}}.", depth=f"{part}num_hidden_layers",
        ),
        *norm(f"{hf}post_layernorm", "v.post_ln", TOWER_WIDTH, REQUIRED),
    )


def intern(need_norms: str | None) -> tuple[TensorRow, ...]:
    """InternViT: a class token before the patches, layers with scaled outputs."""
    v = "vision_model."
    return (
        tensor(f"{v}embeddings.class_embedding", "v.class_embd", f"1,1,{TOWER_WIDTH}"),
        *patches(f"{v}embeddings.patch_embedding"),
        tensor(f"{v}embeddings.position_embedding", "v.position_embd.weight", f"1,{PATCHES}+1,{TOWER_WIDTH}"),
        *layers(
            *norm("norm1", "ln1", TOWER_WIDTH, OPTIONAL), *norm("norm2", "ln2", TOWER_WIDTH, OPTIONAL),
            *fused_attention(), *norm("attn.q_norm", "attn_q_norm", TOWER_WIDTH, need=OPTIONAL),
            *norm("attn.k_norm", "attn_k_norm", TOWER_WIDTH, need=OPTIONAL), *mlp(),
            tensor("ls1", "ls1.weight", TOWER_WIDTH), tensor("ls2", "ls2.weight", TOWER_WIDTH),
            hf=f"{v}encoder.layers.{{n}}.",
        ),
    )
