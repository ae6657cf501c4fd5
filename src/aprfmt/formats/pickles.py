"""PyTorch pickles (`.bin`, `.pt`, `.pth`): where their tensors lie, as torch tells, and nothing of them is run.

Only `torch.load(weights_only=True)` looks at the pickle: it builds tensors, numbers and containers, and refuses every
call of anything else. No weight is read for it: torch is asked for the places of the storages in the file, and the
tensors are then read from there like those of any container, piece by piece.

A zip file holds `NAME/data.pkl` and each storage as a record `NAME/data/KEY`; files from before torch 1.6 hold pickles,
and behind them each storage with its length before it.
"""

from __future__ import annotations

import ctypes
import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import (
    AprError,
    CorruptError,
    LimitError,
    MissingDependencyError,
    RefusedError,
    UnknownFormatError,
    UnsupportedError,
)
from aprfmt.formats.safetensors import Shard
from aprfmt.io.source import Source
from aprfmt.limits import MAX_NAME_BYTES, MAX_NDIM, MAX_PICKLED_BYTES
from aprfmt.model import Tensor
from aprfmt.text import first_few

if TYPE_CHECKING:
    import torch

SUFFIXES = (".bin", ".pt", ".pth")

_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The number with which files from before torch 1.6 begin, pickled."""

_NESTED = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training programs put the weights beside what else they save."""
_BESIDE = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
"""What files of a training begin with that hold no weights of a model."""

_SMALL_READ = 1 << 12
_RESAVE = "torch.save(torch.load(PATH, weights_only=True), PATH) writes it anew"
_DTYPES = {f"torch.{row.torch}": row.name for row in DTYPES.values() if row.torch is not None}


def is_pickle(head: bytes, source: Source | None) -> bool:
    """Whether a file that begins with `head` was written by torch.save."""
    if head.startswith(_ZIP):
        return b"/data.pkl" in head or (source is not None and _has_pickle(source))
    return head.startswith(_OLD)


def _has_pickle(source: Source) -> bool:
    try:
        with zipfile.ZipFile(source.path) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def holds_weights(name: str) -> bool:
    """Whether a file of that name in a folder may be the weights of its model."""
    return name.endswith(SUFFIXES) and not name.rpartition("/")[2].startswith(_BESIDE)


def read_shard(path: Path, stack: ExitStack) -> Shard:
    """Opens one file; `stack` closes it. What it holds beside tensors is told in the shard's `left`.

    Raises RefusedError (a call in the pickle, tensors that are not whole runs of a storage), CorruptError and its
    kinds, UnsupportedError, MissingDependencyError without torch, NotFoundError, StorageError.
    """
    source = stack.enter_context(Source.open(path))
    head = source.read(0, min(source.size, len(_OLD)))
    is_zip = head.startswith(_ZIP)
    if not is_zip and head != _OLD:
        raise UnknownFormatError(
            "not a file that torch.save wrote",
            path=path,
            hint="expected weights in safetensors, or a PyTorch state dict",
        )
    found, place_of = _load(source, _records(source) if is_zip else None)
    weights, left = _state_dict(found, source.path)
    tensors = [_tensor(name, value, place_of, source) for name, value in weights.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, -tensor.n_bytes))
    return Shard(source, {}, tensors, tuple(left))


Places = Callable[["torch.Tensor"], int | None]
"""Where in the file the storage of a tensor begins; None where it is not there."""


def _load(source: Source, records: Mapping[int, int] | None) -> tuple[object, Places]:
    """What the pickle holds, its tensors without values, and where these lie; `records` are those of a zip file."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise MissingDependencyError(
            "a PyTorch pickle can only be read with torch", path=source.path, hint="pip install torch"
        ) from error
    try:
        if records is None:
            skim = _Skim(source)
            return torch.load(cast(IO[bytes], skim), weights_only=True, map_location="cpu"), skim.place_of
        with FakeTensorMode():
            return torch.load(source.path, weights_only=True, mmap=True, map_location="cpu"), _checked_places(records)
    except AprError:
        raise
    except Exception as error:  # whatever torch makes of a damaged or hostile file
        raise _refusal(error, source.path) from error


def _refusal(error: Exception, path: str) -> AprError:
    words = str(error)
    for mark in ("unsupported GLOBAL ", "Unsupported global: GLOBAL ", "Unsupported class "):
        if mark in words:
            name = words.partition(mark)[2].split()[0].rstrip(",.")
            return RefusedError(
                f"the pickle asks for {name}, which is not a tensor; nothing of it was run",
                path=path,
                hint="only files of tensors are read: save the model's state_dict(), best as safetensors",
            )
    first = next((line.strip() for line in words.splitlines() if line.strip()), type(error).__name__)
    if "weights_only" in words or "Weights only" in words:
        first = next((line.strip() for line in words.splitlines()[1:] if line.strip()), first)
    return CorruptError(f"torch does not read the file: {first[:200]}", path=path, hint="fetch it again")


def _records(source: Source) -> dict[int, int]:
    """Length of each record of the zip file by the offset of its data.

    Raises RefusedError for one that is compressed, CorruptError for a damaged directory.
    """
    records = {}
    try:
        with zipfile.ZipFile(source.path) as file:
            for info in file.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    what = f"its record {info.filename!r} is compressed"
                    raise RefusedError(what, path=source.path, hint=_RESAVE)
                if info.filename.endswith(".pkl") and info.file_size > MAX_PICKLED_BYTES:
                    what = f"its pickle has {info.file_size} bytes; the limit is {MAX_PICKLED_BYTES}"
                    raise LimitError(what, path=source.path)
                if info.filename.endswith("/byteorder") and file.read(info) != b"little":
                    raise UnsupportedError("its numbers are big-endian", path=source.path, hint=_RESAVE)
                source.check(info.header_offset, 30, "the header of a record")
                header = source.read(info.header_offset, 30)
                start = info.header_offset + 30 + int.from_bytes(header[26:28], "little")
                records[start + int.from_bytes(header[28:30], "little")] = info.file_size
    except AprError:
        raise
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise CorruptError(f"not a sound zip file: {error}", path=source.path, hint="fetch it again") from error
    return records


def _checked_places(records: Mapping[int, int]) -> Places:
    def place_of(tensor: torch.Tensor) -> int | None:
        storage = tensor.untyped_storage()
        place = getattr(storage, "_checkpoint_offset", None)
        return place if isinstance(place, int) and records.get(place, -1) >= storage.nbytes() else None

    return place_of


class _Skim(io.RawIOBase):
    """A file that torch reads pickles from, and that passes over the values: only where they belong is kept."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source, self._at = source, 0
        self._places: dict[int, tuple[int, int]] = {}

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where the storage of the tensor lies."""
        storage = tensor.untyped_storage()
        place, n_bytes = self._places.get(storage.data_ptr(), (None, 0))
        if not storage.nbytes():
            return 0
        return place if place is not None and n_bytes >= storage.nbytes() else None

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def seekable(self) -> bool:
        """Torch goes back to the beginning."""
        return True

    def tell(self) -> int:
        """The place in the file."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Goes to a place."""
        self._at = offset + {0: 0, 1: self._at, 2: self._source.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, those of a pickle."""
        left = max(0, self._source.size - self._at)
        if size < 0 or size > left:
            size = left
        if size > MAX_PICKLED_BYTES:
            what = f"a piece of its pickle has {size} bytes; the limit is {MAX_PICKLED_BYTES}"
            raise LimitError(what, path=self._source.path)
        data = bytes(self._source.read(self._at, size))
        self._at += size
        return data

    def readline(self, size: int | None = -1) -> bytes:
        """The next line, which a pickle has for names."""
        start, line = self._at, b""
        while b"\n" not in line and (chunk := self.read(256)):
            line += chunk
        line = line[: line.find(b"\n") + 1 or len(line)]
        self._at = start + len(line)
        return line

    def readinto(self, buffer: Any) -> int:
        """Fills small buffers, which are lengths, and passes over the values of large ones."""
        view = memoryview(buffer)
        size = min(view.nbytes, max(0, self._source.size - self._at))
        if size:
            self._places[ctypes.addressof(ctypes.c_char.from_buffer(view))] = self._at, size
        if size and size <= _SMALL_READ:
            view[:size] = self._source.read(self._at, size)
        self._at += size
        return size


def _state_dict(found: object, path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors by name, and the names of what else there is."""
    import torch

    def is_weights(value: object) -> bool:
        return isinstance(value, Mapping) and any(isinstance(item, torch.Tensor) for item in value.values())

    outer: Mapping[Any, object] = found if isinstance(found, Mapping) else {}
    left: list[str] = []
    inner = next((key for key in _NESTED if is_weights(outer.get(key))), None)
    if inner is None and not is_weights(outer):
        raise RefusedError(
            "the pickle holds no state dict: no names with tensors",
            path=path,
            hint="save the model's state_dict() alone, best as safetensors",
        )
    if inner is not None:
        left = [str(key) for key in outer if key != inner]
        value = outer[inner]
        outer = value if isinstance(value, Mapping) else {}
    weights = {}
    for name, value in outer.items():
        if isinstance(value, torch.Tensor) and isinstance(name, str):
            weights[name] = value
        else:
            left.append(str(name))
    return weights, left


def _tensor(name: str, value: torch.Tensor, place_of: Places, source: Source) -> Tensor:
    dtype = _DTYPES.get(str(value.dtype))
    if value.is_sparse or value.is_quantized or dtype is None:
        kind = str(value.dtype).removeprefix("torch.")
        raise UnsupportedError(f"it is stored as {kind}", path=source.path, tensor=name, hint="save it as plain floats")
    try:
        n_name = len(name.encode())
    except UnicodeEncodeError as error:
        raise CorruptError("a tensor name holds a lone surrogate", path=source.path, tensor=name) from error
    if n_name > MAX_NAME_BYTES or value.dim() > MAX_NDIM:
        raise LimitError(f"its name or number of dims is beyond the limit, {MAX_NDIM} dims", path=source.path)
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        what = f"it is a view of its storage with strides {list(value.stride())}"
        raise RefusedError(what, path=source.path, tensor=name, hint="save it again with .contiguous()")
    shape = tuple(int(dim) for dim in value.shape)
    n_bytes = DTYPES[dtype].n_bytes(shape)
    place = place_of(value) if n_bytes else 0
    if place is None:
        raise CorruptError("the file has no place for its values", path=source.path, tensor=name, hint="fetch it again")
    offset = place + int(value.storage_offset()) * DTYPES[dtype].block_bytes if n_bytes else 0
    source.check(offset, n_bytes, "the tensor", name)
    return Tensor(name, dtype, shape, offset, n_bytes, source)


def warnings(left: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """What the user should know of what the files hold beside tensors, by file name."""
    for name, items in left.items():
        if items:
            yield f"{name} holds more than the weights, which is not converted: {first_few(items)}"
