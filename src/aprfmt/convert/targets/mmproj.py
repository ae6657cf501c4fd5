"""Write the towers as the `clip` GGUF (mmproj) that llama.cpp's mtmd loads next to a language model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from aprfmt.arch import hparams as hp
from aprfmt.arch import names
from aprfmt.arch.row import Tower
from aprfmt.canonical.derived_tensors import Sources, compute_derived, derived_position
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.sides import gguf_side
from aprfmt.canonical.tensor import CanonicalTensor, is_float, is_matrix, plain_dtype
from aprfmt.convert.presets import file_type_of
from aprfmt.convert.targets.base import Output, Work
from aprfmt.convert.towers import assumed, tower_model
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf import DEFAULT_ALIGNMENT
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import KV
from aprfmt.formats.out_tensor import OutTensor, dominant_dtype
from aprfmt.io.pipe import FileLayout
from aprfmt.provenance import provenance
from aprfmt.text import first_few, plural

_OF_PATCHES = (".patch_embd.weight", ".patch_merger.weight")
"""Patch convolutions: F16 if the file is, else F32."""


def layouts(c: Canonical, work: Work) -> Output:
    """The GGUF of the towers of `c`.

    Raises RefusedError for a model without towers, UsageError for a quantization preset.
    """
    if work.quantization is not None:
        raise UsageError(
            f"--dtype {work.options.dtype}: towers are written as floats", hint="use --dtype f16, bf16, f32 or keep"
        )
    whole = len(c.tensors)
    tower = tower_model(c)
    work.losses.warnings += assumed(c)
    row = tower.arch
    assert isinstance(row, Tower)
    shared = sum(tensor.name in c.tensors for tensor in tower.tensors.values())
    work.losses.add(f"{plural(whole - shared, 'tensor')} of the language model dropped (--mmproj)")
    for part in tower.extra_parts():
        work.losses.add(f"{part} dropped: an mmproj GGUF cannot hold them")
    behind = [] if row.made else [name for name in tower.tensors if names.is_hf_only(row, name, tower.hparams)]
    if behind:
        work.losses.add(
            f"{plural(len(behind), 'tensor')} of the towers dropped, as llama.cpp does not read them: "
            f"{first_few(behind)}"
        )
    tensors = list(_tensors(tower, row, work, c))
    free = [tensor for tensor in tensors if not _is_fixed(row, tensor.name)]
    dtype = plain_dtype(work.options.dtype) or dominant_dtype(free)
    keys = list(_keys(tower, row, file_type_of(dtype)))
    segments = gguf_write.layout(keys, tensors, alignment=DEFAULT_ALIGNMENT)
    return Output([FileLayout(work.name, segments)], tensors)


def _tensors(c: Canonical, row: Tower, work: Work, whole: Canonical) -> Iterator[OutTensor]:
    """The tensors of the GGUF of `c`, the towers of `whole`."""
    wanted = plain_dtype(work.options.dtype)
    if wanted is not None and wanted not in ("F32", "F16", "BF16"):
        raise UsageError(
            f"--dtype {work.options.dtype}: towers are written as floats", hint="use --dtype f16, bf16 or f32"
        )
    sources = Sources(c.tensors, c.hparams, whole.tensors.get(whole.embedding), whole.tokenizer)
    stored = gguf_side(row, c.hparams, c.tensors)
    known = {tensor.name: tensor.shape for tensor in stored}
    made = {t.name: t for t in compute_derived(row, sources) if known.get(t.name) != t.shape} if row.made else {}
    for name in made.keys() & known.keys():
        shape = list(made[name].shape)
        work.losses.add(f"{name} is {shape}, computed from {list(known[name])} for the GGUF's image size")
    every = (*(tensor for tensor in stored if tensor.name not in made), *made.values())
    for tensor in sorted(every, key=lambda tensor: derived_position(row, tensor.name)):
        dtype = _dtype(row, tensor, wanted)
        work.losses.note(tensor.original_dtype, dtype)
        yield tensor.out(tensor.name, dtype, work.losses.overflow)


def _is_named(name: str, texts: Iterable[str]) -> bool:
    """Whether the name contains one of the patterns; "^" is its start, "*" matches anything."""
    return any(re.search(".*".join(map(re.escape, text.split("*"))), f"^{name}") for text in texts)


def _is_fixed(row: Tower, name: str) -> bool:
    """Whether the tensor's dtype ignores the requested one."""
    return _is_named(name, (*row.f32, *row.f16))


def _dtype(row: Tower, tensor: CanonicalTensor, wanted: str | None) -> str:
    """The dtype in which llama.cpp's converter stores the tensor, for the requested dtype `wanted`."""
    if not is_float(tensor.dtype):
        raise RefusedError(
            f"tower tensors must be floats, not {tensor.dtype}",
            tensor=tensor.name,
            hint="decode it first: apr convert SRC -o FOLDER --dtype bf16",
        )
    name, dtype = tensor.name, wanted or tensor.dtype
    if _is_named(name, row.f32):
        return "F32"
    if _is_named(name, row.f16):
        return "F16"
    if any(text in name for text in (*_OF_PATCHES, *row.convolutions)):
        return "F16" if dtype == "F16" else "F32"
    return dtype if is_matrix(name, tensor.shape) else "F32"


def _keys(c: Canonical, row: Tower, file_type: int) -> Iterator[KV]:
    yield "general.architecture", GgufType.STRING, row.gguf
    yield "general.type", GgufType.STRING, "mmproj"
    yield from provenance.to_gguf(c.info, c.general)
    yield "general.file_type", GgufType.UINT32, file_type
    yield from map(gguf_write.typed_kv, hp.to_gguf(c.hparams, row))
    yield "general.quantization_version", GgufType.UINT32, 2
