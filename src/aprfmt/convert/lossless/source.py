"""Writes recipes: how the files of a source are rebuilt from what the `.apr` holds, segment by segment."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from aprfmt.arch.links import Link
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.rowmap import BufferedPiece, produce
from aprfmt.convert.lossless.recipe import Recipe, gguf_list, read_recipe, safe_name
from aprfmt.errors import LimitError
from aprfmt.formats import apr2
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.gguf import GgufNative, GgufPart
from aprfmt.formats.hf_files import read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.segments import run_jobs
from aprfmt.io.source import Buffer, Source
from aprfmt.limits import MAX_LITERAL_BYTES
from aprfmt.model import Tensor
from aprfmt.tokenizer import splice

MAX_MAPPED_BYTES = 64 << 20
"""Largest tensor of mapped values (norms, decays) that is made a second time to see whether it is exact."""

CONFIG = "config.json"

# Files that hold the tokenizer's lists.
_LIST_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")

# GGUF key -> list of the tokenizer that it holds.
_LIST_KEYS = {
    "tokenizer.ggml.tokens": "tokens",
    "tokenizer.ggml.merges": "merges",
    "tokenizer.ggml.token_type": "types",
    "tokenizer.ggml.scores": "scores",
}

# Formats of sources that have recipes.
_FORMATS = ("gguf", "hf", "safetensors")

_ZEROS = bytes(1 << 16)


@dataclass(slots=True)
class _File:
    """The segments of one source file while they are collected; `n_literal` bytes of literals stand at its end."""

    name: str
    segments: list[list[object]] = field(default_factory=list)
    size: int = 0
    n_literal: int = 0


class RecipeWriter:
    """Collects the files of the source of `c` and their literals, then gives the JSON value.

    `stored` gives the dtype of tensors that the `.apr` holds in fewer bytes than the source has them.
    """

    def __init__(self, format: str, c: Canonical, stored: Mapping[str, str] | None = None) -> None:
        self._format, self._c, self._stored = format, c, stored or {}
        self._files: list[_File] = []
        self._literals = bytearray()
        tensors = c.tensors.values()
        self._own = {t.source.name: t.name for t in tensors if t.source is not None}
        self._links = {name: t.link for t in tensors if t.link is not None for name in t.link.gguf}

    def start(self, name: str) -> None:
        """Begins the next file. Raises CorruptError for a name that reading the recipe would refuse."""
        self._files.append(_File(safe_name(name)))

    def _add(self, segment: list[object], n_bytes: int, n_literal: int = 0) -> None:
        file = self._files[-1]
        file.segments.append(segment)
        file.size += n_bytes
        file.n_literal = n_literal

    def literal(self, data: bytes | memoryview) -> None:
        """Adds bytes as they are; runs of zeros cost nothing."""
        file = self._files[-1]
        if not len(data):
            return
        if _is_zero(data):
            self._add(["z", len(data)], len(data))
            return
        if len(self._literals) + len(data) > MAX_LITERAL_BYTES:
            raise LimitError(
                f"{file.name} holds more than {MAX_LITERAL_BYTES} bytes that are neither tensors nor vocabulary",
                hint="remove the files that do not belong to the model first",
            )
        self._literals += data
        n_literal = file.n_literal + len(data)
        if file.n_literal:
            file.segments.pop()
        self._add(["b", n_literal], len(data), n_literal)

    def tensor(self, name: str) -> None:
        """Adds the source tensor `name`: the `.apr`'s own, one of a link, or its bytes where a link is not exact."""
        c, original = self._c, self._c.model.tensors[name]
        own, link = self._own.get(name), self._links.get(name)
        if own is None and (link is None or link.row_map.is_plain):
            own = c.dropped[name]
        if own is not None:
            dtype = c.tensors[own].dtype
            self._add(["t", own, self._stored.get(own, dtype), dtype], original.n_bytes)
        elif link is not None and (not link.row_map.value or self._is_exact(link, original)):
            kept = [self._stored.get(name, c.tensors[name].dtype) for name in link.hf]
            dtypes = kept[0] if len(set(kept)) == 1 else kept
            body, position = link.row_map.to_json(), link.gguf.index(name)
            self._add(["l", _fold_experts(link), dtypes, original.dtype, body, position], original.n_bytes)
        else:
            self.literal(original.raw())

    def _is_exact(self, link: Link, original: Tensor) -> bool:
        """Whether the mapped values of the `.apr` give the source's again, bit by bit."""
        if original.n_bytes > MAX_MAPPED_BYTES:
            return False
        outs = [self._c.tensors[name].out(name, self._stored.get(name)) for name in link.hf]
        pieces = [BufferedPiece(out.name, out.dtype, out.shape, partial(_bytes_of, out)) for out in outs]
        made = produce(pieces, link.row_map, link.gguf.index(original.name))
        return made.dtype == original.dtype and made.data() == original.raw()

    def tensors(self, source: Source, position: int = 0) -> None:
        """Adds a file of the source from `position` to its end: its tensors, and what lies between them."""
        inside = (t for t in self._c.model.tensors.entries if t.source is source and t.n_bytes)
        for tensor in sorted(inside, key=lambda t: (t.offset, t.n_bytes)):
            self.literal(source.view(position, tensor.offset - position))
            self.tensor(tensor.name)
            position = tensor.offset + tensor.n_bytes
        self.literal(source.view(position))

    def gguf_list(self, which: str, source: memoryview) -> None:
        """Adds a GGUF array value; by reference when the tokenizer's list gives exactly these bytes."""
        tokenizer = self._c.tokenizer
        if tokenizer is not None and gguf_list(tokenizer, which) == source:
            self._add(["g", which], len(source))
        else:
            self.literal(source)

    def tokenizer_file(self, text: bytes) -> None:
        """Adds a tokenizer.json, vocab.json or merges.txt; its lists by reference where that is exact."""
        tokenizer = self._c.tokenizer
        pieces = splice.split(text, tokenizer) if tokenizer is not None else None
        for piece, n_bytes in pieces or ():
            if isinstance(piece, str):
                self.literal(piece.encode())
            else:
                self._add(["j", piece], n_bytes)
        if pieces is None:
            self.literal(text)

    def value(self) -> dict[str, object]:
        """The value of the metadata key."""
        files = [{"name": f.name, "size": f.size, "segments": f.segments} for f in self._files]
        literals = base64.b64encode(zlib.compress(bytes(self._literals), 9)).decode()
        return {"format": self._format, "files": files, "literals": literals}


def _bytes_of(tensor: OutTensor) -> Iterator[Buffer]:
    return run_jobs(tensor.chunks())


def _fold_experts(link: Link) -> list[object]:
    """The Hugging Face names of a link; those of its experts as one, with their number."""
    per_name = len(link.hf) // len(link.row.hf)
    out: list[object] = []
    for i, template in enumerate(link.row.hf):
        first = link.hf[i * per_name]
        if "{e}" in template:
            before = template.partition("{e}")[2]
            out.append([first[: len(first) - len(before) - 1] + "{e}" + before, per_name])
        else:
            out.append(first)
    return out


def _is_zero(data: bytes | memoryview) -> bool:
    steps = range(0, len(data), len(_ZEROS))
    return all(data[i : i + len(_ZEROS)] == _ZEROS[: len(data) - i] for i in steps)


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


def source_recipe(c: Canonical, stored: Mapping[str, str] | None = None) -> Mapping[str, object] | None:
    """The recipe from which the source files can be rebuilt byte for byte; None for sources that have none.

    `stored` gives the dtype of tensors that are kept in fewer bytes than the source has them.
    """
    if apr2.native_of(c.model) is not None:
        recipe: Mapping[str, object] | None = c.model.metadata.get(SOURCE_KEY)
        fits = recipe is not None and read_recipe(recipe, c.tensors, c.tokenizer, str(c.model.path))
        return recipe if fits else None
    if (gguf := c.model.native_as(GgufNative)) is not None:
        return _gguf_recipe(c, gguf.parts, stored or {})
    if (folder := c.model.native_as(HfNative)) is not None:
        return _hf_recipe(c, folder)
    if c.model.native_as(SafetensorsNative) and not (c.parts_left_out or c.packs.decoded):
        writer, source = RecipeWriter("safetensors", c), c.model.sources[0]
        writer.start(source.path.rpartition("/")[2])
        writer.tensors(source)
        return writer.value()
    return None


def _gguf_recipe(c: Canonical, parts: Sequence[GgufPart], stored: Mapping[str, str]) -> dict[str, object]:
    writer = RecipeWriter("gguf", c, stored)
    for part in parts:
        source, position = part.source, 0
        writer.start(source.path.rpartition("/")[2])
        found = [(entry, which) for key, which in _LIST_KEYS.items() if (entry := part.entries.get(key))]
        for entry, which in sorted(found, key=lambda pair: pair[0].start):
            writer.literal(source.view(position, entry.value_start - position))
            writer.gguf_list(which, source.view(entry.value_start, entry.end - entry.value_start))
            position = entry.end
        writer.tensors(source, position)
    return writer.value()


def _hf_recipe(c: Canonical, folder: HfNative) -> dict[str, object]:
    writer = RecipeWriter("hf", c)
    for path in folder.other_files:
        if c.parts_left_out and path.name == CONFIG:
            continue  # it describes the whole, of which only the language model is carried
        data = read_text_file(folder.folder / path)
        writer.start(path.as_posix())
        if path.name in _LIST_FILES:
            writer.tokenizer_file(data)
        else:
            writer.literal(data)
    if c.parts_left_out or c.packs.decoded:
        return writer.value()
    if folder.index is not None and folder.index_name is not None:
        writer.start(folder.index_name)
        writer.literal(folder.index)
    for name, shard in folder.shards.items():
        writer.start(name)
        writer.tensors(shard.source)
    return writer.value()
