"""Builds the source manifest of an `.apr`, so that an export restores the source files' bytes."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from aprfmt.arch.links import Link
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import HF_QUANT
from aprfmt.canonical.row_mapping import BufferedTensor, produce
from aprfmt.canonical.tensor import CanonicalTensor, is_exact
from aprfmt.codecs.stream import read_whole
from aprfmt.convert.source_manifest import (
    GGUF_LISTS,
    SourceManifest,
    gguf_list,
    read_count,
    read_list,
    read_literals,
    read_manifest,
    read_mapping,
    safe_name,
)
from aprfmt.errors import LimitError
from aprfmt.formats import INDEX_SUFFIXES, apr2
from aprfmt.formats.apr_metadata import FILES_PREFIX, SOURCE_KEY
from aprfmt.formats.gguf import GgufNative, GgufPart
from aprfmt.formats.hf_files import read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.digest import Digest, PendingCrc, PendingDigest, ProgressiveDigest, digest_of, follow
from aprfmt.io.pipe import DeferredPatch, run_jobs, source_chunks
from aprfmt.io.source import Buffer, Source
from aprfmt.limits import MAX_LITERAL_BYTES
from aprfmt.model import Tensor
from aprfmt.tokenizer import splice
from aprfmt.tokenizer.hf import is_tokenizer_file

MAX_MAPPED_BYTES = 64 << 20
"""Largest tensor of mapped values (norms, decays) that is computed a second time to check exactness."""


# Files with the tokenizer's lists.
_LIST_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")


# Source formats with manifests.
_FORMATS = ("gguf", "hf", "safetensors")


_ZEROS = bytes(1 << 16)


def without_weights(value: object, keep: Callable[[str], bool]) -> dict[str, object] | None:
    """The manifest of a folder reduced to the files without tensors of a model that `keep` accepts.

    None if nothing is left, or if `value` is of another kind. Raises what read_manifest does for its literals.
    """
    if not isinstance(value, Mapping) or value.get("format") != "hf":
        return None
    try:
        files = [read_mapping(file) for file in read_list(value["files"])]
        every = [[read_list(s) for s in read_list(file["segments"])] for file in files]
        literals = read_literals(value, chain.from_iterable(every))
        kept, parts, position = [], [], 0
        for file, segments in zip(files, every, strict=True):
            n_bytes = sum(read_count(s[1]) for s in segments if s[0] == "b")
            name = str(file["name"])
            if keep(name) and not name.endswith(INDEX_SUFFIXES) and not any(map(_holds_weights, segments)):
                kept.append(file)
                parts.append(literals[position : position + n_bytes])
            position += n_bytes
    except (KeyError, TypeError, ValueError, IndexError, zlib.error, binascii.Error):
        return None  # read_manifest reports what is wrong with it
    if not kept:
        return None
    return {**value, "files": kept, "literals": _deflate(b"".join(parts)), "partial": True}


def _holds_weights(segment: Sequence[object]) -> bool:
    return segment[0] == "l" or (segment[0] == "t" and not str(segment[1]).startswith(FILES_PREFIX))


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


@dataclass(slots=True)
class _File:
    """The segments of one source file while they are collected; `n_literal` trailing bytes are literals.

    For a streamed file `content` is the source, otherwise its digest.
    """

    name: str
    content: Digest | Source | None
    segments: list[list[object]] = field(default_factory=list)
    size: int = 0
    n_literal: int = 0


class ManifestWriter:
    """Collects the files of the source of `c` and their literals, then returns the JSON value.

    `stored` returns the dtype of tensors that the `.apr` stores in fewer bytes than the source. The files get digests
    of the `kind`, if any; that of a streamed file is known only at the end, see deferred_digests.
    """

    def __init__(
        self, format: str, c: Canonical, stored: Mapping[str, str] | None = None, *, kind: str | None = None
    ) -> None:
        self._format, self._c, self._stored, self._kind = format, c, stored or {}, kind
        self._files: list[_File] = []
        self._literals = bytearray()
        self._tensors = c.stored
        self._own = {t.stored.name: t.name for t in self._tensors.values() if t.stored is not None}
        self._inside: dict[int, list[Tensor]] = {}  # the tensors with bytes, by source
        for tensor in c.model.tensors.entries:
            if tensor.n_bytes:
                self._inside.setdefault(id(tensor.source), []).append(tensor)
        self._links = {name: t.link for t in self._tensors.values() if t.link is not None for name in t.link.gguf}

    def start(self, name: str, content: bytes | Source | CanonicalTensor) -> None:
        """Starts the next file. Raises CorruptError for a name that reading the manifest would refuse.

        `content` is the whole file, or the source it is streamed from; a carried file is read for its digest now.
        """
        known: Digest | Source | None = content if isinstance(content, Source) else None
        if self._kind is not None and not isinstance(content, Source):
            known = digest_of(self._kind, [content] if isinstance(content, bytes) else content.chunks())
        self._files.append(_File(safe_name(name), known))

    def _add(self, segment: list[object], n_bytes: int, n_literal: int = 0) -> None:
        file = self._files[-1]
        file.segments.append(segment)
        file.size += n_bytes
        file.n_literal = n_literal

    def literal(self, data: bytes) -> None:
        """Adds literal bytes; runs of zeros take no space."""
        file = self._files[-1]
        if not len(data):
            return
        if _is_zero(data):
            self._add(["z", len(data)], len(data))
            return
        self._check_room(len(data))
        self._literals += data
        n_literal = file.n_literal + len(data)
        if file.n_literal:
            file.segments.pop()
        self._add(["b", n_literal], len(data), n_literal)

    def literal_of(self, source: Source, start: int, end: int) -> None:
        """Adds the bytes [start, end) of a file as literals; ranges above the limit must be zeros."""
        n_bytes = end - start
        if n_bytes == 0:
            return
        if n_bytes > MAX_LITERAL_BYTES:
            if not all(map(_is_zero, source_chunks(source, start, n_bytes))):
                self._check_room(n_bytes)
            self._add(["z", n_bytes], n_bytes)
        else:
            self.literal(source.read(start, n_bytes))

    def _check_room(self, n_bytes: int) -> None:
        if len(self._literals) + n_bytes > MAX_LITERAL_BYTES:
            raise LimitError(
                f"{self._files[-1].name} has more than {MAX_LITERAL_BYTES} bytes that are neither tensors nor "
                "vocabulary",
                hint="remove the files that do not belong to the model first",
            )

    def tensor(self, name: str) -> None:
        """Adds the source tensor `name`: the `.apr`'s own, one of a link, or its bytes if a link is not exact."""
        c, original = self._c, self._c.model.tensors[name]
        own, link = self._own.get(name), self._links.get(name)
        if own is None and (link is None or link.mapping.is_plain):
            own = c.dropped.get(name)
        if own is not None:
            dtype = self._tensors[own].dtype
            self._add(["t", own, self._stored.get(own, dtype), dtype], original.n_bytes)
        elif link is not None and self._is_exact(link, original):
            kept = self._kept(link)
            dtypes = kept[0] if len(set(kept)) == 1 else kept
            body, position = link.mapping.to_json(), link.gguf.index(name)
            self._add(["l", _fold_experts(link), dtypes, original.dtype, body, position], original.n_bytes)
        else:
            self.literal_of(original.source, original.offset, original.offset + original.n_bytes)

    def _is_exact(self, link: Link, original: Tensor) -> bool:
        """Whether the `.apr`'s tensors reproduce the source's bit by bit: mapped values are computed to check."""
        if link.row.pack:
            return True
        if not link.mapping.maps_values:
            kept = set(self._kept(link))
            return len(kept) == 1 and is_exact(kept.pop(), original.dtype)
        if original.n_bytes > MAX_MAPPED_BYTES:
            return False
        outs = [self._tensors[name].out(name, self._stored.get(name)) for name in link.hf]
        sources = [BufferedTensor(out.name, out.dtype, out.shape, partial(_bytes_of, out)) for out in outs]
        made = produce(sources, link.mapping, link.gguf.index(original.name))
        return made.dtype == original.dtype and made.data() == read_whole(original)

    def blob(self, file: CanonicalTensor) -> None:
        """Adds the contents of a carried file."""
        if file.n_bytes:
            self._add(["t", file.name, file.dtype, file.dtype], file.n_bytes)

    def _kept(self, link: Link) -> list[str]:
        """The dtypes of a link's tensors in the `.apr`."""
        return [self._stored.get(name, self._tensors[name].dtype) for name in link.hf]

    def tensors(self, source: Source, position: int = 0) -> None:
        """Adds the rest of a source file from `position`: its tensors, and what is in between."""
        inside = self._inside.get(id(source), ())
        for tensor in sorted(inside, key=lambda t: (t.offset, t.n_bytes > 0, -t.n_bytes)):
            if tensor.offset < position:  # a view of a storage that others share
                continue
            self.literal_of(source, position, tensor.offset)
            self.tensor(tensor.name)
            position = tensor.offset + tensor.n_bytes
        self.literal_of(source, position, source.size)

    def gguf_list(self, which: str, source: bytes) -> None:
        """Adds a GGUF array value; by reference if the tokenizer's list yields exactly these bytes."""
        tokenizer = self._c.tokenizer
        if tokenizer is not None and gguf_list(tokenizer, which) == source:
            self._add(["g", which], len(source))
        else:
            self.literal(source)

    def tokenizer_file(self, text: bytes) -> None:
        """Adds a tokenizer.json, vocab.json or merges.txt; its lists by reference if that is exact."""
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
        kind, files = self._kind, []
        streamed = [file.content for file in self._files if isinstance(file.content, Source)]
        pending = iter(follow(kind, streamed) if kind is not None else ())
        for file in self._files:
            row: dict[str, object] = {"name": file.name, "size": file.size}
            if kind is not None:
                row[kind] = file.content.value if isinstance(file.content, Digest) else next(pending).stand_in
            files.append(row | {"segments": file.segments})
        literals = _deflate(bytes(self._literals))
        names = source_names(self._c) if self._c.model.convention == "hf" else {}
        return {"format": self._format, "files": files, "literals": literals} | ({"names": names} if names else {})


def source_names(c: Canonical) -> dict[str, str]:
    """Checkpoint names of the tensors that are renamed in canonical form."""
    whole = (
        t for t in c.all_tensors.values() if t.mapping is None
    )  # not a part of a tensor that another program stacks
    return {t.name: t.sources[0].name for t in whole if t.sources[0].name != t.name}


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


def _is_zero(data: Buffer) -> bool:
    steps = range(0, len(data), len(_ZEROS))
    return all(data[i : i + len(_ZEROS)] == _ZEROS[: len(data) - i] for i in steps)


def restorable(c: Canonical, format: str) -> SourceManifest | None:
    """The manifest of a source of the `format` that `c` is, or was imported from; None if it restores other files."""
    if apr2.native_of(c.model) is not None:
        value = c.model.metadata.get(SOURCE_KEY)
        others = [other for other in _FORMATS if other != format]
        if isinstance(value, Mapping) and value.get("format") in others:
            return None  # comparing it with the tensors would be pointless
        value = value if c.is_whole else without_weights(value, lambda name: True)
    else:
        value = manifest_of_source(c) if c.model.format == format else None
    if value is None:
        return None
    manifest = read_manifest(value, c.stored, c.model.tokenizer, str(c.model.path))
    return manifest if manifest is not None and manifest.format == format else None


def deferred_digests(sources: Iterable[Source], head: bytes) -> list[DeferredPatch]:
    """The digests in a manifest that are known after the sources were streamed; `head` is the file's first bytes."""
    out = []
    for pending in (s.record for s in sources if isinstance(s.record, ProgressiveDigest | PendingCrc)):
        before = f'"{pending.kind}":"'
        if (at := head.find(f'{before}{pending.stand_in}"'.encode())) >= 0:
            out.append(DeferredPatch(at + len(before), pending.stand_in.encode(), partial(_encoded_digest, pending)))
    return out


def _encoded_digest(pending: PendingDigest) -> bytes:
    return pending.digest().value.encode()


def manifest_of_source(
    c: Canonical,
    stored: Mapping[str, str] | None = None,
    *,
    kind: str | None = None,
    tensors_kept: bool = True,
    tokenizer_kept: bool = True,
) -> Mapping[str, object] | None:
    """The manifest that restores the source files byte for byte, or None.

    `stored` returns the dtype of tensors that are stored in fewer bytes than in the source. The files get digests of
    the `kind`, if any, while they are streamed; the file with the manifest uses `deferred_digests`. If tensors or the
    tokenizer are changed, a folder's manifest still has its other files.
    """

    def keeps(name: str) -> bool:
        return tokenizer_kept or not holds_tokenizer(name)

    is_whole = tensors_kept and tokenizer_kept and c.is_whole
    if apr2.native_of(c.model) is not None:
        value: object = c.model.metadata.get(SOURCE_KEY)
        manifest = value if is_whole else without_weights(value, keeps)
        fits = isinstance(manifest, Mapping) and read_manifest(manifest, c.stored, c.tokenizer, str(c.model.path))
        return manifest if isinstance(manifest, Mapping) and fits else None
    if (folder := c.model.native_as(HfNative)) is not None:
        with_weights = is_whole and not c.packs.decoded and _fits(folder)
        return _hf_manifest(c, folder, kind, keeps, with_weights=with_weights)
    if not is_whole:
        return None
    if (gguf := c.model.native_as(GgufNative)) is not None:
        return _gguf_manifest(c, gguf.parts, stored or {}, kind)
    if c.model.native_as(SafetensorsNative) and not c.packs.decoded:
        writer, source = ManifestWriter("safetensors", c, kind=kind), c.model.sources[0]
        writer.start(source.path.rpartition("/")[2], source)
        writer.tensors(source)
        return writer.value()
    return None


def _fits(folder: HfNative) -> bool:
    """Whether non-weight content of pickles fits the limit: optimizer state is larger than the weights."""
    beside = (s.source.size - sum(t.n_bytes for t in s.tensors) for s in folder.shards.values() if s.left)
    return sum(beside) <= MAX_LITERAL_BYTES


def holds_tokenizer(name: str) -> bool:
    """Whether a file of a folder belongs to the tokenizer; generation_config.json has token ids, but does not."""
    return is_tokenizer_file(name) and name != "generation_config.json"


def _gguf_manifest(
    c: Canonical, parts: Sequence[GgufPart], stored: Mapping[str, str], kind: str | None
) -> dict[str, object]:
    writer = ManifestWriter("gguf", c, stored, kind=kind)
    for part in parts:
        source, position = part.source, 0
        writer.start(source.path.rpartition("/")[2], source)
        found = [(entry, which) for which, (key, _) in GGUF_LISTS.items() if (entry := part.kv.entries.get(key))]
        for entry, which in sorted(found, key=lambda pair: pair[0].start):
            writer.literal_of(source, position, entry.value_start)
            writer.gguf_list(which, source.read(entry.value_start, entry.end - entry.value_start))
            position = entry.end
        writer.tensors(source, position)
    return writer.value()


def _hf_manifest(
    c: Canonical, folder: HfNative, kind: str | None, keeps: Callable[[str], bool], *, with_weights: bool
) -> dict[str, object]:
    writer = ManifestWriter("hf", c, kind=kind)
    for path in folder.other_files:
        if not keeps(path.as_posix()) or (c.packs.decoded and path.name == HF_QUANT):
            continue
        data = read_text_file(folder.folder / path)
        writer.start(path.as_posix(), data)
        if path.name in _LIST_FILES:
            writer.tokenizer_file(data)
        else:
            writer.literal(data)
    for name, file in c.files.items():
        writer.start(name, file)
        writer.blob(file)
    if not with_weights:
        return writer.value() | {"partial": True}
    if folder.index is not None and folder.index_name is not None:
        writer.start(folder.index_name, folder.index)
        writer.literal(folder.index)
    for name, shard in folder.shards.items():
        writer.start(name, shard.source)
        writer.tensors(shard.source)
    return writer.value()
