"""The C library of llama.cpp's tensor types (libggml-base), out of the package llama-cpp-python, through ctypes.

The package itself is not imported: that would load all of llama.cpp. No function is called before its symbol was
found and, by the caller's known answer, checked (`Library.agrees`); libraries of any version that agree are used.
Calls release the GIL. Misused, the library ends the process, so callers check arguments before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SUFFIX = {
    "win32": ("ggml-base.dll", "libggml-base.dll"),
    "darwin": ("libggml-base.dylib", "libggml-base.so"),
}

RowFunction = Callable[[int, int, int], None]
"""(address of the source, address of the target, number of values)"""


class Library:
    """A loaded libggml-base.

    Attributes:
        path: its file.
        version: what it calls itself, with its commit.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be loaded, AttributeError where it is no libggml-base."""
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._verdicts: dict[str, bool] = {}
        self._locks: dict[str, threading.Lock] = {}
        dll, number = self._dll, ctypes.c_int
        dll.ggml_type_name.argtypes, dll.ggml_type_name.restype = [number], ctypes.c_char_p
        dll.ggml_blck_size.argtypes, dll.ggml_blck_size.restype = [number], ctypes.c_int64
        dll.ggml_type_size.argtypes, dll.ggml_type_size.restype = [number], ctypes.c_size_t
        dll.ggml_quantize_init.argtypes, dll.ggml_quantize_init.restype = [number], None
        dll.ggml_quantize_requires_imatrix.argtypes = [number]
        dll.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        dll.ggml_validate_row_data.argtypes = [number, ctypes.c_void_p, ctypes.c_size_t]
        dll.ggml_validate_row_data.restype = ctypes.c_bool
        dll.ggml_quantize_chunk.argtypes = [
            number, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
        ]  # fmt: skip
        dll.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.version = f"{self._text('ggml_version')} ({self._text('ggml_commit')})"

    def _text(self, symbol: str) -> str:
        function = getattr(self._dll, symbol, None)
        if function is None:
            return "unknown"
        function.argtypes, function.restype = [], ctypes.c_char_p
        return (function() or b"unknown").decode("ascii", "replace")

    def has(self, symbol: str) -> bool:
        """Whether the library exports the function."""
        return hasattr(self._dll, symbol)

    def row(self, symbol: str) -> RowFunction | None:
        """The exported function (const void *source, void *target, int64_t values), None where there is none.

        All of `dequantize_row_<type>`, `ggml_fp16_to_fp32_row`, `ggml_fp32_to_bf16_row` ... are of this form.
        """
        function = getattr(self._dll, symbol, None)
        if function is None:
            return None
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        return function  # type: ignore[no-any-return]

    def geometry(self, ggml_id: int) -> tuple[str, int, int]:
        """(name, values in a block, bytes of a block) of a type that the library has; others read beyond a table."""
        name = self._dll.ggml_type_name(ggml_id) or b""
        size = self._dll.ggml_blck_size(ggml_id), self._dll.ggml_type_size(ggml_id)
        return name.decode("ascii", "replace"), *size

    def needs_weights(self, ggml_id: int) -> bool:
        """Whether `quantize` ends the process without weights."""
        return bool(self._dll.ggml_quantize_requires_imatrix(ggml_id))

    def quantize(
        self, ggml_id: int, source: int, target: int, rows: int, cols: int, weights: int | None
    ) -> int:
        """The number of bytes written at `target`: `rows` of `cols` float32 values of `source`, encoded.

        `weights` is the address of `cols` float32 values. All are addresses, all values finite.
        """
        self._dll.ggml_quantize_init(ggml_id)
        return int(self._dll.ggml_quantize_chunk(ggml_id, source, target, 0, rows, cols, weights))

    def is_valid(self, ggml_id: int, data: int, n_bytes: int) -> bool:
        """Whether llama.cpp takes the blocks at address `data`: no scale is NaN or infinite. Else it prints why."""
        return bool(self._dll.ggml_validate_row_data(ggml_id, data, n_bytes))

    def agrees(self, key: str, check: Callable[[], bool]) -> bool:
        """What `check` says, asked once for each `key`; that takes seconds where tables are made first."""
        if key not in self._verdicts:
            with self._locks.setdefault(key, threading.Lock()):
                if key not in self._verdicts:
                    self._verdicts[key] = check()
        return self._verdicts[key]


def library() -> Library | None:
    """The library of the installed llama-cpp-python; None where there is none (`absence` says why)."""
    found = _find()
    return found if isinstance(found, Library) else None


def absence() -> str:
    """Why `library` is None, half a sentence; empty where it is not."""
    found = _find()
    return found if isinstance(found, str) else ""


@cache
def _find() -> Library | str:
    try:
        spec = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return "llama-cpp-python is not installed"
    names = _SUFFIX.get(sys.platform, ("libggml-base.so",))
    paths = [Path(folder, "lib", name) for folder in spec.submodule_search_locations for name in names]
    for path in paths:
        if path.is_file():
            try:
                return Library(path)
            except (OSError, AttributeError) as error:
                return f"{path} cannot be used: {error}"
    return f"the installed llama-cpp-python has no {names[0]}"
