"""States of runs on disk: tensors and JSON metadata, each with a checksum that is verified on every read.

A safetensors file. Its metadata contains, under "aprtrain", JSON {"facts", "tensors": {name: [dtype, shape, CRC-32]}},
and under "crc32" the checksum of that text: the file's header must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from aprfmt.errors import ChecksumError, CorruptError, RunError
from aprfmt.formats import safetensors
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io import jsonx
from aprfmt.io.crc import crc32_of, crc32_of_range
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file
from aprfmt.model import Model
from aprfmt.types import JsonObject

_TEXT, _SUM = "aprtrain", "crc32"
_KINDS = {torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64"}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a host tensor, without a copy if it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).toreadonly()


def out_tensor(name: str, dtype: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> OutTensor:
    """A host tensor as an output tensor; `shape` is that of the values if `tensor` has bytes."""
    data = tensor_bytes(tensor)
    return OutTensor(name, dtype, shape or tuple(tensor.shape), len(data), lambda: [data])


class State(Mapping[str, Tensor]):
    """The tensors of an open file, each read on demand: together they may exceed the memory.

    Attributes:
        path: of the file.
        text: the JSON covered by the checksum.
        facts: JSON data about the run.
        forms: dtype and shape of each tensor.
    """

    def __init__(self, model: Model) -> None:
        """Raises CorruptError if the header contradicts its checksums."""
        self.path = model.path
        self._tensors = model.tensors
        if not {_TEXT, _SUM} <= set(model.metadata):
            raise CorruptError("not a training state file, or one without checksums", path=self.path)
        self.text: str = model.metadata[_TEXT]
        if model.metadata[_SUM] != _sum_of(self.text):
            raise ChecksumError("checksum mismatch of its metadata", path=self.path)
        value = jsonx.loads(self.text.encode())
        facts, table = (value.get(key) if isinstance(value, dict) else None for key in ("facts", "tensors"))
        if not isinstance(facts, dict) or not isinstance(table, dict):
            raise CorruptError("the file lacks the metadata of a run", path=self.path)
        self.facts: JsonObject = facts
        self.forms = {name: (tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}
        self._sums = {name: row[2] for name, row in table.items() if isinstance(row, list) and len(row) == 3}
        found = {name: [t.dtype, list(t.shape), self._sums.get(name)] for name, t in self._tensors.items()}
        if found != table:
            wrong = next(name for name in (*table, *found) if table.get(name) != found.get(name))
            raise CorruptError("the file lacks the tensor that its metadata describes", path=self.path, tensor=wrong)

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor into memory of its own. Raises ChecksumError if it differs from what was saved."""
        tensor = self._tensors[name].torch()
        self._compare(name, crc32_of(tensor_bytes(tensor)))
        return tensor

    def check(self, name: str) -> None:
        """Verifies a tensor's checksum without loading it. Raises ChecksumError."""
        stored = self._tensors[name]
        self._compare(name, crc32_of_range(stored.source, stored.offset, stored.offset + stored.n_bytes))

    def _compare(self, name: str, found: int) -> None:
        if found != self._sums[name]:
            raise ChecksumError("the tensor's checksum is wrong", path=self.path, tensor=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _sum_of(text: str) -> str:
    return f"{crc32_of(text.encode('utf-8', 'surrogatepass')):08x}"


def save_state(tensors: Mapping[str, Tensor], facts: Mapping[str, object], path: Path) -> None:
    """Writes host tensors and JSON facts as one file, replacing an existing one.

    Before publication it is opened and compared. Raises RunError if it differs, StorageError.
    """
    outs = {name: out_tensor(name, _KINDS[tensor.dtype], tensor) for name, tensor in tensors.items()}
    table = {name: [out.dtype, list(out.shape), crc32_of(tensor_bytes(tensors[name]))] for name, out in outs.items()}
    text = jsonx.dumps({"facts": facts, "tensors": table})
    layout = FileLayout(path.name, safetensors.layout(list(outs.values()), {_TEXT: text, _SUM: _sum_of(text)}))

    def check(file: str) -> None:
        try:
            with open_state(Path(file)) as state:
                for name in state:
                    state.check(name)
        except CorruptError as error:
            raise RunError("the saved state on disk differs from the live one", tensor=error.tensor) from error
        if state.text != text:
            raise RunError("the saved metadata on disk differs from the live metadata")

    write_file(str(path), layout, WriteOptions(force=True), check)


@contextmanager
def open_state(path: Path) -> Iterator[State]:
    """Opens a file of `save_state` for the duration of the block; tensors are read one by one.

    Raises CorruptError and its kinds for a file that is damaged or of another kind, NotFoundError, StorageError.
    """
    with safetensors.open_model(path) as model:
        yield State(model)
