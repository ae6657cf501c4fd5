"""PyTorch pickles (`.bin`, `.pt`, `.pth`): read like other containers, from an index made by another process.

`formats.pickle_index` unpickles without torch, within limits of memory and time, and returns names, dtypes, shapes and
offsets. It reads no weights, and its answer is checked here against the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import UnknownFormatError, UnsupportedError
from aprfmt.formats.local import on_this_disk
from aprfmt.formats.safetensors import WeightsFile
from aprfmt.io.child import Service
from aprfmt.io.source import Source
from aprfmt.limits import MAX_PICKLE_SECONDS, PICKLE_MEMORY_BYTES
from aprfmt.model import Tensor
from aprfmt.text import first_few

SUFFIXES = (".bin", ".pt", ".pth")

_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The number at the start of files from before torch 1.6, pickled."""

_BESIDE = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
"""Name prefixes of training state files without weights."""

_DTYPES = {row.torch: row.name for row in DTYPES.values() if row.torch is not None}
_MOST_BYTES = 16 << 20
_service = Service(
    "aprfmt.formats.pickle_index", seconds=MAX_PICKLE_SECONDS, memory=PICKLE_MEMORY_BYTES, most_bytes=_MOST_BYTES
)


def is_pickle(head: bytes, source: Source | None) -> bool:
    """Whether a file that begins with `head` was written by torch.save."""
    if head.startswith(_ZIP):
        return b"/data.pkl" in head or (source is not None and _ask(source.path, bool, "is_pickle"))
    return head.startswith(_OLD)


def holds_weights(name: str) -> bool:
    """Whether a file of that name in a folder may contain the model's weights."""
    return name.endswith(SUFFIXES) and not name.rpartition("/")[2].startswith(_BESIDE)


def read_shard(path: Path, stack: ExitStack) -> WeightsFile:
    """Opens one file; `stack` closes it. The shard's `left` lists what it contains besides tensors.

    Raises RefusedError (a call in the pickle, tensors that are not contiguous parts of a storage), CorruptError and its
    kinds (LimitError: it takes too much memory or time), UnsupportedError, NotFoundError, StorageError.
    """
    source = stack.enter_context(Source.open(path))
    head = source.read(0, min(source.size, len(_OLD)))
    is_zip = head.startswith(_ZIP)
    if not is_zip and head != _OLD:
        raise UnknownFormatError(
            "not a torch.save file", path=path, hint="expected weights in safetensors, or a PyTorch state dict"
        )
    index = _ask(source.path, dict, "index", is_zip)
    tensors = [_tensor(source, *row) for row in index["tensors"]]
    tensors.sort(key=lambda tensor: (tensor.offset, -tensor.n_bytes))
    return WeightsFile(source, {}, tensors, tuple(index["left"]))


_T = TypeVar("_T")


def _ask(path: str, kind: type[_T], call: str, *arguments: object) -> _T:
    (local,) = on_this_disk([path])
    request = [call, os.path.abspath(local), *arguments]
    hint = "save only the model's state_dict(), preferably as safetensors"
    return _service.value(request, kind, "reading its pickle", path=path, hint=hint)


def _tensor(source: Source, name: str, torch_dtype: str, shape: list[int], offset: int, n_bytes: int) -> Tensor:
    dtype = _DTYPES.get(torch_dtype)
    if dtype is None or DTYPES[dtype].n_bytes(tuple(shape)) != n_bytes:
        what = f"it is stored as {torch_dtype}"
        raise UnsupportedError(what, path=source.path, tensor=name, hint="save it as plain floats")
    source.check(offset, n_bytes, "the tensor", name)
    return Tensor(name, dtype, tuple(shape), offset, n_bytes, source)


def warnings(left: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Warnings about what the files contain besides tensors, by file name."""
    for name, items in left.items():
        if items:
            yield f"{name} contains more than weights; not converted: {first_few(items)}"
