"""Building blocks of the rows of towers: the keys and tensors that most of them share. Data only."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import Converter
from aprfmt.arch.row import REQUIRED, Key, TensorRow
from aprfmt.arch.rows.parts import block, linear, norm, tensor

WIDTH = "hidden_size"
"""What a tower's own width is called in sizes; `hidden` is the language model's."""


def projector(name: str, *, part: str = "") -> Key:
    """The key that tells llama.cpp which network it is; `part` ("vision", "audio") where a file holds two."""
    return Key(f"{part}.projector_type" if part else "projector_type", kind="str", constant=name)


def sees(*keys: Key) -> tuple[Key, ...]:
    """Keys of a tower that sees, behind those that all of them have."""
    return (Key("has_vision_encoder", kind="bool", constant=True), width("vision"), *keys)


def hears(*keys: Key) -> tuple[Key, ...]:
    """Keys of a tower that hears, behind those that all of them have."""
    return (Key("has_audio_encoder", kind="bool", constant=True), width("audio"), *keys)


def width(part: str) -> Key:
    """How many values the tower gives the language model at each position."""
    return Key(f"{part}.projection_dim", field="hidden_size")


_SIZES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}


def sizes(part: str = "vision", config: str = "", **names: str | tuple[str, ...]) -> tuple[Key, ...]:
    """Sizes of a transformer in a tower: keys of the GGUF's `part`, of the object `config` of a config.json.

    `names` gives other spellings by the last word of the GGUF key: sizes(block_count="depth"); "" leaves one out.
    A tower that hears has no image and no patches.
    """
    config = config or f"{part}_config"
    found = []
    for gguf, own in _SIZES.items():
        told = names.get(
            gguf.rpartition(".")[2], "" if part == "audio" and gguf in ("image_size", "patch_size") else own
        )
        spelled = (told,) if isinstance(told, str) else told
        if spelled != ("",):
            found.append(Key(f"{part}.{gguf}", tuple(f"{config}.{name}" for name in spelled)))
    return tuple(found)


def preprocessor(gguf: str, name: str, kind: str = "u32", converter: Converter | None = None) -> Key:
    """A key that preprocessor_config.json has."""
    return Key(gguf, (f"preprocessor_config.{name}",), kind, converter=converter)


IMAGE = (
    preprocessor("vision.image_mean", "image_mean", "f32[]"),
    preprocessor("vision.image_std", "image_std", "f32[]"),
)
"""How the colours of an image are scaled."""


def epsilon(part: str, *names: str) -> Key:
    """The epsilon of the tower's norms, by its config.json keys, whole paths."""
    return Key(f"{part}.attention.layer_norm_epsilon", names, "f32")


GELU = Key("use_gelu", kind="bool", constant=True)
SILU = Key("use_silu", kind="bool", constant=True)


def layers(
    *rows: TensorRow, hf: str, gguf: str = "v.blk.{n}.", depth: str = "num_hidden_layers"
) -> tuple[TensorRow, ...]:
    """Rows of a layer of a tower."""
    return block(*rows, hf=hf, gguf=gguf, depth=depth)


def attention(
    hf: str = "self_attn",
    *,
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
    bias: bool = True,
    k_bias: bool = True,
    order: tuple[str, ...] = (),
    width: str = WIDTH,
) -> tuple[TensorRow, ...]:
    """Separate Q, K, V and output projections of as many heads each; `order` is that of the rows of Q and K."""
    need = REQUIRED if bias else None
    q, k, v, o = (f"{hf}.{name}" if hf else name for name in names)
    square = f"{width},{width}"
    return (
        *linear(q, "attn_q", square, need, order=order),
        *linear(k, "attn_k", square, need if k_bias else None, order=order),
        *linear(v, "attn_v", square, need),
        *linear(o, "attn_out", square, need),
    )


def fused_attention(
    hf: str = "attn", *, names: tuple[str, str] = ("qkv", "proj"), bias: bool = True, width: str = WIDTH
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
    first: str, second: str, *, bias: bool = True, width: str = WIDTH, gguf: tuple[str, str] = ("ln1", "ln2")
) -> tuple[TensorRow, ...]:
    """The norms before attention and MLP."""
    need = REQUIRED if bias else None
    return (*norm(first, gguf[0], width, need), *norm(second, gguf[1], width, need))


def mlp(
    up: str = "mlp.fc1",
    down: str = "mlp.fc2",
    gate: str = "",
    *,
    bias: bool = True,
    width: str = WIDTH,
    ffn: str = "intermediate_size",
) -> tuple[TensorRow, ...]:
    """Up and down projections, and a gate where it has a name."""
    need = REQUIRED if bias else None
    gates = linear(gate, "ffn_gate", f"{ffn},{width}", need) if gate else ()
    return (*gates, *linear(up, "ffn_up", f"{ffn},{width}", need), *linear(down, "ffn_down", f"{width},{ffn}", need))


def patches(hf: str, *, bias: bool = True, width: str = WIDTH, size: str = "patch_size") -> tuple[TensorRow, ...]:
    """The convolution that makes patches of an image, [width, 3, size, size]."""
    weight = tensor(f"{hf}.weight", "v.patch_embd.weight", f"{width},3,{size},{size}")
    return (weight, tensor(f"{hf}.bias", "v.patch_embd.bias", width)) if bias else (weight,)


def patches_in_time(hf: str, *, width: str = WIDTH, size: str = "patch_size") -> tuple[TensorRow, ...]:
    """The same over pairs of images, [width, 3, 2, size, size]; a GGUF has a convolution for each of the two."""
    one = f"{width},3,{size},{size}"
    return (
        TensorRow(
            (f"{hf}.weight",),
            ("v.patch_embd.weight", "v.patch_embd.weight.1"),
            (f"{width},3,2,{size},{size}",),
            gguf_dims=(one, one),
            order=(f"swap:1,3*{width},2",),
        ),
    )


def at(prefix: str, *rows: TensorRow) -> tuple[TensorRow, ...]:
    """The rows with a beginning of their checkpoint names, for towers in several places."""
    return tuple(replace(row, hf=tuple(prefix + name for name in row.hf)) for row in rows)
