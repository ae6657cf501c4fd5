"""Source manifests: rebuild the source files of an `.apr`, byte for byte, from its tensors and lists.

The manifest is stored in the metadata under `aprfmt.source`:

    {"format": "gguf" | "hf" | "safetensors",
     "files": [{"name": str, "size": int, "crc32": hex, "segments": [...]}, ...],     or "blake3" for "crc32"
     "literals": base64(zlib(bytes)),
     "names": {name: name in the source},    where a checkpoint begins its names otherwise
     "partial": true}                        where it has only files that hold no tensors

A file is the concatenation of its segments:

    ["b", n]                      the next n bytes of the literals (one run for all files)
    ["z", n]                      n zero bytes
    ["t", name, stored, dtype]    a tensor, which must still be of dtype `stored`, as `dtype` (wider or the same)
    ["l", names, stored, dtype, mapping, i]   tensor i of a RowMapping of the tensors `names`; [name with {e}, n]
                                  among them stands for n names
    ["g", list]                   a list of the tokenizer as a GGUF array value: tokens, merges, types or scores
    ["j", piece]                  a piece of tokenizer.json, vocab.json or merges.txt, see tokenizer.splice

Every segment is compared with the source when the manifest is built, so an existing manifest is exact. The digest of a
source file is one of io.digest (older manifests have none); a restored file is compared with it before it is published.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from aprfmt.arch.links import MAX_TENSORS, RowMapping
from aprfmt.canonical.tensor import CanonicalTensor, is_exact
from aprfmt.errors import AprError, ChecksumError, CorruptError, LimitError
from aprfmt.formats import INDEX_SUFFIXES
from aprfmt.formats.apr_metadata import FILES_PREFIX, SOURCE_KEY
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import encode_value
from aprfmt.formats.hf_files import parse_object
from aprfmt.io.digest import KINDS, Digest, altered, digest_of
from aprfmt.io.names import is_plain
from aprfmt.io.pipe import FileLayout, Literal, Segment, Stream, Zeros
from aprfmt.limits import MAX_HEADER_BYTES, MAX_PATH_CHARS, MAX_PATH_PARTS, MAX_RENDERED_LISTS, MAX_TEXT_FILE_BYTES
from aprfmt.tokenizer import splice
from aprfmt.tokenizer.model import Tokenizer

S = TypeVar("S")
T = TypeVar("T")

# Tokenizer list -> (its GGUF key, element type of the array).
GGUF_LISTS = {
    "tokens": ("tokenizer.ggml.tokens", GgufType.STRING),
    "merges": ("tokenizer.ggml.merges", GgufType.STRING),
    "types": ("tokenizer.ggml.token_type", GgufType.INT32),
    "scores": ("tokenizer.ggml.scores", GgufType.FLOAT32),
}


_HEX = re.compile(r"[0-9a-f]+")

_HINT = "import the source again"

_MAX_NAME_BYTES = 255  # maximum file name length of common file systems
_MAX_EXPERTS = 1 << 14


# --- reading ---


def expand_experts(value: object) -> list[str]:
    """The names that a segment refers to. Raises ValueError, TypeError for anything else."""
    out: list[str] = []
    for item in read_list(value):
        if isinstance(item, str):
            out.append(item)
            continue
        template, n = read_list(item)
        if type(n) is not int or not 0 < n <= _MAX_EXPERTS or len(out) + n > MAX_TENSORS:
            raise ValueError(f"{n!r} experts")
        out += [str(template).replace("{e}", str(e)) for e in range(n)]
    return out


def gguf_list(tokenizer: Tokenizer, which: str) -> bytes:
    """A list of the tokenizer as the array value of a GGUF key."""
    return encode_value((GgufType.ARRAY, GGUF_LISTS[which][1]), getattr(tokenizer, which))


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """The manifest of an `.apr`, if it matches the file's content.

    Attributes:
        format: of the source: "gguf", "hf" or "safetensors".
        files: every source file, ready to be written.
        names: source names of tensors that are renamed in the `.apr`.
        digests: of the files that have one, by name.
        is_partial: whether files are missing: weight files, and perhaps tokenizer files.
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
        """The files without tensors, whole. Raises ChecksumError for one that differs from the imported file."""
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
        """The weight files and their index, ready to be written."""
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


def read_manifest(
    value: object, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None, path: str
) -> SourceManifest | None:
    """Reads the manifest of an `.apr`; None if it no longer matches (tensors renamed, converted or removed).

    The value is untrusted: sizes and names are checked before anything is allocated. Raises CorruptError unless it is a
    manifest, LimitError if it requires too much.
    """
    try:
        body = read_mapping(value)
        listed = [read_mapping(file) for file in read_list(body["files"])]
        files = {safe_name(f["name"]): [read_list(s) for s in read_list(f["segments"])] for f in listed}
        sizes = {str(f["name"]): read_count(f["size"]) for f in listed}
        digests = {str(f["name"]): _digest(kind, f[kind]) for f in listed for kind in KINDS if kind in f}
        _check_names(files)
        every = [segment for segments in files.values() for segment in segments]
        _check_sizes(files.values(), every)
        source = _Source(read_literals(body, every), tensors, tokenizer)
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
        raise CorruptError(f"the source manifest ({SOURCE_KEY}) is damaged: {error}", path=path, hint=_HINT) from error


def _keeps_shapes(
    listed: Sequence[list[object]], made: Sequence[Segment], tensors: Mapping[str, CanonicalTensor]
) -> bool:
    """Whether the tensors of a weight file have the shapes in its header; of a single value either shape.

    Raises ValueError, TypeError, KeyError for an invalid header.
    """
    direct = any(segment[0] == "t" for segment in listed)
    if not direct or not made or not isinstance(made[0], Literal):
        return True
    head = bytes(made[0].data)
    end = 8 + int.from_bytes(head[:8], "little")
    if len(head) < end or head[8:9] != b"{":
        return True  # not safetensors
    header = parse_object(head[8:end], "", "the header of a file of weights", unique=False)
    entries = [read_mapping(entry) for name, entry in header.items() if name != "__metadata__"]
    shapes = {read_list(entry["data_offsets"])[0]: tuple(read_list(entry["shape"])) for entry in entries}
    at = -end
    for segment, stored in zip(listed, made, strict=True):
        if segment[0] == "t" and stored.n_bytes and at in shapes:
            shape = tensors[str(segment[1])].shape
            if shapes[at] != shape and (*shapes[at], *shape) != (1,):
                return False
        at += stored.n_bytes
    return True


class _Source:
    """Produces the segments of a manifest from the `.apr`; in order, since literals are consecutive."""

    def __init__(self, literals: bytes, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None) -> None:
        self._literals = memoryview(literals)
        self._tensors = tensors
        self._tokenizer = tokenizer

    def has(self, segment: list[object]) -> bool:
        """Whether everything that the segment refers to is present: tensors in their original dtype, the tokenizer."""
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
        """The bytes that the segment represents in the source file."""
        kind = segment[0]
        if kind == "b":
            n_bytes = read_count(segment[1])
            data, self._literals = self._literals[:n_bytes], self._literals[n_bytes:]
            return Literal(data)
        if kind == "z":
            return Zeros(read_count(segment[1]))
        if kind == "t":
            _, name, _, dtype = segment
            return _as_stored(self._tensors[str(name)], str(dtype))
        if kind == "l":
            _, names, _, dtype, mapping, position = segment
            return self._linked(expand_experts(names), str(dtype), mapping, position)
        if kind == "g" and self._tokenizer is not None:
            return Literal(gguf_list(self._tokenizer, str(segment[1])))
        if kind == "j" and self._tokenizer is not None:
            return Literal(splice.join([dict(read_mapping(segment[1]))], self._tokenizer))
        raise ValueError(f"unknown segment kind {kind!r}")

    def _linked(self, names: list[str], dtype: str, body: object, position: object) -> Segment:
        mapping = RowMapping.from_json(read_mapping(body), names[0])
        parts = [self._tensors[name] for name in names]
        if type(position) is not int or not 0 <= position < len(mapping.after):
            raise CorruptError("the source manifest lacks the tensor of a row mapping")
        if tuple(part.shape for part in parts) != mapping.before:
            raise CorruptError("the source manifest declares a different shape for a tensor", tensor=names[0])
        return _as_stored(
            CanonicalTensor(names[0], tuple(part.as_source() for part in parts), mapping, position), dtype
        )


def _as_stored(tensor: CanonicalTensor, dtype: str) -> Segment:
    """The bytes of `tensor` as in the source: in the same dtype, or in a wider one."""
    if not is_exact(tensor.dtype, dtype):
        raise CorruptError(f"the source manifest maps {tensor.dtype} to {dtype}")
    return tensor.out(tensor.name, dtype).stream()


def read_mapping(value: object) -> Mapping[str, object]:
    """`value` as a JSON object. Raises TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError("expected an object")
    return value


def read_list(value: object) -> list[object]:
    """`value` as a JSON array. Raises TypeError."""
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def _names(value: object) -> dict[str, str]:
    """Names of the source tensors; they must be unique within a file."""
    found = {key: str(name) for key, name in read_mapping(value).items()}
    if len(set(found.values())) < len(found):
        raise CorruptError("the source manifest has a duplicate tensor name")
    return found


def read_count(value: object) -> int:
    """`value` as a length. Raises CorruptError."""
    if type(value) is not int or value < 0:
        raise CorruptError(f"the source manifest has an invalid length {value!r}")
    return value


def _digest(kind: str, value: object) -> Digest:
    label, length = KINDS[kind]
    if not isinstance(value, str) or len(value) != length or not _HEX.fullmatch(value):
        raise CorruptError(f"the source manifest has {value!r:.80}, not a valid {label}")
    return Digest(kind, value)


def safe_name(name: object) -> str:
    """A relative path inside the output folder; a crafted file must not write elsewhere, or without limit."""
    text = str(name)
    if len(text) > MAX_PATH_CHARS or text.count("/") >= MAX_PATH_PARTS:
        raise LimitError(
            f"the source manifest has a path of {len(text)} characters and {text.count('/') + 1} parts; the "
            f"limits are {MAX_PATH_CHARS} and {MAX_PATH_PARTS}: {text[:40]!r}...",
            hint="remove the deeply nested files",
        )
    if not is_plain(text):
        raise CorruptError(f"the source manifest lists {name!r}, which is not a plain relative path")
    return text


def _check_names(files: Mapping[str, object]) -> None:
    """Checks that all file names can exist together in one folder."""
    if not files:
        raise CorruptError("the source manifest lists no file")
    for name in files:
        parts = name.split("/")
        if any("/".join(parts[:n]) in files for n in range(1, len(parts))):
            raise CorruptError(f"the source manifest uses a file as the folder of {name!r}")
        if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
            raise CorruptError("the source manifest has an invalid file name")


def _check_sizes(files: Iterable[Sequence[list[object]]], every: Iterable[list[object]]) -> None:
    """Limits what a manifest can make us hold in memory: zeros before the first tensor, rendered lists."""
    n_zeros = 0
    for segments in files:
        head = takewhile(lambda segment: segment[0] not in ("t", "l"), segments)
        n_zeros += sum(read_count(segment[1]) for segment in head if segment[0] == "z")
    if n_zeros > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"the source manifest requires {n_zeros} zero bytes in memory")
    n_lists = sum(segment[0] in ("g", "j") for segment in every)
    if n_lists > MAX_RENDERED_LISTS:
        raise LimitError(f"the source manifest refers to the tokenizer's lists {n_lists} times")


def _inflate(text: str, n_bytes: int) -> bytes:
    if n_bytes > MAX_HEADER_BYTES:
        raise LimitError(f"the source manifest declares {n_bytes} literal bytes")
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, n_bytes))
    if len(data) != n_bytes:
        raise CorruptError(f"the source manifest has {len(data)} literal bytes instead of {n_bytes}")
    return data


def read_literals(body: Mapping[str, object], every: Iterable[list[object]]) -> bytes:
    """The literal bytes of a manifest with the segments `every`."""
    return _inflate(str(body["literals"]), sum(read_count(s[1]) for s in every if s[0] == "b"))


def overlay(base: Mapping[str, S], then: Mapping[str, T], now: Mapping[str, T]) -> dict[str, S | T]:
    """`base` with the keys changed that differ between `then` and `now`.

    `base` is the source file's, `then` what this package derives from it, `now` what it derives after the user's edits:
    so edits take effect, and keys that are not modelled keep the source's value.
    """
    out: dict[str, S | T] = dict(base)
    for key, value in now.items():
        # NaN, which config.json may contain, equals nothing.
        if key not in then or (then[key] != value and repr(then[key]) != repr(value)):
            out[key] = value
    for key in then:
        if key not in now:
            out.pop(key, None)
    return out
