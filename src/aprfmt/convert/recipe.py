"""How to rebuild the source files of an `.apr`, byte for byte, from the tensors and lists that it holds.

The recipe stands in the metadata under `aprfmt.source`:

    {"format": "gguf" | "hf" | "safetensors",
     "files": [{"name": str, "size": int, "crc32": hex, "segments": [...]}, ...],     or "blake3" for "crc32"
     "literals": base64(zlib(bytes)),
     "names": {name: name in the source},    where a checkpoint begins its names otherwise
     "partial": true}                        where it has only files that hold no tensors

A file is its segments end to end:

    ["b", n]                      the next n bytes of the literals (one run for all files)
    ["z", n]                      n zero bytes
    ["t", name, stored, dtype]    a tensor, which must still be of dtype `stored`, as `dtype` (wider or the same)
    ["l", names, stored, dtype, row_map, i]   tensor i of arch.links.RowMap of the tensors `names`; [name with {e}, n]
                                  among them stands for n names
    ["g", list]                   a list of the tokenizer as a GGUF array value: tokens, merges, types or scores
    ["j", piece]                  a piece of tokenizer.json, vocab.json or merges.txt, see tokenizer.splice

Every segment is compared with the source when the recipe is made, so a recipe that exists is exact. The digest of the
source file is one of io.digest, older recipes have none; what is restored is compared with it before it gets its name.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile
from typing import TypeVar

from aprfmt.arch.links import MAX_TENSORS, Link, RowMap
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import HF_QUANT
from aprfmt.canonical.rowmap import BufferedPiece, produce
from aprfmt.canonical.tensor import CanonicalTensor, is_exact
from aprfmt.codecs.stream import read_whole
from aprfmt.errors import AprError, ChecksumError, CorruptError, LimitError
from aprfmt.formats import INDEX_SUFFIXES, apr2
from aprfmt.formats.apr_metadata import FILES_PREFIX, SOURCE_KEY
from aprfmt.formats.gguf import GgufNative, GgufPart, GgufType
from aprfmt.formats.gguf_write import encode_value
from aprfmt.formats.hf_files import parse_object, read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out import OutTensor
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.digest import KINDS, Digest, PendingCrc, PendingDigest, Trail, altered, digest_of, follow
from aprfmt.io.names import is_plain
from aprfmt.io.pipe import FileLayout, Late, Literal, Segment, Stream, Zeros, run_jobs, source_chunks
from aprfmt.io.source import Buffer, Source
from aprfmt.limits import (
    MAX_HEADER_BYTES,
    MAX_LITERAL_BYTES,
    MAX_PATH_CHARS,
    MAX_PATH_PARTS,
    MAX_RENDERED_LISTS,
    MAX_TEXT_FILE_BYTES,
)
from aprfmt.model import Tensor
from aprfmt.tokenizer import splice
from aprfmt.tokenizer.hf import is_tokenizer_file
from aprfmt.tokenizer.model import Tokenizer

S = TypeVar("S")
T = TypeVar("T")

# Tokenizer list -> (GGUF key that holds it, element type of the array).
_GGUF_LISTS = {
    "tokens": ("tokenizer.ggml.tokens", GgufType.STRING),
    "merges": ("tokenizer.ggml.merges", GgufType.STRING),
    "types": ("tokenizer.ggml.token_type", GgufType.INT32),
    "scores": ("tokenizer.ggml.scores", GgufType.FLOAT32),
}

MAX_MAPPED_BYTES = 64 << 20
"""Largest tensor of mapped values (norms, decays) that is made a second time to see whether it is exact."""

# Files that hold the tokenizer's lists.
_LIST_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")

# Formats of sources that have recipes.
_FORMATS = ("gguf", "hf", "safetensors")

_ZEROS = bytes(1 << 16)
_HEX = re.compile(r"[0-9a-f]+")

_HINT = "import the source again"

_MAX_NAME_BYTES = 255  # of a file, on every common file system
_MAX_EXPERTS = 1 << 14


# --- reading ---


def expand_experts(value: object) -> list[str]:
    """The names that a segment names. Raises ValueError, TypeError for anything else."""
    out: list[str] = []
    for item in _list(value):
        if isinstance(item, str):
            out.append(item)
            continue
        template, n = _list(item)
        if type(n) is not int or not 0 < n <= _MAX_EXPERTS or len(out) + n > MAX_TENSORS:
            raise ValueError(f"{n!r} experts")
        out += [str(template).replace("{e}", str(e)) for e in range(n)]
    return out


def gguf_list(tokenizer: Tokenizer, which: str) -> bytes:
    """A list of the tokenizer as the array value of a GGUF key."""
    return encode_value((GgufType.ARRAY, _GGUF_LISTS[which][1]), getattr(tokenizer, which))


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """A recipe that was read from an `.apr`, and fits what the file holds.

    Attributes:
        format: of the source: "gguf", "hf" or "safetensors".
        files: every source file, ready to be written.
        names: what the source calls the tensors that have other names in the `.apr`.
        digests: of those that have one, by name.
        is_partial: whether files are missing: those of the weights, and perhaps of the tokenizer.
    """

    format: str
    files: Mapping[str, Sequence[Segment]]
    names: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, Digest] = field(default_factory=dict)
    is_partial: bool = False

    def layouts(self) -> list[FileLayout]:
        """Every source file, ready to be written."""
        return [FileLayout(name, segments, digest=self.digests.get(name)) for name, segments in self.files.items()]

    def head(self, name: str) -> bytes:
        """The bytes of file `name` before its first tensor: all of a small file, the header of a weight file."""
        parts = []
        for segment in self.files[name]:
            if isinstance(segment, Stream):
                break
            parts.append(bytes(segment.n_bytes) if isinstance(segment, Zeros) else bytes(segment.data))
        return b"".join(parts)

    def text_files(self) -> dict[str, bytes]:
        """The files that hold no tensor, whole. Raises ChecksumError for one that is not what was imported."""
        found = {
            name: self.head(name)
            for name, segments in self.files.items()
            if not any(isinstance(segment, Stream) for segment in segments)
        }
        for name, data in found.items():
            digest = self.digests.get(name)
            if digest is not None and digest_of(digest.kind, [data]) != digest:
                raise ChecksumError(altered(name, digest.kind), hint=_HINT)
        return found

    def weight_layouts(self) -> list[FileLayout]:
        """The files of the weights and their index, ready to be written."""
        others = {layout.name for layout in self.other_layouts()}
        texts = {name for name in self.text_files() if not name.endswith(INDEX_SUFFIXES)}
        return [layout for layout in self.layouts() if layout.name not in others | texts]

    def other_layouts(self) -> list[FileLayout]:
        """The files that are neither texts nor weights, ready to be written."""
        return [
            layout
            for layout in self.layouts()
            if any(isinstance(s, Stream) and s.label.startswith(FILES_PREFIX) for s in layout.segments)
        ]


def read_recipe(
    value: object, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None, path: str
) -> SourceManifest | None:
    """The recipe of an `.apr`, or None where it no longer fits (tensors renamed, converted or gone).

    Anybody may have written the value: sizes and names are checked before anything is made of it.
    Raises CorruptError when it is not a recipe at all, LimitError when it asks for too much.
    """
    try:
        body = _mapping(value)
        listed = [_mapping(file) for file in _list(body["files"])]
        files = {safe_name(f["name"]): [_list(s) for s in _list(f["segments"])] for f in listed}
        sizes = {str(f["name"]): _count(f["size"]) for f in listed}
        digests = {str(f["name"]): _digest(kind, f[kind]) for f in listed for kind in KINDS if kind in f}
        _check_names(files)
        every = [segment for segments in files.values() for segment in segments]
        _check_sizes(files.values(), every)
        source = _Source(_literals(body, every), tensors, tokenizer)
        if not all(map(source.has, every)):
            return None
        made = {name: [source.segment(s) for s in segments] for name, segments in files.items()}
        if any(sum(s.n_bytes for s in segments) != sizes[name] for name, segments in made.items()):
            return None
        if not all(_keeps_shapes(listed, made[name], tensors) for name, listed in files.items()):
            return None
        return SourceManifest(
            str(body["format"]), made, _names(body.get("names", {})), digests, body.get("partial") is True
        )
    except AprError as error:
        error.path, error.hint = error.path or path, error.hint or _HINT
        raise
    except (KeyError, TypeError, ValueError, IndexError, zlib.error, binascii.Error) as error:
        raise CorruptError(f"the source record ({SOURCE_KEY}) is damaged: {error}", path=path, hint=_HINT) from error


def _keeps_shapes(
    listed: Sequence[list[object]], made: Sequence[Segment], tensors: Mapping[str, CanonicalTensor]
) -> bool:
    """Whether the tensors of a file of weights have the shapes that its header says; of a single value either shape.

    Raises ValueError, TypeError, KeyError for a header that is none.
    """
    direct = any(segment[0] == "t" for segment in listed)
    if not direct or not made or not isinstance(made[0], Literal):
        return True
    head = bytes(made[0].data)
    end = 8 + int.from_bytes(head[:8], "little")
    if len(head) < end or head[8:9] != b"{":
        return True  # no safetensors
    header = parse_object(head[8:end], "", "the header of a file of weights", unique=False)
    entries = [_mapping(entry) for name, entry in header.items() if name != "__metadata__"]
    shapes = {_list(entry["data_offsets"])[0]: tuple(_list(entry["shape"])) for entry in entries}
    at = -end
    for segment, stored in zip(listed, made, strict=True):
        if segment[0] == "t" and stored.n_bytes and at in shapes:
            shape = tensors[str(segment[1])].shape
            if shapes[at] != shape and (*shapes[at], *shape) != (1,):
                return False
        at += stored.n_bytes
    return True


class _Source:
    """Makes the segments of a recipe from what the `.apr` holds; one after the other, as literals follow on."""

    def __init__(self, literals: bytes, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None) -> None:
        self._literals = memoryview(literals)
        self._tensors = tensors
        self._tokenizer = tokenizer

    def has(self, segment: list[object]) -> bool:
        """Whether all that the segment refers to is there: tensors in the dtype they had, the tokenizer."""
        if segment[0] == "t":
            wanted = [(str(segment[1]), segment[2])]
        elif segment[0] == "l":
            names = expand_experts(segment[1])
            dtypes = segment[2] if isinstance(segment[2], list) else [segment[2]] * len(names)
            wanted = list(zip(names, dtypes, strict=True))
        else:
            return segment[0] not in ("g", "j") or self._tokenizer is not None
        return all(name in self._tensors and self._tensors[name].dtype == dtype for name, dtype in wanted)

    def segment(self, segment: list[object]) -> Segment:
        """What the segment stands for in the source file."""
        kind = segment[0]
        if kind == "b":
            n_bytes = _count(segment[1])
            data, self._literals = self._literals[:n_bytes], self._literals[n_bytes:]
            return Literal(data)
        if kind == "z":
            return Zeros(_count(segment[1]))
        if kind == "t":
            _, name, _, dtype = segment
            return _as_stored(self._tensors[str(name)], str(dtype))
        if kind == "l":
            _, names, _, dtype, row_map, position = segment
            return self._linked(expand_experts(names), str(dtype), row_map, position)
        if kind == "g" and self._tokenizer is not None:
            return Literal(gguf_list(self._tokenizer, str(segment[1])))
        if kind == "j" and self._tokenizer is not None:
            return Literal(splice.join([dict(_mapping(segment[1]))], self._tokenizer))
        raise ValueError(f"a segment of the unknown kind {kind!r}")

    def _linked(self, names: list[str], dtype: str, body: object, position: object) -> Segment:
        row_map = RowMap.from_json(_mapping(body), names[0])
        parts = [self._tensors[name] for name in names]
        if type(position) is not int or not 0 <= position < len(row_map.after):
            raise CorruptError("the source record names no tensor for a row map")
        if tuple(part.shape for part in parts) != row_map.before:
            raise CorruptError("the source record gives a tensor another shape", tensor=names[0])
        return _as_stored(CanonicalTensor(names[0], tuple(part.piece() for part in parts), row_map, position), dtype)


def _as_stored(tensor: CanonicalTensor, dtype: str) -> Segment:
    """The bytes of `tensor` as the source has them: in the same dtype, or in a wider one."""
    if not is_exact(tensor.dtype, dtype):
        raise CorruptError(f"the source record turns {tensor.dtype} into {dtype}")
    return tensor.out(tensor.name, dtype).stream()


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError("an object was expected")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("a list was expected")
    return value


def _names(value: object) -> dict[str, str]:
    """What tensors are called in the source; two of one name could not stand in one file."""
    found = {key: str(name) for key, name in _mapping(value).items()}
    if len(set(found.values())) < len(found):
        raise CorruptError("the source record gives two tensors the same name")
    return found


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise CorruptError(f"the source record gives {value!r} as a length")
    return value


def _digest(kind: str, value: object) -> Digest:
    label, length = KINDS[kind]
    if not isinstance(value, str) or len(value) != length or not _HEX.fullmatch(value):
        raise CorruptError(f"the source record gives {value!r:.80} as a {label}")
    return Digest(kind, value)


def safe_name(name: object) -> str:
    """A relative path that stays inside the output folder; a crafted file must not write elsewhere, or without end."""
    text = str(name)
    if len(text) > MAX_PATH_CHARS or text.count("/") >= MAX_PATH_PARTS:
        raise LimitError(
            f"the source record names a path of {len(text)} characters and {text.count('/') + 1} parts; "
            f"the limits are {MAX_PATH_CHARS} and {MAX_PATH_PARTS}: {text[:40]!r}...",
            hint="remove files that are nested so deeply",
        )
    if not is_plain(text):
        raise CorruptError(f"the source record names {name!r}, which is not a plain relative path")
    return text


def _check_names(files: Mapping[str, object]) -> None:
    """The names must be able to stand in one folder together."""
    if not files:
        raise CorruptError("the source record lists no file")
    for name in files:
        parts = name.split("/")
        if any("/".join(parts[:n]) in files for n in range(1, len(parts))):
            raise CorruptError(f"the source record uses a file as the folder of {name!r}")
        if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
            raise CorruptError("the source record holds an invalid file name")


def _check_sizes(files: Iterable[Sequence[list[object]]], every: Iterable[list[object]]) -> None:
    """What a recipe makes us hold in memory is capped: zeros before the first tensor, lists that are rendered."""
    n_zeros = 0
    for segments in files:
        head = takewhile(lambda segment: segment[0] not in ("t", "l"), segments)
        n_zeros += sum(_count(segment[1]) for segment in head if segment[0] == "z")
    if n_zeros > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"the source record asks for {n_zeros} zero bytes in memory")
    n_lists = sum(segment[0] in ("g", "j") for segment in every)
    if n_lists > MAX_RENDERED_LISTS:
        raise LimitError(f"the source record refers to the tokenizer's lists {n_lists} times")


def _inflate(text: str, n_bytes: int) -> bytes:
    if n_bytes > MAX_HEADER_BYTES:
        raise LimitError(f"the source record declares {n_bytes} literal bytes")
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, n_bytes))
    if len(data) != n_bytes:
        raise CorruptError(f"the source record holds {len(data)} literal bytes instead of {n_bytes}")
    return data


def _literals(body: Mapping[str, object], every: Iterable[list[object]]) -> bytes:
    return _inflate(str(body["literals"]), sum(_count(s[1]) for s in every if s[0] == "b"))


def without_weights(value: object, keep: Callable[[str], bool]) -> dict[str, object] | None:
    """The recipe of a folder with only those files, as far as `keep` wants them, that hold no tensors of a model.

    None where nothing is left, or where `value` is of something else. Raises what read_recipe does for its literals.
    """
    if not isinstance(value, Mapping) or value.get("format") != "hf":
        return None
    try:
        files = [_mapping(file) for file in _list(value["files"])]
        every = [[_list(s) for s in _list(file["segments"])] for file in files]
        literals = _literals(value, chain.from_iterable(every))
        kept, parts, position = [], [], 0
        for file, segments in zip(files, every, strict=True):
            n_bytes = sum(_count(s[1]) for s in segments if s[0] == "b")
            name = str(file["name"])
            if keep(name) and not name.endswith(INDEX_SUFFIXES) and not any(map(_holds_weights, segments)):
                kept.append(file)
                parts.append(literals[position : position + n_bytes])
            position += n_bytes
    except (KeyError, TypeError, ValueError, IndexError, zlib.error, binascii.Error):
        return None  # read_recipe says what is wrong with it
    if not kept:
        return None
    return {**value, "files": kept, "literals": _deflate(b"".join(parts)), "partial": True}


def _holds_weights(segment: Sequence[object]) -> bool:
    return segment[0] == "l" or (segment[0] == "t" and not str(segment[1]).startswith(FILES_PREFIX))


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def overlay(base: Mapping[str, S], then: Mapping[str, T], now: Mapping[str, T]) -> dict[str, S | T]:
    """`base` with only those keys changed that differ between `then` and `now`.

    `base` is what a source file said, `then` what this package derives from it, `now` what it derives after the
    user's edits: so edits take effect, and whatever we do not model stays as the source had it.
    """
    out: dict[str, S | T] = dict(base)
    for key, value in now.items():
        # NaN, which config.json may hold, equals nothing.
        if key not in then or (then[key] != value and repr(then[key]) != repr(value)):
            out[key] = value
    for key in then:
        if key not in now:
            out.pop(key, None)
    return out


# --- writing ---


@dataclass(slots=True)
class _File:
    """The segments of one source file while they are collected; `n_literal` bytes of literals stand at its end.

    Of a file that is streamed `content` is the source, of another one its digest.
    """

    name: str
    content: Digest | Source | None
    segments: list[list[object]] = field(default_factory=list)
    size: int = 0
    n_literal: int = 0


class RecipeWriter:
    """Collects the files of the source of `c` and their literals, then gives the JSON value.

    `stored` gives the dtype of tensors that the `.apr` holds in fewer bytes than the source has them. The files get
    digests of the `kind`, if any; that of a file that is streamed is known at the end only, see late_digests.
    """

    def __init__(
        self, format: str, c: Canonical, stored: Mapping[str, str] | None = None, *, kind: str | None = None
    ) -> None:
        self._format, self._c, self._stored, self._kind = format, c, stored or {}, kind
        self._files: list[_File] = []
        self._literals = bytearray()
        self._tensors = c.stored
        self._own = {t.source.name: t.name for t in self._tensors.values() if t.source is not None}
        self._inside: dict[int, list[Tensor]] = {}  # the tensors with bytes by the source that they lie in
        for tensor in c.model.tensors.entries:
            if tensor.n_bytes:
                self._inside.setdefault(id(tensor.source), []).append(tensor)
        self._links = {name: t.link for t in self._tensors.values() if t.link is not None for name in t.link.gguf}

    def start(self, name: str, content: bytes | Source | CanonicalTensor) -> None:
        """Begins the next file. Raises CorruptError for a name that reading the recipe would refuse.

        `content` is the whole of it, or what it is streamed from; a carried file is read for its digest now.
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
        """Adds bytes as they are; runs of zeros cost nothing."""
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
        """Adds the bytes [start, end) of a file as they are; more than fit are only looked at for zeros."""
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
                f"{self._files[-1].name} holds more than {MAX_LITERAL_BYTES} bytes that are neither tensors nor "
                "vocabulary",
                hint="remove the files that do not belong to the model first",
            )

    def tensor(self, name: str) -> None:
        """Adds the source tensor `name`: the `.apr`'s own, one of a link, or its bytes where a link is not exact."""
        c, original = self._c, self._c.model.tensors[name]
        own, link = self._own.get(name), self._links.get(name)
        if own is None and (link is None or link.row_map.is_plain):
            own = c.dropped[name]
        if own is not None:
            dtype = self._tensors[own].dtype
            self._add(["t", own, self._stored.get(own, dtype), dtype], original.n_bytes)
        elif link is not None and self._is_exact(link, original):
            kept = self._kept(link)
            dtypes = kept[0] if len(set(kept)) == 1 else kept
            body, position = link.row_map.to_json(), link.gguf.index(name)
            self._add(["l", _fold_experts(link), dtypes, original.dtype, body, position], original.n_bytes)
        else:
            self.literal_of(original.source, original.offset, original.offset + original.n_bytes)

    def _is_exact(self, link: Link, original: Tensor) -> bool:
        """Whether the tensors of the `.apr` give the source's again, bit by bit: mapped values are made to see it."""
        if link.row.pack:
            return True
        if not link.row_map.maps_values:
            kept = set(self._kept(link))
            return len(kept) == 1 and is_exact(kept.pop(), original.dtype)
        if original.n_bytes > MAX_MAPPED_BYTES:
            return False
        outs = [self._tensors[name].out(name, self._stored.get(name)) for name in link.hf]
        pieces = [BufferedPiece(out.name, out.dtype, out.shape, partial(_bytes_of, out)) for out in outs]
        made = produce(pieces, link.row_map, link.gguf.index(original.name))
        return made.dtype == original.dtype and made.data() == read_whole(original)

    def blob(self, file: CanonicalTensor) -> None:
        """Adds what a file holds that is carried as it is."""
        if file.n_bytes:
            self._add(["t", file.name, file.dtype, file.dtype], file.n_bytes)

    def _kept(self, link: Link) -> list[str]:
        """The dtypes that the `.apr` has the tensors of a link in."""
        return [self._stored.get(name, self._tensors[name].dtype) for name in link.hf]

    def tensors(self, source: Source, position: int = 0) -> None:
        """Adds a file of the source from `position` to its end: its tensors, and what lies between them."""
        inside = self._inside.get(id(source), ())
        for tensor in sorted(inside, key=lambda t: (t.offset, t.n_bytes > 0, -t.n_bytes)):
            if tensor.offset < position:  # a view of a storage that others share
                continue
            self.literal_of(source, position, tensor.offset)
            self.tensor(tensor.name)
            position = tensor.offset + tensor.n_bytes
        self.literal_of(source, position, source.size)

    def gguf_list(self, which: str, source: bytes) -> None:
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
    """What a checkpoint calls the tensors that have other names in canonical form."""
    whole = (t for t in c.all_tensors.values() if t.row_map is None)  # not a part of what another program stacks
    return {t.name: t.pieces[0].name for t in whole if t.pieces[0].name != t.name}


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
    """The recipe of a source of the `format` that `c` is, or was imported from; None where it gives other files."""
    if apr2.native_of(c.model) is not None:
        value = c.model.metadata.get(SOURCE_KEY)
        others = [other for other in _FORMATS if other != format]
        if isinstance(value, Mapping) and value.get("format") in others:
            return None  # to hold it against the tensors would be for nothing
        value = value if c.is_whole else without_weights(value, lambda name: True)
    else:
        value = source_recipe(c) if c.model.format == format else None
    if value is None:
        return None
    recipe = read_recipe(value, c.stored, c.model.tokenizer, str(c.model.path))
    return recipe if recipe is not None and recipe.format == format else None


def late_digests(sources: Iterable[Source], head: bytes) -> list[Late]:
    """The digests in a recipe that are known when the sources were streamed; `head` is the file's first bytes."""
    out = []
    for pending in (s.record for s in sources if isinstance(s.record, Trail | PendingCrc)):
        before = f'"{pending.kind}":"'
        if (at := head.find(f'{before}{pending.stand_in}"'.encode())) >= 0:
            out.append(Late(at + len(before), pending.stand_in.encode(), partial(_encoded_digest, pending)))
    return out


def _encoded_digest(pending: PendingDigest) -> bytes:
    return pending.digest().value.encode()


def source_recipe(
    c: Canonical,
    stored: Mapping[str, str] | None = None,
    *,
    kind: str | None = None,
    tensors_kept: bool = True,
    tokenizer_kept: bool = True,
) -> Mapping[str, object] | None:
    """The recipe from which the source files can be rebuilt byte for byte; None for sources that have none.

    `stored` gives the dtype of tensors that are kept in fewer bytes than the source has them. The files get digests of
    the `kind`, if any, while they are streamed; the file that gets the recipe takes `late_digests`. Where tensors or
    the tokenizer are not kept as they were, that of a folder still has its other files.
    """

    def keeps(name: str) -> bool:
        return tokenizer_kept or not holds_tokenizer(name)

    is_whole = tensors_kept and tokenizer_kept and c.is_whole
    if apr2.native_of(c.model) is not None:
        value: object = c.model.metadata.get(SOURCE_KEY)
        recipe = value if is_whole else without_weights(value, keeps)
        fits = isinstance(recipe, Mapping) and read_recipe(recipe, c.stored, c.tokenizer, str(c.model.path))
        return recipe if isinstance(recipe, Mapping) and fits else None
    if (folder := c.model.native_as(HfNative)) is not None:
        with_weights = is_whole and not c.packs.decoded and _fits(folder)
        return _hf_recipe(c, folder, kind, keeps, with_weights=with_weights)
    if not is_whole:
        return None
    if (gguf := c.model.native_as(GgufNative)) is not None:
        return _gguf_recipe(c, gguf.parts, stored or {}, kind)
    if c.model.native_as(SafetensorsNative) and not c.packs.decoded:
        writer, source = RecipeWriter("safetensors", c, kind=kind), c.model.sources[0]
        writer.start(source.path.rpartition("/")[2], source)
        writer.tensors(source)
        return writer.value()
    return None


def _fits(folder: HfNative) -> bool:
    """Whether there is room for what pickles hold beside the weights: the state of an optimizer is larger than them."""
    beside = (s.source.size - sum(t.n_bytes for t in s.tensors) for s in folder.shards.values() if s.left)
    return sum(beside) <= MAX_LITERAL_BYTES


def holds_tokenizer(name: str) -> bool:
    """Whether a file of a folder is one of the tokenizer's; generation_config.json names ids, but it is another."""
    return is_tokenizer_file(name) and name != "generation_config.json"


def _gguf_recipe(
    c: Canonical, parts: Sequence[GgufPart], stored: Mapping[str, str], kind: str | None
) -> dict[str, object]:
    writer = RecipeWriter("gguf", c, stored, kind=kind)
    for part in parts:
        source, position = part.source, 0
        writer.start(source.path.rpartition("/")[2], source)
        found = [(entry, which) for which, (key, _) in _GGUF_LISTS.items() if (entry := part.kv.entries.get(key))]
        for entry, which in sorted(found, key=lambda pair: pair[0].start):
            writer.literal_of(source, position, entry.value_start)
            writer.gguf_list(which, source.read(entry.value_start, entry.end - entry.value_start))
            position = entry.end
        writer.tensors(source, position)
    return writer.value()


def _hf_recipe(
    c: Canonical, folder: HfNative, kind: str | None, keeps: Callable[[str], bool], *, with_weights: bool
) -> dict[str, object]:
    writer = RecipeWriter("hf", c, kind=kind)
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
