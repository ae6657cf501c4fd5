"""Canonical form -> `.apr`: typed metadata, tokenizer, the record of the source files, tensors in HF order."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch import hparams as hp
from aprfmt.arch import names
from aprfmt.canonical.envelope import LEFT_ASIDE
from aprfmt.canonical.model import Canonical, apr_metadata_of, gguf_side
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_exact, matrix_dtype
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode, encode
from aprfmt.convert.lossless.recipe import source_recipe
from aprfmt.convert.quantize.quantization import Recoding, with_apr_names
from aprfmt.convert.targets.base import Output, Work
from aprfmt.errors import AprError
from aprfmt.formats import apr2_write, apr_metadata
from aprfmt.formats.apr2 import Apr2Native
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import FileLayout, Stream, source_jobs
from aprfmt.model import Model
from aprfmt.provenance.model_card import CARD
from aprfmt.tokenizer import apr as tokenizer_apr

HAS_VOCAB = 0x0200
QUANTIZED = 0x0020
HAS_MODEL_CARD = 0x0080

# Only norms and biases are ever widened; a larger tensor is not decoded to see whether it could be narrowed.
_LARGEST_NARROWED = 16 << 20


def layouts(c: Canonical, work: Work) -> Output:
    """The `.apr` for `c`, with weights as the dtype that was asked for or by a mix; see apr_contents."""
    targets: dict[str, Recoding] = {}
    dtype = work.options.dtype
    if work.quantization is not None:
        side = gguf_side(c.arch, c.hparams, c.tensors) if c.arch is not None else list(c.tensors.values())
        c, targets = with_apr_names(c, side, work.quantization.targets(c, side, work.losses))
        dtype = "keep"
    metadata, tensors, flags = apr_contents(
        c, dtype, work.losses, targets, with_source=work.options.tokenizer is None
    )
    if SOURCE_KEY not in metadata:
        for tensor in tensors:
            work.losses.note(c.tensors[tensor.name].dtype, tensor.dtype)
    segments = apr2_write.layout(apr_metadata.dump(metadata), tensors, flags=flags)
    return Output([FileLayout(work.name, segments, crc_footer=True)], tensors, is_lossless(c, metadata))


def is_lossless(c: Canonical, metadata: Mapping[str, object]) -> bool:
    """Whether an `.apr` of this metadata gives every file of the source back, byte for byte."""
    return SOURCE_KEY in metadata and c.model.convention != "apr" and not (c.left_out or c.parts_left_out)


def copy(model: Model, name: str) -> Output | None:
    """The same `.apr`, byte for byte, whatever its generation; shards become the file that they were cut from.

    None where the source is something else.
    """
    if model.convention != "apr":
        return None
    tensors = [OutTensor(t.name, t.dtype, t.shape, t.n_bytes, lambda: ()) for t in model.tensors.entries]
    joined = model.native_as(JoinedNative)
    if joined is not None:
        layout = FileLayout(name, apr2_write.layout_from_model(model), crc_footer=True)
        return Output([layout], tensors, True, ready=joined.verify)
    source = model.sources[0]
    segment = Stream(source.size, lambda: source_jobs(source, 0, source.size), name)
    return Output([FileLayout(name, [segment])], tensors, True)


def apr_contents(
    c: Canonical,
    dtype: str,
    losses: Losses,
    targets: Mapping[str, Recoding] | None = None,
    *,
    with_source: bool = True,
) -> tuple[dict[str, object], list[OutTensor], int]:
    """Metadata, tensors and header flags of the `.apr` for `c`; `targets` go before `dtype`.

    The record of the source files (`with_source`) is written only when every tensor is kept: it must be exact.
    """
    narrow = _narrow_dtypes(c) if dtype == "keep" else {}
    tensors = []
    for t in c.tensors.values():
        name = narrow.get(t.name) or matrix_dtype(t, dtype, _gguf_name(c, t.name))
        target = (targets or {}).get(t.name, Recoding(name))
        tensors.append(t.out(t.name, target.dtype, losses.overflow, target.weights, padded=True))
    kept = not c.packs.decoded and all(
        out.dtype in (c.tensors[out.name].dtype, narrow.get(out.name)) for out in tensors
    )
    metadata = _further_metadata(c, with_tokenizer=with_source) | apr_metadata_of(c, tensors)
    if kept and with_source and c.envelope is not None:
        metadata = _with_envelope(c, metadata, c.envelope.metadata, losses)
    if kept and with_source and (record := source_recipe(c, narrow)) is not None:
        metadata[SOURCE_KEY] = record
    if true_dtypes := apr2_write.true_dtypes(tensors):
        metadata["aprfmt.tensors"] = true_dtypes
    return metadata, tensors, _flags(c, tensors)


def _gguf_name(c: Canonical, name: str) -> str:
    return (names.gguf_name(c.arch, name) if c.arch is not None else None) or name


def _with_envelope(
    c: Canonical, metadata: dict[str, object], facts: Mapping[str, object], losses: Losses
) -> dict[str, object]:
    """`metadata` with what the envelope says; left aside where that contradicts the tensors or the tokenizer."""
    merged = {key: value for key, value in {**metadata, **facts, **c.stated}.items() if value is not None}
    try:
        tokenizer = tokenizer_apr.from_metadata(merged)
        if c.arch is not None:
            shapes = {t.name: t.shape for t in c.tensors.values()}
            names.check_shapes(c.arch, hp.from_apr(merged), shapes)
        if (tokenizer and tokenizer.tokens) == (c.tokenizer and c.tokenizer.tokens):
            return merged
    except AprError:
        pass
    losses.warnings.append(
        "what the file says of the .apr it was made from contradicts its tensors and is left aside"
    )
    return metadata | {LEFT_ASIDE: True}


def _narrow_dtypes(c: Canonical) -> dict[str, str]:
    """Tensors of a GGUF that an `.apr` held in fewer bytes and that still fit: {name: dtype}."""
    wanted = c.envelope.dtypes if c.envelope is not None else {}
    return {
        name: dtype for name, dtype in wanted.items() if name in c.tensors and _fits(c.tensors[name], dtype)
    }


def _fits(tensor: CanonicalTensor, dtype: str) -> bool:
    if tensor.n_bytes > _LARGEST_NARROWED or not is_exact(dtype, tensor.dtype):
        return False
    values = tensor.produced.values()
    return bool((decode(dtype, encode(dtype, values), tensor.shape) == values).all())


def _further_metadata(c: Canonical, *, with_tokenizer: bool) -> dict[str, object]:
    """The metadata of an `.apr` that is converted, for the keys that nothing here models."""
    if c.model.native_as(Apr2Native) is None:
        return {}
    own = {SOURCE_KEY, apr_metadata.TRUE_DTYPES_KEY}
    return {
        key: value
        for key, value in apr_metadata.canonicalize_aliases(c.model.metadata).items()
        if key not in own and (with_tokenizer or not key.startswith(("tokenizer.", "aprfmt.tokenizer")))
    }


def _flags(c: Canonical, tensors: list[OutTensor]) -> int:
    flags = HAS_VOCAB if c.tokenizer is not None and c.tokenizer.tokens else 0
    if any(DTYPES[t.dtype].is_quantized for t in tensors):
        flags |= QUANTIZED
    if (folder := c.model.native_as(HfNative)) and any(p.name == CARD for p in folder.other_files):
        flags |= HAS_MODEL_CARD
    if (apr := c.model.native_as(Apr2Native)) is not None:
        flags |= apr.header.flags & HAS_MODEL_CARD
    return flags
