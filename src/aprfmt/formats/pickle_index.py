"""Indexes torch.save files: `python -m aprfmt.formats.pickle_index` is the process that unpickles them.

The unpickler is Python's own; globals resolve only to placeholders for what torch.save writes, which compute nothing.
So torch is not needed, and weights are not read. The process limits on memory and time guard against what a pickle can
do without calls: nested tuples whose hash takes years, or a text of three gigabytes.

A zip file contains `NAME/data.pkl` and each storage as a record `NAME/data/KEY`; files from before torch 1.6 contain
five pickles (a number, a version, sizes, the object, the keys of the storages), followed by the storages, each after
its element count.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO

from aprfmt.errors import (
    AprError,
    CorruptError,
    LimitError,
    RefusedError,
    TruncatedError,
    UnsupportedError,
    storage_error,
)
from aprfmt.io.serving import serve
from aprfmt.limits import MAX_NAME_BYTES, MAX_NDIM, MAX_PICKLED_BYTES

NESTED = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training programs store the weights next to other state."""

MOST_BYTES = 8 << 20
"""The longest answer: names and shapes of sixty thousand tensors."""

_RESAVE = "rewrite it with torch.save(torch.load(PATH, weights_only=True), PATH)"
_AGAIN = "download it again"
_CONTIGUOUS = (
    "save it again: python -c \"import torch; f = 'FILE'; "
    'torch.save({k: v.contiguous() for k, v in torch.load(f, weights_only=True).items()}, f)"'
)

# Storage type -> torch's dtype name.
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64", "QInt8": "qint8", "QInt32": "qint32", "QUInt8": "quint8", "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4", "Untyped": "uint8",
}  # fmt: skip
_SIZES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "qint32": 4, "uint32": 4,
    "uint64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip
"""Bytes per element; 1 for others."""


class _Storage:
    """Bytes of the file.

    Attributes:
        key: its name in the file.
        dtype: of its elements, if the pickle states a type.
        start, n_bytes: the range that is meant.
    """

    __slots__ = ("dtype", "key", "n_bytes", "start")

    def __init__(self, key: str, dtype: str, start: int, n_bytes: int) -> None:
        self.key, self.dtype, self.start, self.n_bytes = key, dtype, start, n_bytes


class _Tensor:
    """A view of a storage: offset and strides in elements. `odd` describes anything but a plain tensor."""

    __slots__ = ("dtype", "odd", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: object, offset: object, shape: object, strides: object, dtype: str = "", odd: str = ""
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = shape, strides
        self.dtype, self.odd = dtype or getattr(storage, "dtype", ""), odd


class _Dict(dict[object, object]):
    """An OrderedDict with the attributes that modules set on theirs."""


class _Other:
    """A value other than a tensor: a dtype, a device."""

    def __init__(self, *_: object) -> None:
        pass


class _Global:
    """The placeholder of a global: a function to call, or the name of a dtype. It cannot be modified or subclassed."""

    __slots__ = ("call", "name")

    name: str
    call: Callable[..., object] | None

    def __init__(self, name: str, call: Callable[..., object] | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "call", call)

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("a global of a pickle cannot be changed")

    def __call__(self, *arguments: object) -> object:
        if self.call is None:
            raise TypeError(f"{self.name} is not a function")
        return self.call(*arguments)


def _tensor_2(storage: object, offset: object, shape: object, strides: object, *more: object) -> _Tensor:
    return _Tensor(storage, offset, shape, strides, odd=_bits(more[2:]))


def _tensor_3(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    grad: object,
    hooks: object,
    dtype: object,
    *more: object,
) -> _Tensor:
    return _Tensor(storage, offset, shape, strides, str(getattr(dtype, "name", "")), _bits(more))


def _bits(metadata: tuple[object, ...]) -> str:
    return (
        "conjugated or negated" if metadata and isinstance(metadata[0], Mapping) and any(metadata[0].values()) else ""
    )


def _odd(kind: str) -> Callable[..., _Tensor]:
    return lambda *_: _Tensor(None, 0, (), (), odd=kind)


def _parameter(data: object, *_: object) -> object:
    return data


_CALLS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _Dict, "collections.Counter": _Dict, "builtins.set": set, "builtins.complex": complex,
    "builtins.bytearray": _Other, "_codecs.encode": _Other, "torch.Size": tuple, "torch.device": _Other,
    "torch.Tensor": _Other, "torch.serialization._get_layout": _Other, "torch.nn.parameter.Parameter": _parameter,
    "torch._utils._rebuild_parameter": _parameter, "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor_2, "torch._utils._rebuild_tensor_v2": _tensor_2,
    "torch._utils._rebuild_tensor_v3": _tensor_3, "torch._utils._rebuild_sparse_tensor": _odd("sparse"),
    "torch._utils._rebuild_qtensor": _odd("quantized"), "torch._utils._rebuild_nested_tensor": _odd("nested"),
    "torch._utils._rebuild_wrapper_subclass": _odd("a subclass"),
    "torch._utils._rebuild_meta_tensor_no_storage": _odd("meta"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _odd("on another device"),
    "torch._utils._rebuild_device_tensor_from_numpy": _odd("on another device"),
    "torch._tensor._rebuild_from_type_v2": _odd("a subclass"),
}  # fmt: skip
_KINDS = ("float", "bfloat", "int", "uint", "complex", "bool", "bits", "qint", "quint", "per_")
"""Prefixes of torch's names of dtypes and quantization schemes."""


class _Unpickler(pickle.Unpickler):
    """Builds placeholders."""

    def find_class(self, module: str, name: str) -> _Global:
        """The placeholder of a global. Raises RefusedError for globals that torch.save does not write for tensors."""
        path = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if path in _CALLS:
            return _Global(path, _CALLS[path])
        plain = module.removesuffix(".cuda") if module != "torch.storage" else "torch"
        if plain == "torch" and name.endswith("Storage") and name.removesuffix("Storage") in _STORAGES:
            return _Global(_STORAGES[name.removesuffix("Storage")])
        if path.startswith("torch.") and path.count(".") == 1 and name.startswith(_KINDS):
            return _Global(name)
        raise RefusedError(
            f"the pickle needs {path}, which is not a tensor; nothing was executed",
            hint="only tensors are supported: save the model's state_dict(), preferably as safetensors",
        )

    def persistent_load(self, pid: Iterable[object]) -> _Storage:
        """A storage: ("storage", type, key, device, elements), in old files with (key, offset, elements) of a part."""
        what, kind, key, _, n_elements, *part = pid
        if what != "storage" or not isinstance(kind, _Global) or type(n_elements) is not int:
            raise CorruptError("it refers to something other than a storage", hint=_AGAIN)
        size = _SIZES.get(kind.name, 1)
        start, count = 0, n_elements
        if part and part[0] is not None:
            _, start, count = part[0] if isinstance(part[0], tuple) else (None, None, None)
        if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= n_elements:
            raise CorruptError("part of a storage is outside of the file", hint=_AGAIN)
        return _Storage(str(key), kind.name, start * size, count * size)


# --- the two containers ---


def _zip_names(path: str) -> list[str]:
    """The names of a zip file's records; none if the zip file is invalid."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return []


def _read_zip(path: str) -> tuple[object, dict[str, tuple[int, int]]]:
    """The object, and (offset, bytes) of each storage by its key."""
    places = {}
    with zipfile.ZipFile(path) as file, open(path, "rb") as raw:
        infos = file.infolist()
        pickled = next((info for info in infos if info.filename.endswith("/data.pkl")), None)
        if pickled is None:
            raise CorruptError("no data.pkl found", hint=_AGAIN)
        folder = pickled.filename.removesuffix("data.pkl")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED:
                raise RefusedError(f"its record {info.filename[:200]!r} is compressed", hint=_RESAVE)
            if info.filename == f"{folder}byteorder" and file.open(info).read(16) != b"little":
                raise UnsupportedError("it is big-endian", hint=_RESAVE)
            if info.filename.startswith(f"{folder}data/"):
                raw.seek(info.header_offset)
                header = raw.read(30)
                if len(header) < 30:
                    raise TruncatedError("it ends within the header of a record", offset=info.header_offset)
                start = info.header_offset + 30 + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
                places[info.filename.removeprefix(f"{folder}data/")] = start, info.file_size
        if pickled.file_size > MAX_PICKLED_BYTES:
            raise LimitError(f"its pickle has {pickled.file_size} bytes; the limit is {MAX_PICKLED_BYTES}")
        return _Unpickler(io.BytesIO(file.read(pickled)), encoding="utf-8").load(), places


def _read_old(path: str) -> tuple[object, dict[str, tuple[int, int]]]:
    with open(path, "rb") as file:
        _, _, system = (_Unpickler(file, encoding="utf-8").load() for _ in range(3))
        if not isinstance(system, Mapping) or system.get("little_endian") is not True:
            raise UnsupportedError("it is big-endian", hint=_RESAVE)
        storages: dict[str, _Storage] = {}
        found = _Old(file, storages).load()
        keys = _Unpickler(file, encoding="utf-8").load()
        at = file.tell()
        places: dict[str, tuple[int, int]] = {}
        for key in keys if isinstance(keys, list) else ():
            storage = storages.get(key)
            if storage is None:
                raise CorruptError(f"its storage {str(key)[:80]!r} has no dtype", hint=_AGAIN)
            file.seek(at)
            n_bytes = int.from_bytes(file.read(8), "little") * _SIZES.get(storage.dtype, 1)
            places[key] = at + 8, n_bytes
            at += 8 + n_bytes
    return found, places


class _Old(_Unpickler):
    """Collects the storages, whose sizes in the file are in elements of their own dtype."""

    def __init__(self, file: IO[bytes], storages: dict[str, _Storage]) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def persistent_load(self, pid: Iterable[object]) -> _Storage:
        storage = super().persistent_load(pid)
        self._storages[storage.key] = storage
        return storage


# --- the state dict in it ---


def _find_state_dict(found: object) -> tuple[dict[str, _Tensor], list[str]]:
    """The tensors of a state dict by name, and the names of all other entries.

    Unwraps at most one level, `{"model": state_dict, ...}`. Raises RefusedError.
    """

    def is_weights(value: object) -> bool:
        return isinstance(value, dict) and any(isinstance(item, _Tensor) for item in value.values())

    outer: dict[object, object] = found if isinstance(found, dict) else {}
    left: list[str] = []
    inner = next((key for key in NESTED if is_weights(outer.get(key))), None)
    if inner is None and not is_weights(outer):
        raise RefusedError(
            "the pickle is not a state dict of names to tensors",
            hint="save only the model's state_dict(), preferably as safetensors",
        )
    if inner is not None:
        left = [_text(key) for key in outer if key != inner]
        value = outer[inner]
        outer = value if isinstance(value, dict) else {}
    weights = {}
    for name, value in outer.items():
        if isinstance(value, _Tensor) and isinstance(name, str):
            weights[name] = value
        else:
            left.append(_text(name))
    return weights, left


def _text(key: object) -> str:
    return str(key)[:200] if isinstance(key, str | int | float) else type(key).__name__


def _sizes(numbers: object, tensor: str) -> list[int]:
    """`numbers`, if they are a sequence of integers from 0 to 2^62. Raises CorruptError."""
    found = [*numbers] if isinstance(numbers, tuple | list) else [-1]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in found):
        raise CorruptError("its shape and offset are not integers", tensor=tensor, hint=_AGAIN)
    return found


def _entry(name: str, value: _Tensor, places: Mapping[str, tuple[int, int]]) -> list[object]:
    """[name, torch's dtype, shape, offset in the file, bytes]. Raises AprError."""
    if value.odd:
        raise UnsupportedError(f"it is stored as {value.odd}", tensor=name, hint="save it as plain floats")
    try:
        n_name = len(name.encode())
    except UnicodeEncodeError as error:
        raise CorruptError("a tensor name contains a lone surrogate", tensor=name) from error
    storage = value.storage
    shape, strides, (offset,) = (_sizes(numbers, name) for numbers in (value.shape, value.strides, [value.offset]))
    if not isinstance(storage, _Storage):
        raise CorruptError("it has no storage", tensor=name, hint=_AGAIN)
    if n_name > MAX_NAME_BYTES or len(shape) > MAX_NDIM:
        raise LimitError(f"its name or number of dims exceeds the limit ({MAX_NDIM} dims)")
    if len(strides) != len(shape):
        raise CorruptError("the number of strides differs from the number of dims", tensor=name, hint=_AGAIN)
    sizes = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    if sizes[0] and any(
        dim != 1 and stride != sizes[i + 1] for i, (dim, stride) in enumerate(zip(shape, strides, strict=True))
    ):
        what = f"it is a strided view: strides {strides}"
        raise RefusedError(what, tensor=name, hint=_CONTIGUOUS)
    size = _SIZES.get(value.dtype, 1)
    n_bytes, at = sizes[0] * size, storage.start + offset * size
    if not n_bytes:
        return [name, value.dtype, shape, 0, 0]
    place, there = places.get(storage.key, (0, 0))
    if at + n_bytes > storage.start + storage.n_bytes or at + n_bytes > there:
        raise CorruptError("its values are outside of the file", tensor=name, hint=_AGAIN)
    return [name, value.dtype, shape, place + at, n_bytes]


# --- the process ---


def _index(path: str, *, is_zip: bool) -> object:
    """{"tensors": entries, "left": names}. Raises AprError."""
    try:
        found, places = _read_zip(path) if is_zip else _read_old(path)
        weights, left = _find_state_dict(found)
        tensors = [_entry(name, value, places) for name, value in weights.items()]
    except (AprError, MemoryError):
        raise
    except OSError as error:
        raise storage_error(error, path) from error
    except (EOFError, pickle.UnpicklingError) as error:
        raise CorruptError(f"its pickle is damaged: {error or 'it is truncated'}", hint=_AGAIN) from error
    except zipfile.BadZipFile as error:
        raise CorruptError(f"not a valid zip file: {error}", hint=_AGAIN) from error
    except Exception as error:  # anything the unpickler makes of a damaged or hostile file
        what = f"its pickle is damaged: {type(error).__name__}: {error}"
        raise CorruptError(what, hint=_AGAIN) from error
    if sum(64 + 6 * len(str(row[0])) for row in tensors) + 7 * sum(map(len, left)) > MOST_BYTES:
        raise LimitError(f"it holds {len(tensors)} tensors and {len(left)} other values")
    return {"tensors": tensors, "left": left}


def _answer(request: list[object]) -> object:
    """The reply to ["index", path, whether it is a zip file] or ["is_pickle", path]."""
    call, path, *more = request
    try:
        if call == "is_pickle":
            return {"ok": any(name.endswith("/data.pkl") for name in _zip_names(str(path)))}
        return {"ok": _index(str(path), is_zip=more[0] is True)}
    except AprError as error:
        return {"error": [type(error).__name__, error.message, error.hint], "tensor": error.tensor}


if __name__ == "__main__":
    serve(_answer)
