"""Chooses the implementation of a codec: numpy (the reference), ggml (libggml-base) or torch. All yield equal bytes.

libggml-base is the C library of llama.cpp's tensor types, called through ctypes. It comes with llama-cpp-python, and
separately with libggml-python. Neither package is imported: that would load all of llama.cpp. Functions are called only
after their symbol was found and, by the caller's known answer, checked (`GgmlLibrary.agrees`); libraries of any version
that agree are used. Even so a rare block may differ between versions: of IQ1_M 4 in 1,024 between 0.20.2 and 0.25.3, of
the others none. Calls release the GIL. Misuse makes the library abort the process, so callers check arguments before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from aprfmt.errors import MissingDependencyError, UsageError

VARIABLE = "APR_BACKEND"
"""Environment variable that forces a backend."""

_NAMES = ("numpy", "ggml", "torch")


def forced() -> str | None:
    """The backend requested by the environment variable, None if unset. Raises UsageError if unknown."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in _NAMES:
        raise UsageError(f"{VARIABLE} is {name!r}", hint="one of " + ", ".join(_NAMES))
    return name


def order(*names: str) -> tuple[str, ...]:
    """The backends among `names` to try, in the given order.

    A forced backend leaves only itself, or numpy, the reference, if it has no implementation. Presence is checked only
    if a backend is forced: its absence raises MissingDependencyError.
    """
    wanted = forced()
    if wanted is None:
        return names
    if wanted == "ggml" and not any(libraries()):
        raise MissingDependencyError(f"{VARIABLE}=ggml: {absence()}", hint="pip install libggml-python")
    if wanted == "torch" and not has_torch():
        raise MissingDependencyError(f"{VARIABLE}=torch: torch is not installed", hint="pip install torch")
    return (wanted,) if wanted in names else tuple(name for name in names if name == "numpy")


def has_torch() -> bool:
    """Whether torch is installed, without importing it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


# --- libggml-base ---

_SUFFIX = {"win32": ("ggml-base.dll", "libggml-base.dll"), "darwin": ("libggml-base.dylib", "libggml-base.so")}

PACKAGES = {"llama_cpp": "llama-cpp-python", "libggml": "libggml-python"}
"""Packages that contain a libggml-base, and their names on PyPI."""

_FOLDERS = ("lib", "lib64", "bin")

_TYPE, _ADDRESS, _COUNT = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_PROTOTYPES: dict[str, tuple[type[object] | None, ...]] = {
    "ggml_type_name": (ctypes.c_char_p, _TYPE),
    "ggml_blck_size": (_COUNT, _TYPE),
    "ggml_type_size": (ctypes.c_size_t, _TYPE),
    "ggml_quantize_init": (None, _TYPE),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, _TYPE),
    "ggml_quantize_chunk": (ctypes.c_size_t, _TYPE, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS),
}
"""Functions called by name: the type of the result, then of the arguments."""

RowFunction = Callable[[int, int, int], None]
"""(address of the source, address of the target, number of values)"""


class GgmlLibrary:
    """A loaded libggml-base.

    Attributes:
        path: its file.
        version: as the library reports it, with its commit.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be loaded, AttributeError if it is not libggml-base."""
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._verdicts: dict[str, bool] = {}
        self._locks: dict[str, threading.Lock] = {}
        for name, (result, *arguments) in _PROTOTYPES.items():
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments
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
        """The exported function (const void *source, void *target, int64_t values), or None.

        `dequantize_row_<type>`, `ggml_fp16_to_fp32_row`, `ggml_fp32_to_bf16_row` ... all have this signature.
        """
        function = getattr(self._dll, symbol, None)
        if function is None:
            return None
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        return function  # type: ignore[no-any-return]

    def geometry(self, ggml_id: int) -> tuple[str, int, int]:
        """(name, values per block, bytes per block) of a type that the library has; others read beyond a table."""
        name = self._dll.ggml_type_name(ggml_id) or b""
        size = self._dll.ggml_blck_size(ggml_id), self._dll.ggml_type_size(ggml_id)
        return name.decode("ascii", "replace"), *size

    def needs_weights(self, ggml_id: int) -> bool:
        """Whether `quantize` aborts the process without weights."""
        return bool(self._dll.ggml_quantize_requires_imatrix(ggml_id))

    def quantize(self, ggml_id: int, source: int, target: int, rows: int, cols: int, weights: int | None) -> int:
        """Encodes `rows` of `cols` float32 values; returns the number of bytes written at `target`.

        `weights` points to `cols` float32 values. All arguments are addresses, all values finite.
        """
        self._dll.ggml_quantize_init(ggml_id)
        return int(self._dll.ggml_quantize_chunk(ggml_id, source, target, 0, rows, cols, weights))

    def agrees(self, key: str, check: Callable[[], bool]) -> bool:
        """The result of `check`, computed once per `key`; it takes seconds if tables are built first."""
        if key not in self._verdicts:
            with self._locks.setdefault(key, threading.Lock()):
                if key not in self._verdicts:
                    self._verdicts[key] = check()
        return self._verdicts[key]


def libraries() -> Iterator[GgmlLibrary]:
    """The installed libraries, each opened on demand; `absence` tells why none is found.

    That of llama-cpp-python comes first: if the process has already loaded another libggml of the same name, the
    system's loader gives that one to llama_cpp, whose import then fails for missing symbols.
    """
    for package in PACKAGES:
        found = _find(package)
        if isinstance(found, GgmlLibrary):
            yield found


def absence() -> str:
    """Why no library is available, half a sentence; empty if one is."""
    found = [_find(package) for package in PACKAGES]
    reasons = [reason for reason in found if isinstance(reason, str)]
    return "; ".join(reasons) if len(reasons) == len(found) else ""


@cache
def _find(package: str) -> GgmlLibrary | str:
    """The library in a package, else why none was found."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return f"{PACKAGES[package]} is not installed"
    names = _SUFFIX.get(sys.platform, ("libggml-base.so",))
    for place in spec.submodule_search_locations:
        for path in (Path(place, folder, name) for folder in _FOLDERS for name in names):
            if path.is_file():
                try:
                    return GgmlLibrary(path)
                except (OSError, AttributeError) as error:
                    return f"{path} cannot be used: {error}"
    return f"the installed {PACKAGES[package]} lacks {names[0]}"
