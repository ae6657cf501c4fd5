"""How the tensors of a source file are had back from the tensors of the `.apr`, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aprfmt.arch.links import Link
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.rowmap import BufferedPiece
from aprfmt.canonical.tensor import of_pieces
from aprfmt.convert.lossless.recipe import Recipe, RecipeWriter, read_recipe
from aprfmt.formats import apr2
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.gguf import GgufNative, GgufPart
from aprfmt.formats.hf_files import read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.segments import resolved
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor

MAX_MAPPED_BYTES = 64 << 20
"""Largest tensor of mapped values (norms, decays) that is made a second time to see whether it is exact."""


@dataclass(slots=True)
class SourceTensors:
    """The tensors of the source of `c`, of which the `.apr` holds some in fewer bytes (`stored`)."""

    c: Canonical
    stored: Mapping[str, str]
    _own: dict[str, str] = field(init=False)
    _links: dict[str, Link] = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.c.tensors.values()
        self._own = {t.source.name: t.name for t in tensors if t.source is not None}
        self._links = {name: t.link for t in tensors if t.link is not None for name in t.link.gguf}

    def write(self, writer: RecipeWriter, name: str) -> None:
        """Adds the source tensor `name`: the `.apr`'s own, one of a link, or its bytes where a link is not exact."""
        c, original = self.c, self.c.model.tensors[name]
        own, link = self._own.get(name), self._links.get(name)
        if own is None and (link is None or link.row_map.is_plain):
            own = c.dropped[name]
        if own is not None:
            writer.tensor(c.tensors[own], self.stored.get(own))
        elif link is not None and (not link.row_map.value or self._comes_back(link, original)):
            writer.link(link, original, c.tensors, self.stored)
        else:
            writer.literal(original.raw())

    def _comes_back(self, link: Link, original: Tensor) -> bool:
        """Whether the mapped values of the `.apr` give the source's again, bit by bit."""
        if original.n_bytes > MAX_MAPPED_BYTES:
            return False
        outs = [self.c.tensors[name].out(name, self.stored.get(name)) for name in link.hf]
        pieces = [BufferedPiece(out.name, out.dtype, out.shape, partial(_bytes_of, out)) for out in outs]
        made = of_pieces(original.name, pieces, link.row_map, link.gguf.index(original.name))
        return made.dtype == original.dtype and b"".join(map(bytes, made.chunks())) == original.raw()


def _bytes_of(tensor: OutTensor) -> Iterator[Buffer]:
    return resolved(tensor.chunks())


# --- whole sources ---

CONFIG = "config.json"

# Files that hold the tokenizer's lists.
_LIST_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")

# Formats of sources that have recipes.
_FORMATS = ("gguf", "hf", "safetensors")


def restorable(c: Canonical, format: str) -> Recipe | None:
    """The recipe of a source of the `format` that `c` is, or was imported from; None where it gives other files."""
    if apr2.native_of(c.model) is not None:
        value = c.model.metadata.get(SOURCE_KEY)
        others = [other for other in _FORMATS if other != format]
        if isinstance(value, Mapping) and value.get("format") in others:
            return None  # to hold it against the tensors would be for nothing
    else:
        value = source_recipe(c) if c.model.format == format else None
    if value is None:
        return None
    recipe = read_recipe(value, c.tensors, c.model.tokenizer, str(c.model.path))
    return recipe if recipe is not None and recipe.format == format else None


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
