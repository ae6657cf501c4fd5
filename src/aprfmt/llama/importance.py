"""Collects importance matrices: sums of the squared inputs of each weight matrix, while llama.cpp computes.

It observes every product with a weight: dense ones (MUL_MAT), and those of experts (MUL_MAT_ID), where a third tensor
selects the matrices of each token.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.llama.capi import EVAL_CALLBACK, LlamaLibrary
from aprfmt.llama.engine import EngineError, LayoutError
from aprfmt.llama.moments import MomentSums
from aprfmt.types import Array

if TYPE_CHECKING:
    import numpy.typing as npt

    GgmlPointer = ctypes._Pointer["GgmlTensor"]

_F32, _I32 = 0, 26
_DIMS, _SOURCES = 4, 10


class GgmlTensor(Structure):
    """ggml_tensor, as far as it is read here."""


GgmlTensor._fields_ = [
    ("type", c_int32), ("buffer", c_void_p), ("ne", c_int64 * _DIMS), ("nb", c_size_t * _DIMS), ("op", c_int32),
    ("op_params", c_int32 * 16), ("flags", c_int32), ("src", POINTER(GgmlTensor) * _SOURCES), ("view_src", c_void_p),
    ("view_offs", c_size_t), ("data", c_void_p), ("name", c_char * 64),
]  # fmt: skip


@dataclass(slots=True)
class ActivationSums:
    """The sums of squared inputs of one weight [matrices, columns], and the number of rows per matrix."""

    squares: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


class Collector:
    """Collects sums by the name of the weight.

    Args:
        library: llama.cpp.
        output: whether to include the output head, which llama-imatrix excludes by default.
        moments: where to add the second moments of dense products, too.

    Attributes:
        callback: called by llama.cpp for each operation of a graph.
        sums: by the name of the weight.
        moments: as given.
        failure: an exception of the callback, which cannot raise.
        is_cut: whether the end of the last graph, after its last product, was not computed.
    """

    def __init__(self, library: LlamaLibrary, output: bool, moments: MomentSums | None = None) -> None:
        self._c, self._output, self.moments = library, output, moments
        library.declare("ggml_op_name", ctypes.c_char_p, [c_int32])
        library.declare("ggml_get_name", c_void_p, [POINTER(GgmlTensor)])
        library.declare("ggml_nbytes", c_size_t, [POINTER(GgmlTensor)])
        library.declare("ggml_backend_buffer_is_host", c_bool, [c_void_p])
        library.declare("ggml_backend_tensor_get", None, [POINTER(GgmlTensor), c_void_p, c_size_t, c_size_t])
        self.sums: dict[str, ActivationSums] = {}
        self.failure: Exception | None = None
        self._kinds: dict[int, bytes] = {}
        self._last: tuple[int, Array] | None = None
        self._first_of: dict[int, str] = {}
        self._checked = self._open = self.is_cut = False
        self._taken = 0
        self._total: int | None = None
        self.callback = EVAL_CALLBACK(self._called)

    def begin(self) -> None:
        """Starts collecting from a new text; cached addresses become invalid."""
        self._last, self._open, self.is_cut, self._taken = None, True, False, 0
        self._first_of.clear()

    def end(self) -> None:
        """Stops collecting. Raises the callback's exception, if any.

        All texts have the same length, so their graphs have the same number of products.
        """
        self._open = False
        if self._total is None and self.failure is None:
            self._total = self._taken
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _called(self, pointer: int, ask: bool, _: object) -> bool:
        try:
            return self._see(ctypes.cast(pointer, POINTER(GgmlTensor)), ask)
        except Exception as error:
            self.failure = self.failure or error
            return False

    def _see(self, pointer: GgmlPointer, ask: bool) -> bool:
        """With `ask`, whether the result is wanted; otherwise collects it and returns whether to continue."""
        if not self._open:
            return not ask
        tensor = pointer.contents
        if not self._checked:
            if self._c.ggml_get_name(pointer) != ctypes.addressof(tensor) + GgmlTensor.name.offset:
                raise LayoutError("this build of llama.cpp has a different ggml_tensor layout")
            self._checked = True
        kind = self._kinds.get(tensor.op)
        if kind is None:
            kind = self._kinds.setdefault(tensor.op, self._c.ggml_op_name(tensor.op))
        if kind not in (b"MUL_MAT", b"MUL_MAT_ID"):
            return not ask
        weight, given = tensor.src[0].contents, tensor.src[1]
        name = plain_name(weight.name)
        if ask:
            return given.contents.type == _F32 and (
                name.startswith("blk.") or (self._output and name == "output.weight")
            )
        if kind == b"MUL_MAT_ID":
            self._routed(name, weight, given, tensor.src[2])
        else:
            self._dense(name, weight, given)
        self._taken += 1
        self.is_cut = self._taken == self._total
        return not self.is_cut  # what follows is the output head, which nobody reads

    def _dense(self, name: str, weight: GgmlTensor, given: GgmlPointer) -> None:
        squares = self._squares(given)  # [ne3, ne2, columns]
        outer, inner = weight.ne[3], weight.ne[2]
        found = self._entry(name, outer * inner, squares.shape[-1], n_counts=1)
        for i, j in np.ndindex(squares.shape[:2]):
            found.squares[(i % outer) * inner + j % inner] += squares[i, j]
        rows = given.contents.ne
        found.counts += rows[1] * rows[2] * rows[3] // (outer * inner)
        if self.moments is not None and outer * inner == 1:
            address = ctypes.addressof(given.contents)
            first = self._first_of.setdefault(address, name)
            values = self._values(given, np.float32).reshape(-1, squares.shape[-1])
            self.moments.add(name, values, first if first != name else None)

    def _squares(self, given: GgmlPointer) -> Array:
        """The sums of squares over the rows; cached, since queries, keys and values share their input."""
        address = ctypes.addressof(given.contents)
        if self._last is not None and self._last[0] == address:
            return self._last[1]
        values = self._values(given, np.float32)
        sums: Array = np.einsum("abij,abij->abj", values, values)
        if not np.isfinite(sums).all():
            raise EngineError(f"the model computes NaN or infinite activations ({given.contents.name.decode()})")
        self._last = address, sums
        return sums

    def _routed(self, name: str, weight: GgmlTensor, given: GgmlPointer, routes: GgmlPointer) -> None:
        ids = self._values(routes, np.int32)[0, 0]  # [tokens, experts used]
        values = self._values(given, np.float32)[0]  # [tokens, 1 or experts used, columns]
        n_experts = weight.ne[2]
        found = self._entry(name, n_experts, values.shape[-1], n_counts=n_experts)
        values = np.broadcast_to(values, (*ids.shape, values.shape[-1]))
        order = np.argsort(ids, axis=None, kind="stable")
        experts, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        if experts.size and not 0 <= experts[0] <= experts[-1] < n_experts:
            raise EngineError(f"a token is routed to expert {experts[-1]}, but the layer has {n_experts} ({name})")
        tokens, slots = np.divmod(order, ids.shape[1])
        for expert, start, end in zip(experts, starts, [*starts[1:], order.size], strict=True):
            some = values[tokens[start:end], slots[start:end]]
            sums = np.einsum("ij,ij->j", some, some)
            if not np.isfinite(sums).all():
                raise EngineError(f"the model computes NaN or infinite activations ({name}, expert {expert})")
            found.squares[expert] += sums
            found.counts[expert] += end - start

    def _entry(self, name: str, n_matrices: int, columns: int, n_counts: int) -> ActivationSums:
        found = self.sums.get(name)
        if found is None:
            found = ActivationSums(np.zeros((n_matrices, columns)), np.zeros(n_counts, np.int64))
            self.sums[name] = found
        if found.squares.shape != (n_matrices, columns):
            raise EngineError(f"{name} gets inputs of different sizes: {columns} and {found.squares.shape[1]} values")
        return found

    def _values(self, pointer: GgmlPointer, dtype: type[np.generic]) -> Array:
        """The values of a tensor [ne3, ne2, ne1, ne0], without a copy if they are in host memory."""
        tensor = pointer.contents
        if tensor.type != (_F32 if dtype is np.float32 else _I32):
            raise EngineError(f"{tensor.name.decode()} has type {tensor.type}")
        n_bytes = self._c.ggml_nbytes(pointer)
        if self._c.ggml_backend_buffer_is_host(tensor.buffer):
            memory = (ctypes.c_uint8 * n_bytes).from_address(tensor.data)
        else:
            memory = (ctypes.c_uint8 * n_bytes)()
            self._c.ggml_backend_tensor_get(pointer, memory, 0, n_bytes)
        return np.ndarray(tuple(tensor.ne[::-1]), dtype, memory, strides=tuple(tensor.nb[::-1]))


def plain_name(raw: bytes) -> str:
    """The name of a weight: a copy on another device is called `DEVICE#name#number`."""
    parts = raw.decode().split("#")
    return parts[1] if len(parts) > 1 else parts[0]
