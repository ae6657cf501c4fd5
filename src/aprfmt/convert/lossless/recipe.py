"""How to rebuild the source files of an `.apr`, byte for byte, from the tensors and lists that it holds.

The recipe stands in the metadata under `aprfmt.source`:

    {"format": "gguf" | "hf" | "safetensors",
     "files": [{"name": str, "size": int, "segments": [...]}, ...],
     "literals": base64(zlib(bytes))}

A file is its segments end to end:

    ["b", n]                      the next n bytes of the literals (one run for all files)
    ["z", n]                      n zero bytes
    ["t", name, stored, dtype]    a tensor, which must still be of dtype `stored`, as `dtype` (wider or the same)
    ["l", names, stored, dtype, row_map, i]   tensor i of arch.links.RowMap of the tensors `names`; [name with {e}, n]
                                  among them stands for n names
    ["g", list]                   a list of the tokenizer as a GGUF array value: tokens, merges, types or scores
    ["j", piece]                  a piece of tokenizer.json, vocab.json or merges.txt, see tokenizer.splice

Every segment is compared with the source when the recipe is made, so a recipe that exists is exact.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from aprfmt.arch.links import MAX_TENSORS, RowMap
from aprfmt.canonical.tensor import CanonicalTensor, is_exact
from aprfmt.errors import AprError, CorruptError, LimitError
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.gguf_kv import GgufType
from aprfmt.formats.gguf_write import encode_value
from aprfmt.io.segments import FileLayout, Literal, Segment, Stream, Zeros
from aprfmt.limits import MAX_HEADER_BYTES, MAX_RENDERED_LISTS, MAX_TEXT_FILE_BYTES
from aprfmt.tokenizer import splice
from aprfmt.tokenizer.model import Tokenizer

S = TypeVar("S")
T = TypeVar("T")

# Tokenizer list -> element type of its GGUF array.
GGUF_LISTS = {
    "tokens": GgufType.STRING,
    "merges": GgufType.STRING,
    "types": GgufType.INT32,
    "scores": GgufType.FLOAT32,
}


_MAX_NAME_BYTES = 255  # of a file, on every common file system
_MAX_EXPERTS = 1 << 14


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
    return encode_value((GgufType.ARRAY, GGUF_LISTS[which]), getattr(tokenizer, which))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that was read from an `.apr`, and fits what the file holds.

    Attributes:
        format: of the source: "gguf", "hf" or "safetensors".
        files: every source file, ready to be written.
    """

    format: str
    files: Mapping[str, Sequence[Segment]]

    def layouts(self) -> list[FileLayout]:
        """Every source file, ready to be written."""
        return [FileLayout(name, segments) for name, segments in self.files.items()]

    def head(self, name: str) -> bytes:
        """The bytes of file `name` before its first tensor: all of a small file, the header of a weight file."""
        parts = []
        for segment in self.files[name]:
            if isinstance(segment, Stream):
                break
            parts.append(bytes(segment.n_bytes) if isinstance(segment, Zeros) else bytes(segment.data))
        return b"".join(parts)

    def text_files(self) -> dict[str, bytes]:
        """The files that hold no tensor, whole."""
        return {
            name: self.head(name)
            for name, segments in self.files.items()
            if not any(isinstance(segment, Stream) for segment in segments)
        }


def read_recipe(
    value: object, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None, path: str
) -> Recipe | None:
    """The recipe of an `.apr`, or None where it no longer fits (tensors renamed, converted or gone).

    Anybody may have written the value: sizes and names are checked before anything is made of it.
    Raises CorruptError when it is not a recipe at all, LimitError when it asks for too much.
    """
    try:
        body = _mapping(value)
        listed = [_mapping(file) for file in _list(body["files"])]
        files = {safe_name(f["name"]): [_list(s) for s in _list(f["segments"])] for f in listed}
        sizes = {str(f["name"]): _count(f["size"]) for f in listed}
        _check_names(files)
        every = [segment for segments in files.values() for segment in segments]
        _check_sizes(files.values(), every)
        n_literals = sum(_count(s[1]) for s in every if s[0] == "b")
        source = _Source(_inflate(str(body["literals"]), n_literals), tensors, tokenizer)
        if not all(map(source.has, every)):
            return None
        made = {name: [source.segment(s) for s in segments] for name, segments in files.items()}
        if any(sum(s.n_bytes for s in segments) != sizes[name] for name, segments in made.items()):
            return None
        return Recipe(str(body["format"]), made)
    except AprError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, zlib.error, binascii.Error) as error:
        raise CorruptError(
            f"the record of the source files ({SOURCE_KEY}) is damaged: {error}",
            path=path,
            hint="import the source again",
        ) from error


class _Source:
    """Makes the segments of a recipe from what the `.apr` holds; one after the other, as literals follow on."""

    def __init__(
        self, literals: bytes, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None
    ) -> None:
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
        assert self._tokenizer is not None  # see `has`
        if kind == "g":
            return Literal(gguf_list(self._tokenizer, str(segment[1])))
        if kind == "j":
            return Literal(splice.join([dict(_mapping(segment[1]))], self._tokenizer))
        raise ValueError(f"a segment of the unknown kind {kind!r}")

    def _linked(self, names: list[str], dtype: str, body: object, position: object) -> Segment:
        row_map = RowMap.from_json(_mapping(body), names[0])
        parts = [self._tensors[name] for name in names]
        if type(position) is not int or not 0 <= position < len(row_map.after):
            raise CorruptError("the record of the source files names no tensor of a row map")
        if tuple(part.shape for part in parts) != row_map.before:
            raise CorruptError("the record of the source files gives a tensor another shape", tensor=names[0])
        return _as_stored(
            CanonicalTensor(names[0], tuple(part.piece() for part in parts), row_map, position), dtype
        )


def _as_stored(tensor: CanonicalTensor, dtype: str) -> Segment:
    """The bytes of `tensor` as the source has them: in the same dtype, or in a wider one."""
    if not is_exact(tensor.dtype, dtype):
        raise CorruptError(f"the record of the source files turns {tensor.dtype} into {dtype}")
    return tensor.out(tensor.name, dtype).stream()


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError("an object was expected")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("a list was expected")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise CorruptError(f"the record of the source files gives {value!r} as a length")
    return value


def safe_name(name: object) -> str:
    """A relative path that stays inside the output folder; a crafted file must not write elsewhere."""
    text = str(name)
    if any(part in ("", ".", "..") for part in text.split("/")) or "\\" in text or "\0" in text:
        raise CorruptError(
            f"the record of the source files names {name!r}, which is not a plain relative path"
        )
    return text


def _check_names(files: Mapping[str, object]) -> None:
    """The names must be able to stand in one folder together."""
    if not files:
        raise CorruptError("the record of the source files names no file")
    for name in files:
        parts = name.split("/")
        if any("/".join(parts[:n]) in files for n in range(1, len(parts))):
            raise CorruptError(f"the record of the source files uses a file as the folder of {name!r}")
        if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
            raise CorruptError("the record of the source files holds a name that no file can have")


def _check_sizes(files: Iterable[Sequence[list[object]]], every: Iterable[list[object]]) -> None:
    """What a recipe makes us hold in memory is capped: zeros before the first tensor, lists that are rendered."""
    n_zeros = 0
    for segments in files:
        head = takewhile(lambda segment: segment[0] not in ("t", "l"), segments)
        n_zeros += sum(_count(segment[1]) for segment in head if segment[0] == "z")
    if n_zeros > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"the record of the source files asks for {n_zeros} zero bytes in memory")
    n_lists = sum(segment[0] in ("g", "j") for segment in every)
    if n_lists > MAX_RENDERED_LISTS:
        raise LimitError(f"the record of the source files refers to the tokenizer's lists {n_lists} times")


def _inflate(text: str, n_bytes: int) -> bytes:
    if n_bytes > MAX_HEADER_BYTES:
        raise LimitError(f"the record of the source files declares {n_bytes} literal bytes")
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, n_bytes))
    if len(data) != n_bytes:
        raise CorruptError(
            f"the record of the source files holds {len(data)} literal bytes instead of {n_bytes}"
        )
    return data


def overlay(base: Mapping[str, S], then: Mapping[str, T], now: Mapping[str, T]) -> dict[str, S | T]:
    """`base` with only those keys changed that differ between `then` and `now`.

    `base` is what a source file said, `then` what this package derives from it, `now` what it derives after the
    user's edits: so edits take effect, and whatever we do not model stays as the source had it.
    """
    out: dict[str, S | T] = dict(base)
    for key, value in now.items():
        if key not in then or then[key] != value:
            out[key] = value
    for key in then:
        if key not in now:
            out.pop(key, None)
    return out
