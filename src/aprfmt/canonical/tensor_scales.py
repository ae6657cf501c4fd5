"""GGML blocks with a separate tensor scale: combines a weight and its scales into one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from aprfmt.canonical.packed import Decoding, PackedForm, PackedTensor, decode_weight
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import INPUT_SCALE, SCALE, Scheme
from aprfmt.codecs.packed_blocks import scaled
from aprfmt.model import Model, Tensor

_GGUF_ENDINGS = {SCALE: ".scale", INPUT_SCALE: ".input_scale"}
_HF_ENDINGS = {SCALE: ".weight_scale_2", INPUT_SCALE: ".input_scale"}
_SCALED = Scheme("scaled", "scaled blocks", (), ".weight", (), (), (), ".weight", scaled)


def scale_name(weight: str, which: str, *, gguf: bool) -> str:
    """The name of a scale of the tensor `weight`: llama.cpp's in a GGUF, else ModelOpt's."""
    return weight.removesuffix(".weight") + (_GGUF_ENDINGS if gguf else _HF_ENDINGS)[which]


def scaled_weights(model: Model, decoding: Decoding, takes: Callable[[str], bool]) -> list[Tensor | PackedTensor]:
    """The tensors of a GGUF or an `.apr`, with each weight of blocks and its scales combined.

    `takes` tells whether a name may be that of a scale. Raises RefusedError for scales that do not match the weight.
    """
    entries = model.tensors.entries
    gguf, used = model.convention == "gguf", set[str]()
    endings = _GGUF_ENDINGS if gguf else _HF_ENDINGS
    if model.convention == "hf" or not any(t.name.endswith(tuple(endings.values())) for t in entries):
        return [*entries]
    found: list[Tensor | PackedTensor] = []
    for tensor in entries:
        own = {}
        if tensor.name.endswith(".weight") and DTYPES[tensor.dtype].kind == "ggml":
            names_ = {which: scale_name(tensor.name, which, gguf=gguf) for which in endings}
            own = {w: model.tensors[n] for w, n in names_.items() if n in model.tensors and takes(n)}
        used |= {scale.name for scale in own.values()}
        found.append(_scaled(tensor, own, decoding) if own else tensor)
    return [t for t in found if t.name not in used]


def _scaled(tensor: Tensor, own: Mapping[str, Tensor], decoding: Decoding) -> PackedTensor:
    sources = {".weight": tensor, **own}
    values = decode_weight(_SCALED, sources, {})
    form = PackedForm(_SCALED, {}, (*sources,), tensor.shape, "BF16")
    weight = PackedTensor(tensor.name, decoding.dtype or form.dtype, form, tuple(sources.values()), values)
    is_kept = (
        not decoding.decode
        or decoding.keep_stored
        or (decoding.keep_blocks and decoding.keep_scales and decoding.dtype is None)
    )
    blocks = values.blocks()
    return replace(weight, dtype=tensor.dtype, blocks=blocks) if is_kept and blocks is not None else weight
