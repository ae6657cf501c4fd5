"""How to rebuild the source files of an `.apr`, byte for byte, from the tensors and lists that it holds.

The recipe stands in the metadata under `aprfmt.source`:

    {"format": "gguf" | "hf" | "safetensors",
     "files": [{"name": str, "size": int, "segments": [...]}, ...],
     "literals": base64(zlib(bytes))}

A file is its segments end to end:

    ["b", n]                      the next n bytes of the literals (one run for all files)
    ["z", n]                      n zero bytes
    ["t", name]                   the stored bytes of a tensor
    ["t", name, move, n_heads]    the same with its rows moved
    ["g", list]                   a list of the tokenizer as a GGUF array value: tokens, merges, types or scores
    ["j", piece]                  a piece of tokenizer.json, vocab.json or merges.txt, see tokenizer.splice

Every segment is compared with the source when the recipe is made, so a recipe that exists is exact.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.convert.transfer import CanonicalTensor, Move
from aprfmt.errors import AprError, CorruptError, LimitError
from aprfmt.formats.gguf_kv import GgufType
from aprfmt.formats.gguf_write import encode_value
from aprfmt.io.segments import FileLayout, Literal, Segment, Stream, Zeros
from aprfmt.limits import MAX_HEADER_BYTES, MAX_RENDERED_LISTS
from aprfmt.tokenizer import splice
from aprfmt.tokenizer.model import Tokenizer

KEY = "aprfmt.source"

# Tokenizer list -> element type of its GGUF array.
GGUF_LISTS = {
    "tokens": GgufType.STRING,
    "merges": GgufType.STRING,
    "types": GgufType.INT32,
    "scores": GgufType.FLOAT32,
}


@dataclass(slots=True)
class FileRecipe:
    """The segments of one source file while they are collected."""

    name: str
    segments: list[list[Any]] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class RecipeWriter:
    """Collects files and literals, then gives the JSON value."""

    format: str
    tokenizer: Tokenizer | None
    files: list[FileRecipe] = field(default_factory=list)
    literals: bytearray = field(default_factory=bytearray)

    def start(self, name: str) -> None:
        """Begins the next file."""
        self.files.append(FileRecipe(name))

    def literal(self, data: bytes | memoryview) -> None:
        """Adds bytes as they are; runs of zeros cost nothing."""
        if not len(data):
            return
        file = self.files[-1]
        file.size += len(data)
        if not any(data):
            file.segments.append(["z", len(data)])
            return
        self.literals += data
        if file.segments and file.segments[-1][0] == "b":
            file.segments[-1][1] += len(data)
        else:
            file.segments.append(["b", len(data)])

    def tensor(self, name: str, n_bytes: int, move: Move | None = None) -> None:
        """Adds the bytes of a stored tensor, its rows brought into the source's order by `move`."""
        self.files[-1].size += n_bytes
        self.files[-1].segments.append(["t", name, move.name, move.n_heads] if move else ["t", name])

    def gguf_list(self, which: str, source: memoryview) -> None:
        """Adds a GGUF array value; by reference when the tokenizer's list gives exactly these bytes."""
        if self.tokenizer is not None and _gguf_list(self.tokenizer, which) == source:
            self.files[-1].size += len(source)
            self.files[-1].segments.append(["g", which])
        else:
            self.literal(source)

    def tokenizer_file(self, text: bytes) -> None:
        """Adds a tokenizer.json, vocab.json or merges.txt; its lists by reference where that is exact."""
        tokenizer = self.tokenizer
        pieces = splice.split(text, tokenizer) if tokenizer is not None else None
        if tokenizer is None or pieces is None:
            self.literal(text)
            return
        file = self.files[-1]
        for piece in pieces:
            if isinstance(piece, str):
                self.literal(piece.encode())
            else:
                file.segments.append(["j", piece])
                file.size += len(splice.join([piece], tokenizer))

    def value(self) -> dict[str, Any]:
        """The value of the metadata key."""
        files = [{"name": f.name, "size": f.size, "segments": f.segments} for f in self.files]
        literals = base64.b64encode(zlib.compress(bytes(self.literals), 9)).decode()
        return {"format": self.format, "files": files, "literals": literals}


def _gguf_list(tokenizer: Tokenizer, which: str) -> bytes:
    return encode_value((GgufType.ARRAY, GGUF_LISTS[which]), getattr(tokenizer, which))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that was read from an `.apr`, checked against what the file holds."""

    format: str
    files: dict[str, list[list[Any]]]
    literals: bytes
    tokenizer: Tokenizer | None
    tensors: Mapping[str, CanonicalTensor]
    starts: dict[str, int]

    def layouts(self) -> list[FileLayout]:
        """Every source file, ready to be written."""
        return [FileLayout(name, self._segments(name)) for name in self.files]

    def head(self, name: str) -> bytes:
        """The bytes of file `name` before its first tensor: all of a small file, the header of a weight file."""
        parts = []
        for segment in self._segments(name):
            if isinstance(segment, Stream):
                break
            parts.append(bytes(segment.n_bytes) if isinstance(segment, Zeros) else bytes(segment.data))
        return b"".join(parts)

    def text_files(self) -> dict[str, bytes]:
        """The files that hold no tensor, whole."""
        return {
            name: self.head(name)
            for name, segments in self.files.items()
            if all(s[0] != "t" for s in segments)
        }

    def _segments(self, name: str) -> list[Segment]:
        position = self.starts[name]
        out: list[Segment] = []
        for segment in self.files[name]:
            if segment[0] == "b":
                out.append(Literal(memoryview(self.literals)[position : position + segment[1]]))
                position += segment[1]
            else:
                out.append(_READERS[segment[0]](self, segment))
        return out

    def _zeros(self, segment: list[Any]) -> Segment:
        return Zeros(segment[1])

    def _tensor(self, segment: list[Any]) -> Segment:
        tensor = self.tensors[segment[1]]
        move = Move(segment[2], segment[3]) if len(segment) == 4 else None
        return tensor.out(tensor.name, move=move).stream()

    def _list(self, segment: list[Any]) -> Segment:
        assert self.tokenizer is not None
        return Literal(_gguf_list(self.tokenizer, segment[1]))

    def _piece(self, segment: list[Any]) -> Segment:
        assert self.tokenizer is not None
        return Literal(splice.join([segment[1]], self.tokenizer))


_READERS: dict[str, Callable[[Recipe, list[Any]], Segment]] = {
    "z": Recipe._zeros,
    "t": Recipe._tensor,
    "g": Recipe._list,
    "j": Recipe._piece,
}


def read_recipe(
    value: Any, tensors: Mapping[str, CanonicalTensor], tokenizer: Tokenizer | None, path: str
) -> Recipe | None:
    """The recipe of an `.apr`, or None when it no longer fits (tensors renamed, converted or gone).

    Raises CorruptError when the value is no recipe at all.
    """
    try:
        files = {_safe_name(f["name"]): [list(s) for s in f["segments"]] for f in value["files"]}
        sizes = {str(f["name"]): int(f["size"]) for f in value["files"]}
        _check_references(files)
        n_literals = sum(int(s[1]) for segments in files.values() for s in segments if s[0] == "b")
        literals = _inflate(str(value["literals"]), n_literals)
        recipe = Recipe(str(value["format"]), files, literals, tokenizer, tensors, _starts(files))
        return recipe if _fits(recipe, sizes) else None
    except AprError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, zlib.error, binascii.Error) as error:
        raise CorruptError(
            f"the record of the source files ({KEY}) is damaged: {error}",
            path=path,
            hint="import the source again",
        ) from error


def _safe_name(name: Any) -> str:
    """A relative path that stays inside the output folder; a crafted file must not write elsewhere."""
    parts = str(name).split("/")
    if (
        not str(name)
        or any(part in ("", ".", "..") for part in parts)
        or "\\" in str(name)
        or "\0" in str(name)
    ):
        raise CorruptError(f"the record of the source files names {name!r}, which is no plain relative path")
    return str(name)


def _inflate(text: str, n_bytes: int) -> bytes:
    if n_bytes > MAX_HEADER_BYTES:
        raise LimitError(f"the record of the source files announces {n_bytes} literal bytes")
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, n_bytes))
    if len(data) != n_bytes:
        raise CorruptError(
            f"the record of the source files holds {len(data)} literal bytes instead of {n_bytes}"
        )
    return data


def _starts(files: Mapping[str, Iterable[list[Any]]]) -> dict[str, int]:
    starts, position = {}, 0
    for name, segments in files.items():
        starts[name] = position
        position += sum(s[1] for s in segments if s[0] == "b")
    return starts


def _fits(recipe: Recipe, sizes: Mapping[str, int]) -> bool:
    for name, segments in recipe.files.items():
        if any(s[0] == "t" and s[1] not in recipe.tensors for s in segments):
            return False
        if recipe.tokenizer is None and any(s[0] in "gj" for s in segments):
            return False
        if sum(s.n_bytes for s in recipe._segments(name)) != sizes[name]:
            return False
    return True


def _check_references(files: Mapping[str, Iterable[list[Any]]]) -> None:
    """Rendering a list costs memory, so a crafted recipe may not ask for the same one again and again."""
    rendered = sum(1 for segments in files.values() for s in segments if s[0] in ("g", "j"))
    if rendered > MAX_RENDERED_LISTS:
        raise LimitError(f"the record of the source files refers to the tokenizer's lists {rendered} times")
