"""Canonical form -> one safetensors file."""

from __future__ import annotations

from aprfmt.canonical.model import Canonical, hf_side
from aprfmt.canonical.tensor import CanonicalTensor, Losses, plain_dtype
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.plain import EIGHT_BITS
from aprfmt.convert.lossless.recipe import restorable
from aprfmt.convert.targets.base import Output, Work
from aprfmt.errors import RefusedError
from aprfmt.formats import safetensors
from aprfmt.formats.out import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.pipe import FileLayout

TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Stored dtype -> config.json's word for it."""


def layouts(c: Canonical, work: Work) -> Output:
    """One safetensors file for `c`: the imported one itself where nothing changed."""
    tensors = hf_tensors(c, work.options.dtype, work.losses)
    recipe = restorable(c, "safetensors")
    if recipe is not None and keeps_all(c, tensors) and len(recipe.files) == 1:
        return Output([FileLayout(work.name, recipe.layouts()[0].segments)], tensors, lossless=True)
    own = c.model.native_as(SafetensorsNative)
    metadata = own.metadata if own is not None else {"format": "pt"}
    return Output([FileLayout(work.name, safetensors.layout(tensors, metadata))], tensors)


def hf_tensors(c: Canonical, dtype: str, losses: Losses) -> list[OutTensor]:
    """The tensors of a safetensors export: Hugging Face names, floats as `dtype`; quantized blocks become F16.

    8-bit floats are for what has two dims and more; biases and norms keep their dtype. Raises RefusedError for
    dtypes that safetensors does not have.
    """
    wanted = plain_dtype(dtype, EIGHT_BITS)
    if wanted is not None and DTYPES[wanted].safetensors is None:
        raise RefusedError(
            f"safetensors has no dtype {wanted}",
            path=c.model.path,
            hint="use --dtype f32, f16 or bf16, or export to GGUF",
        )
    out = []
    for tensor in hf_side(c.arch, c.tensors):
        target = _dtype(tensor, wanted)
        losses.note(tensor.original_dtype, target)
        out.append(tensor.out(tensor.name, target, overflow=losses.overflow))
    return out


def _dtype(tensor: CanonicalTensor, wanted: str | None) -> str:
    row = DTYPES[tensor.dtype]
    is_float = row.name in TORCH_NAMES or row.kind != "plain"
    if wanted is not None and is_float and (wanted not in EIGHT_BITS or len(tensor.shape) > 1):
        return wanted
    return tensor.dtype if row.safetensors is not None and not tensor.is_decoded else "F16"


def keeps_all(c: Canonical, tensors: list[OutTensor]) -> bool:
    """Whether every tensor is there under its name and in its dtype."""
    same = all(t.name in c.tensors and t.dtype == c.tensors[t.name].dtype for t in tensors)
    return same and not c.packs.decoded
