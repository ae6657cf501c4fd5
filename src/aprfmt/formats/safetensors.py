"""safetensors reader and writer, as strict as the format's own library.

0  8  u64 header length n
8  n  JSON {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}, spaces
8+n   tensor data, end to end without gaps, row-major, little-endian
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.codecs.dtypes import DTYPES, DTYPES_BY_SAFETENSORS, find_dtype
from aprfmt.errors import AprError, CorruptError, LimitError, UnsupportedError, UsageError
from aprfmt.formats.hf_files import load_tokenizer, parse_object, read_config
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.downloads import cut_short
from aprfmt.io.pipe import Literal, Segment
from aprfmt.io.source import Source, is_file, padding
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_NDIM
from aprfmt.model import Model, Tensor
from aprfmt.types import JsonObject, Shape

if TYPE_CHECKING:
    from aprfmt.arch.hyperparams import Hyperparams

MAX_LIBRARY_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library reads; ours is MAX_HEADER_BYTES; the smaller one applies."""

METADATA_KEY = "__metadata__"
_U64_MAX = (1 << 64) - 1


@light_dataclass(slots=True)
class SafetensorsNative:
    """What writers of safetensors need.

    Attributes:
        metadata: `__metadata__`.
        config_path: config.json in the same folder, or None.
    """

    metadata: dict[str, str]
    config_path: Path | None = None


@light_dataclass(slots=True)
class WeightsFile:
    """One opened weight file, tensors in the order of their data; `left` lists what a pickle contains besides them."""

    source: Source
    metadata: dict[str, str]
    tensors: list[Tensor]
    left: tuple[str, ...] = ()


def open_model(path: Path) -> Model:
    """Opens one safetensors file; uses config.json and tokenizer files in its folder if present.

    Raises CorruptError and its kinds, UnsupportedError (unknown dtype), NotFoundError, StorageError.
    """
    with ExitStack() as stack:
        shard = read_shard(path, stack)
        config_path = path.with_name("config.json")
        native = SafetensorsNative(shard.metadata, config_path if is_file(config_path) else None)
        model = Model(
            path=path, format="safetensors", label="SafeTensors", sources=[shard.source], tensors=shard.tensors,
            load_metadata=lambda: shard.metadata,
            load_tokenizer=lambda _: load_tokenizer(path.parent, config_of(native)),
            load_hparams=lambda _: _load_hparams(native), native=native,
        )  # fmt: skip
        stack.pop_all()
    return model


def _load_hparams(native: SafetensorsNative) -> Hyperparams:
    from aprfmt.arch.hparams import from_hf_config

    return from_hf_config(config_of(native) or {})


def config_of(native: SafetensorsNative) -> JsonObject | None:
    """The config.json in the file's folder; None if missing. Raises CorruptError."""
    return read_config(native.config_path) if native.config_path else None


# --- reading ---


def read_shard(path: Path, stack: ExitStack) -> WeightsFile:
    """Opens and validates one file; `stack` closes it. Raises what `open_model` raises."""
    source = stack.enter_context(Source.open(path))
    source.check(0, 8, "the header length")
    header_bytes = int.from_bytes(source.read(0, 8), "little")
    cap = min(MAX_LIBRARY_HEADER_BYTES, MAX_HEADER_BYTES)
    if header_bytes > cap:
        raise LimitError(f"the header has {header_bytes} bytes; the limit is {cap}", path=source.path, offset=0)
    if source.size < 8 + header_bytes:
        raise cut_short(source.size, 8 + header_bytes, source.path, least=True)
    raw = source.read(8, header_bytes)
    if raw[:1] != b"{":
        raise CorruptError("the header does not start with '{'", path=source.path, offset=8)
    header = parse_object(raw, source.path, "the header")
    found = header.pop(METADATA_KEY, None)
    stated = {} if found is None else found
    metadata = {k: v for k, v in stated.items() if isinstance(v, str)} if isinstance(stated, dict) else {}
    if not isinstance(stated, dict) or len(metadata) < len(stated):
        raise CorruptError(f"{METADATA_KEY} is not an object of strings", path=source.path)
    tensors = [_tensor(name, info, 8 + header_bytes, source) for name, info in header.items()]
    # The order of the header's keys has no meaning; empty tensors come before the one at the same offset.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.n_bytes))
    _check_contiguous(tensors, 8 + header_bytes, source)
    return WeightsFile(source, metadata, tensors)


def _tensor(name: str, info: object, data_start: int, source: Source) -> Tensor:
    spelling, dims, begin, end = _fields(name, info, source.path)
    try:
        dtype, shape, n_bytes = _form(spelling, dims)
    except AprError as error:
        raise type(error)(error.message, path=source.path, tensor=name, hint=error.hint) from error
    if end - begin != n_bytes:
        raise CorruptError(
            f"data_offsets span {end - begin} bytes, but {dtype} of shape {list(shape)} needs {n_bytes}",
            path=source.path,
            tensor=name,
        )
    return Tensor(name, dtype, shape, data_start + begin, n_bytes, source)


@lru_cache(maxsize=4096)
def _form(spelling: str, shape: Shape) -> tuple[str, Shape, int]:
    """Name of the dtype, the shape, bytes: cached, since the experts of a large model share them."""
    dtype = DTYPES_BY_SAFETENSORS.get(spelling)
    if dtype is None:
        known = ", ".join(row.safetensors for row in DTYPES.values() if row.safetensors)
        raise UnsupportedError(f"unknown dtype {spelling!r}", hint=f"known: {known}")
    return dtype.name, shape, dtype.n_bytes(shape)


def _fields(name: str, info: object, path: str) -> tuple[str, Shape, int, int]:
    try:
        n_name = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError as error:
        raise CorruptError("a tensor name contains a lone surrogate", path=path, tensor=name) from error
    if n_name > MAX_NAME_BYTES:
        raise LimitError(f"a tensor name has {n_name} bytes; the limit is {MAX_NAME_BYTES}", path=path)
    known = info if isinstance(info, dict) else {}
    dtype, dims, span = known.get("dtype"), _sizes(known.get("shape")), _sizes(known.get("data_offsets"))
    if not isinstance(dtype, str) or dims is None or span is None or len(span) != 2:
        raise CorruptError("its header entry is not {dtype, shape, data_offsets: [begin, end]}", path=path, tensor=name)
    if len(dims) > MAX_NDIM:
        raise LimitError(f"{len(dims)} dimensions; the limit is {MAX_NDIM}", path=path, tensor=name)
    return dtype, dims, span[0], span[1]


def _sizes(value: object) -> Shape | None:
    """A list of u64 as a tuple, None for anything else; true and false are not numbers here."""
    if type(value) is not list:
        return None
    for item in value:
        if type(item) is not int or not 0 <= item <= _U64_MAX:
            return None
    return tuple(value)


def _check_contiguous(tensors: list[Tensor], data_start: int, source: Source) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            problem = (
                "overlaps the previous tensor" if tensor.offset < end else "leaves a gap after the previous tensor"
            )
            raise CorruptError(
                f"its data {problem}", path=source.path, tensor=tensor.name, offset=min(tensor.offset, 1 << 63)
            )
        end += tensor.n_bytes
    if end > source.size:
        raise cut_short(source.size, end, source.path)
    if end < source.size:
        raise CorruptError(f"{source.size - end} trailing bytes after the last tensor", path=source.path, offset=end)


# --- writing ---


def layout(tensors: Sequence[OutTensor], metadata: Mapping[str, str] | None = None) -> list[Segment]:
    """A safetensors file with the tensors in the given order; the header is padded to 8 bytes with spaces.

    Raises UsageError (duplicate or reserved name, wrong size), UnsupportedError (a dtype that safetensors does not
    have), LimitError (a header longer than the library reads).
    """
    header: dict[str, object] = {} if metadata is None else {METADATA_KEY: dict(metadata)}
    offset = 0
    for tensor in tensors:
        if tensor.name in header or tensor.name == METADATA_KEY:
            raise UsageError("duplicate tensor name", tensor=tensor.name)
        header[tensor.name] = {
            "dtype": _spelling(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    try:
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"a name or metadata value is not valid UTF-8: {error.object[:40]!r}") from error
    raw += b" " * padding(len(raw), 8)
    if len(raw) > MAX_LIBRARY_HEADER_BYTES:
        raise LimitError(f"the header has {len(raw)} bytes; the library's limit is {MAX_LIBRARY_HEADER_BYTES}")
    return [Literal(len(raw).to_bytes(8, "little") + raw), *(tensor.stream() for tensor in tensors)]


def _spelling(tensor: OutTensor) -> str:
    dtype = find_dtype(tensor.dtype)
    if dtype.safetensors is None:
        raise UnsupportedError(
            f"safetensors has no dtype for {dtype.name}",
            tensor=tensor.name,
            hint="decode it with --dtype f16, bf16 or f32",
        )
    if dtype.n_bytes(tensor.shape) != tensor.n_bytes:
        raise UsageError(
            f"{tensor.n_bytes} bytes do not match {dtype.name} of shape {list(tensor.shape)}", tensor=tensor.name
        )
    return dtype.safetensors
