"""Canonical form -> `.apr`: typed metadata, tokenizer, the record of the source files, tensors in HF order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aprfmt.arch import hparams as hp
from aprfmt.arch import names
from aprfmt.canonical.dtype_choice import Losses, is_exact, matrix_dtype
from aprfmt.canonical.envelope import LEFT_ASIDE
from aprfmt.canonical.model import Canonical, apr_metadata_of
from aprfmt.canonical.named import gguf_side
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.convert import decode
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import encode
from aprfmt.convert.lossless.recipe import RecipeWriter, read_recipe
from aprfmt.convert.lossless.source import SourceTensors
from aprfmt.convert.quantize.quantization import Quantization, Target, with_apr_names
from aprfmt.errors import AprError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr2 import Apr2Native
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.gguf import GgufNative, GgufPart
from aprfmt.formats.hf_files import read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.segments import FileLayout
from aprfmt.provenance.model_card import CARD
from aprfmt.tokenizer import apr as tokenizer_apr

HAS_VOCAB = 0x0200
QUANTIZED = 0x0020
HAS_MODEL_CARD = 0x0080

# Only norms and biases are ever widened; a larger tensor is not decoded to see whether it could be narrowed.
_LARGEST_NARROWED = 16 << 20

CONFIG = "config.json"

# Files that hold the tokenizer's lists.
_LIST_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")


def apr_layout(
    c: Canonical,
    name: str,
    dtype: str,
    losses: Losses,
    quantization: Quantization | None = None,
    *,
    with_source: bool = True,
) -> tuple[FileLayout, list[OutTensor], bool]:
    """The `.apr` for `c` with weights as `dtype` ("keep" keeps them) or by a mix, its tensors; see apr_contents.

    The third value tells whether the source files can be had back from it.
    """
    targets: dict[str, Target] = {}
    if quantization is not None:
        side = gguf_side(c.arch, c.hparams, c.tensors) if c.arch is not None else list(c.tensors.values())
        c, targets = with_apr_names(c, side, quantization.targets(c, side, losses))
        dtype = "keep"
    metadata, tensors, flags = apr_contents(c, dtype, losses, targets, with_source=with_source)
    if SOURCE_KEY not in metadata:
        for tensor in tensors:
            losses.note(c.tensors[tensor.name].dtype, tensor.dtype)
    segments = apr2_write.layout(apr_metadata.dump(metadata), tensors, flags=flags)
    return FileLayout(name, segments, crc_footer=True), tensors, SOURCE_KEY in metadata


def apr_contents(
    c: Canonical,
    dtype: str,
    losses: Losses,
    targets: Mapping[str, Target] | None = None,
    *,
    with_source: bool = True,
) -> tuple[dict[str, Any], list[OutTensor], int]:
    """Metadata, tensors and header flags of the `.apr` for `c`; `targets` go before `dtype`.

    The record of the source files (`with_source`) is written only when every tensor is kept: it must be exact.
    """
    narrow = _narrowed(c) if dtype == "keep" else {}
    tensors = []
    for t in c.tensors.values():
        name = narrow.get(t.name) or matrix_dtype(t, dtype, _gguf_name(c, t.name))
        target = (targets or {}).get(t.name, Target(name))
        tensors.append(t.out(t.name, target.dtype, losses.overflow, target.weights, padded=True))
    kept = not c.packs.decoded and all(
        out.dtype in (c.tensors[out.name].dtype, narrow.get(out.name)) for out in tensors
    )
    metadata = _carried(c, with_tokenizer=with_source) | apr_metadata_of(c, tensors)
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
    c: Canonical, metadata: dict[str, Any], said: Mapping[str, Any], losses: Losses
) -> dict[str, Any]:
    """`metadata` with what the envelope says; left aside where that contradicts the tensors or the tokenizer."""
    merged = {key: value for key, value in {**metadata, **said, **c.stated}.items() if value is not None}
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


def _narrowed(c: Canonical) -> dict[str, str]:
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


def _carried(c: Canonical, *, with_tokenizer: bool) -> dict[str, Any]:
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
        flags |= apr.flags & HAS_MODEL_CARD
    return flags


def source_recipe(c: Canonical, stored: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The record from which the source files can be rebuilt byte for byte; None for sources that have none.

    `stored` gives the dtype of tensors that are kept in fewer bytes than the source has them.
    """
    if apr2.native_of(c.model) is not None:
        record: dict[str, Any] | None = c.model.metadata.get(SOURCE_KEY)
        fits = record is not None and read_recipe(record, c.tensors, c.tokenizer, str(c.model.path))
        return record if fits else None
    if (gguf := c.model.native_as(GgufNative)) is not None:
        return _gguf_recipe(c, gguf.parts, stored or {})
    if (folder := c.model.native_as(HfNative)) is not None:
        return _hf_recipe(c, folder)
    if c.model.native_as(SafetensorsNative) and not (c.parts_left_out or c.packs.decoded):
        return _safetensors_recipe(c)
    return None


def _gguf_recipe(c: Canonical, parts: list[GgufPart], stored: Mapping[str, str]) -> dict[str, Any]:
    writer = RecipeWriter("gguf", c.tokenizer)
    tensors = SourceTensors(c, stored)
    for part in parts:
        writer.start(part.source.path.rpartition("/")[2])
        _gguf_header(writer, part)
        position = part.infos_end
        for info in sorted(part.infos, key=lambda i: (i.offset, i.n_bytes)):
            if info.n_bytes == 0:
                continue
            writer.literal(part.source.view(position, info.offset - position))
            tensors.write(writer, info.name)
            position = info.offset + info.n_bytes
        writer.literal(part.source.view(position))
    return writer.value()


# GGUF key -> list of the tokenizer that it holds.
_LIST_KEYS = {
    "tokenizer.ggml.tokens": "tokens",
    "tokenizer.ggml.merges": "merges",
    "tokenizer.ggml.token_type": "types",
    "tokenizer.ggml.scores": "scores",
}


def _gguf_header(writer: RecipeWriter, part: GgufPart) -> None:
    position = 0
    for key, which in sorted(
        _LIST_KEYS.items(), key=lambda item: getattr(part.entries.get(item[0]), "start", 0)
    ):
        entry = part.entries.get(key)
        if entry is None:
            continue
        writer.literal(part.source.view(position, entry.value_start - position))
        writer.gguf_list(which, part.source.view(entry.value_start, entry.end - entry.value_start))
        position = entry.end
    writer.literal(part.source.view(position, part.infos_end - position))


def _safetensors_recipe(c: Canonical) -> dict[str, Any]:
    writer = RecipeWriter("safetensors", c.tokenizer)
    source = c.model.sources[0]
    writer.start(source.path.rpartition("/")[2])
    _safetensors_file(writer, c, source.path)
    return writer.value()


def _hf_recipe(c: Canonical, native: HfNative) -> dict[str, Any]:
    writer = RecipeWriter("hf", c.tokenizer)
    for path in native.other_files:
        if c.parts_left_out and path.name == CONFIG:
            continue  # it describes the whole, of which only the language model is carried
        data = read_text_file(native.folder / path)
        writer.start(path.as_posix())
        if path.name in _LIST_FILES:
            writer.tokenizer_file(data)
        else:
            writer.literal(data)
    if c.parts_left_out or c.packs.decoded:
        return writer.value()
    if native.index is not None and native.index_name is not None:
        writer.start(native.index_name)
        writer.literal(native.index)
    for name, source, _, _ in native.shards:
        writer.start(name)
        _safetensors_file(writer, c, source.path)
    return writer.value()


def _safetensors_file(writer: RecipeWriter, c: Canonical, path: str) -> None:
    source = next(s for s in c.model.sources if s.path == path)
    tensors = SourceTensors(c, {})
    position = 0
    for tensor in sorted(c.model.tensors.entries, key=lambda t: (t.offset, t.n_bytes)):
        if tensor.source is not source or tensor.n_bytes == 0:
            continue
        writer.literal(source.view(position, tensor.offset - position))
        tensors.write(writer, tensor.name)
        position = tensor.offset + tensor.n_bytes
    writer.literal(source.view(position))
