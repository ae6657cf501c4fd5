"""How to rebuild the source files of an `.apr`, byte for byte, from the tensors and lists that it holds.

The recipe stands in the metadata under `aprfmt.source`:

    {"format": "gguf" | "hf" | "safetensors",
     "files": [{"name": str, "size": int, "segments": [...]}, ...],
     "literals": base64(zlib(bytes))}

A file is its segments end to end:

    ["b", n]                      the next n bytes of the literals (one run for all files)
    ["z", n]                      n zero bytes
    ["t", name, stored, dtype]    a tensor, which must still be of dtype `stored`, as `dtype` (wider or the same)
    ["t", ..., move, n]           the same with the rows of its n heads moved, as older files have it
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.arch.links import MAX_TENSORS, Link, RowMap
from aprfmt.canonical.dtype_choice import is_exact
from aprfmt.canonical.tensor import CanonicalTensor, of_pieces
from aprfmt.errors import AprError, CorruptError, LimitError
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.gguf_kv import GgufType
from aprfmt.formats.gguf_write import encode_value
from aprfmt.io.segments import FileLayout, Literal, Segment, Stream, Zeros
from aprfmt.limits import MAX_HEADER_BYTES, MAX_LITERAL_BYTES, MAX_RENDERED_LISTS, MAX_TEXT_FILE_BYTES
from aprfmt.model import Tensor
from aprfmt.tokenizer import splice
from aprfmt.tokenizer.model import Tokenizer

# Tokenizer list -> element type of its GGUF array.
GGUF_LISTS = {
    "tokens": GgufType.STRING,
    "merges": GgufType.STRING,
    "types": GgufType.INT32,
    "scores": GgufType.FLOAT32,
}


_ZEROS = bytes(1 << 16)
_MAX_NAME_BYTES = 255  # of a file, on every common file system
_MAX_EXPERTS = 1 << 14


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
        """Begins the next file. Raises CorruptError for a name that reading the record would refuse."""
        self.files.append(FileRecipe(_safe_name(name)))

    def literal(self, data: bytes | memoryview) -> None:
        """Adds bytes as they are; runs of zeros cost nothing."""
        if not len(data):
            return
        file = self.files[-1]
        file.size += len(data)
        if _is_zero(data):
            file.segments.append(["z", len(data)])
            return
        if len(self.literals) + len(data) > MAX_LITERAL_BYTES:
            raise LimitError(
                f"{file.name} holds more than {MAX_LITERAL_BYTES} bytes that are neither tensors nor vocabulary",
                hint="take what does not belong to the model away first",
            )
        self.literals += data
        if file.segments and file.segments[-1][0] == "b":
            file.segments[-1][1] += len(data)
        else:
            file.segments.append(["b", len(data)])

    def tensor(self, tensor: CanonicalTensor, stored: str | None = None) -> None:
        """Adds the bytes of a tensor that is stored as `stored`."""
        self.files[-1].size += tensor.n_bytes
        self.files[-1].segments.append(["t", tensor.name, stored or tensor.dtype, tensor.dtype])

    def link(
        self, link: Link, original: Tensor, tensors: Mapping[str, CanonicalTensor], stored: Mapping[str, str]
    ) -> None:
        """Adds the GGUF tensor `original` of a link, made of the tensors that the `.apr` holds (as `stored`)."""
        parts = [tensors[name] for name in link.hf]
        kept = [stored.get(name, part.dtype) for name, part in zip(link.hf, parts, strict=True)]
        self.files[-1].size += original.n_bytes
        self.files[-1].segments.append(
            ["l", _folded(link), kept[0] if len(set(kept)) == 1 else kept, original.dtype,
             link.row_map.to_json(), link.gguf.index(original.name)]
        )  # fmt: skip

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
        pieces = splice.sized(text, tokenizer) if tokenizer is not None else None
        if pieces is None:
            self.literal(text)
            return
        file = self.files[-1]
        for piece, n_bytes in pieces:
            if isinstance(piece, str):
                self.literal(piece.encode())
            else:
                file.segments.append(["j", piece])
                file.size += n_bytes

    def value(self) -> dict[str, Any]:
        """The value of the metadata key."""
        files = [{"name": f.name, "size": f.size, "segments": f.segments} for f in self.files]
        literals = base64.b64encode(zlib.compress(bytes(self.literals), 9)).decode()
        return {"format": self.format, "files": files, "literals": literals}


def _folded(link: Link) -> list[Any]:
    """The Hugging Face names of a link, those of its experts as one with their number."""
    per_name = len(link.hf) // len(link.row.hf)
    out: list[Any] = []
    for i, template in enumerate(link.row.hf):
        first = link.hf[i * per_name]
        if "{e}" in template:
            before = template.partition("{e}")[2]
            out.append([first[: len(first) - len(before) - 1] + "{e}" + before, per_name])
        else:
            out.append(first)
    return out


def _unfolded(found: Any) -> list[str]:
    out: list[str] = []
    for item in found:
        if isinstance(item, str):
            out.append(item)
            continue
        template, n = item
        if type(n) is not int or not 0 < n <= _MAX_EXPERTS or len(out) + n > MAX_TENSORS:
            raise ValueError(f"{n!r} experts")
        out += [str(template).replace("{e}", str(e)) for e in range(n)]
    return out


def _is_zero(data: bytes | memoryview) -> bool:
    steps = range(0, len(data), len(_ZEROS))
    return all(data[i : i + len(_ZEROS)] == _ZEROS[: len(data) - i] for i in steps)


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
            if all(s[0] not in _TENSORS for s in segments)
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
        _check_exact(tensor.dtype, segment[3])
        if len(segment) == 6:
            tensor = _moved(tensor, segment[4], segment[5])
        return tensor.out(tensor.name, segment[3]).stream()

    def _link(self, segment: list[Any]) -> Segment:
        hf = _unfolded(segment[1])
        row_map = RowMap.from_json(segment[4], hf[0])
        parts = [self.tensors[name] for name in hf]
        if type(segment[5]) is not int or not 0 <= segment[5] < len(row_map.after):
            raise CorruptError("the record of the source files names no tensor of a row_map")
        if tuple(part.shape for part in parts) != row_map.before:
            raise CorruptError("the record of the source files gives a tensor another shape", tensor=hf[0])
        made = of_pieces(hf[0], [part.piece() for part in parts], row_map, segment[5])
        if made.dtype != segment[3]:
            _check_exact(made.dtype, segment[3])
        return made.out(made.name, segment[3]).stream()

    def _list(self, segment: list[Any]) -> Segment:
        assert self.tokenizer is not None
        return Literal(_gguf_list(self.tokenizer, segment[1]))

    def _piece(self, segment: list[Any]) -> Segment:
        assert self.tokenizer is not None
        return Literal(splice.join([segment[1]], self.tokenizer))


def _check_exact(stored: str, dtype: str) -> None:
    if not is_exact(stored, dtype):
        raise CorruptError(f"the record of the source files turns {stored} into {dtype}")


def _moved(tensor: CanonicalTensor, move: str, n_heads: int) -> CanonicalTensor:
    """The rows of each head in GGUF's rotary order."""
    if move != "rope_permute" or type(n_heads) is not int:
        raise CorruptError(f"the record of the source files names the unknown row move {move!r}")
    row_map = RowMap((tensor.shape,), (tensor.shape,), (("swap", (n_heads, 2, _half_head(tensor, n_heads))),))
    row_map.check(tensor.name)
    return of_pieces(tensor.name, [tensor.piece()], row_map, 0)


def _half_head(tensor: CanonicalTensor, n_heads: int) -> int:
    return tensor.shape[0] // max(1, n_heads) // 2 if tensor.shape else 0


_TENSORS = ("t", "l")

_READERS: dict[str, Callable[[Recipe, list[Any]], Segment]] = {
    "z": Recipe._zeros,
    "t": Recipe._tensor,
    "l": Recipe._link,
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
        _check_names(files)
        _check_lengths(files)
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
            f"the record of the source files ({SOURCE_KEY}) is damaged: {error}",
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


def _check_lengths(files: Mapping[str, Iterable[list[Any]]]) -> None:
    """Lengths must be counts; zeros before the first tensor are held in memory, so they are capped."""
    n_zeros = 0
    for segments in files.values():
        in_head = True
        for segment in segments:
            if segment[0] in ("b", "z") and (type(segment[1]) is not int or segment[1] < 0):
                raise CorruptError(f"the record of the source files gives {segment[1]!r} as a length")
            in_head = in_head and segment[0] not in _TENSORS
            n_zeros += segment[1] if in_head and segment[0] == "z" else 0
    if n_zeros > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"the record of the source files asks for {n_zeros} zero bytes in memory")


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
        wanted = [(name, dtype) for s in segments if s[0] in _TENSORS for name, dtype in _wanted(s)]
        if any(name not in recipe.tensors or recipe.tensors[name].dtype != dtype for name, dtype in wanted):
            return False
        if recipe.tokenizer is None and any(s[0] in "gj" for s in segments):
            return False
        if sum(s.n_bytes for s in recipe._segments(name)) != sizes[name]:
            return False
    return True


def _wanted(segment: list[Any]) -> list[tuple[str, str]]:
    """(tensor, dtype that it must have) of a segment."""
    if segment[0] == "t":
        return [(segment[1], segment[2])]
    hf = _unfolded(segment[1])
    kept = segment[2] if isinstance(segment[2], list) else [segment[2]] * len(hf)
    return list(zip(hf, kept, strict=True))


def _check_references(files: Mapping[str, Iterable[list[Any]]]) -> None:
    """Rendering a list costs memory, so a crafted recipe may not ask for the same one again and again."""
    rendered = sum(1 for segments in files.values() for s in segments if s[0] in ("g", "j"))
    if rendered > MAX_RENDERED_LISTS:
        raise LimitError(f"the record of the source files refers to the tokenizer's lists {rendered} times")
