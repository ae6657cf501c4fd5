"""Observes a loaded model while it is computed: its weights in memory, and the effect of its layers on the hidden
states.

Weights are reordered in place, so that a wrong order is found without a second copy of the model.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.llama.capi import EVAL_CALLBACK, LlamaLibrary
from aprfmt.llama.engine import EngineError, LayoutError, StateSketch
from aprfmt.llama.importance import GgmlTensor, plain_name

if TYPE_CHECKING:
    import numpy.typing as npt

    from aprfmt.llama.importance import GgmlPointer

_F32 = 0
_STATES, _EMBEDDED = "l_out-", ("inp_embd", "embd", "inp_scaled", "inp_norm")
"""llama.cpp's names of the hidden states after a layer, and before the first."""


PROBES = 8
"""Numbers that a sketch keeps of each token's hidden state."""


def sketch(states: npt.NDArray[np.float32]) -> StateSketch:
    """Hidden states [tokens, hidden] in little room: a digest of their bytes, and random projections of each.

    The projections are onto PROBES fixed vectors of +-1 / sqrt(hidden). The norm of the difference of two sketches is
    that of the states, but for a factor near 1 (Johnson and Lindenstrauss). The first token is left out: its states are
    often a thousand times as large as the others'.
    """
    some = np.ascontiguousarray(states[1:] if len(states) > 1 else states, np.float32)
    signs = np.random.default_rng(some.shape[1]).integers(0, 2, (some.shape[1], PROBES)) * 2.0 - 1.0
    probes = some.astype(np.float64) @ (signs / np.sqrt(PROBES))
    return {
        "digest": hashlib.blake2b(some.tobytes(), digest_size=16).hexdigest(),
        "probes": [[float(f"{value:.6g}") for value in row] for row in probes],
    }


class Watcher:
    """Finds weights by name and captures hidden states.

    Attributes:
        callback: called by llama.cpp for each operation of a graph.
        failure: an exception of the callback, which cannot raise.
    """

    def __init__(self, library: LlamaLibrary) -> None:
        self._c = library
        library.declare("ggml_op_name", c_char_p, [c_int32])
        library.declare("ggml_get_name", c_void_p, [POINTER(GgmlTensor)])
        library.declare("ggml_nbytes", c_size_t, [POINTER(GgmlTensor)])
        library.declare("ggml_backend_buffer_is_host", c_bool, [c_void_p])
        self._weights: dict[str, GgmlPointer] = {}
        self._states: dict[int, npt.NDArray[np.float32]] | None = None
        self.failure: Exception | None = None
        self.callback = EVAL_CALLBACK(self._called)

    def _called(self, pointer: int, ask: bool, _: object) -> bool:
        try:
            return self._see(ctypes.cast(pointer, POINTER(GgmlTensor)), ask)
        except Exception as error:
            self.failure = self.failure or error
            return not ask

    def _see(self, pointer: GgmlPointer, ask: bool) -> bool:
        tensor = pointer.contents
        if not self._weights and self._c.ggml_get_name(pointer) != ctypes.addressof(tensor) + GgmlTensor.name.offset:
            raise LayoutError("this build of llama.cpp has a different ggml_tensor layout")
        if ask:
            for source in tensor.src:
                if source and self._c.ggml_op_name(source.contents.op) == b"NONE":
                    self._weights[plain_name(source.contents.name)] = source
        layer = self._layer(tensor.name.decode(errors="replace"))
        if self._states is None or layer is None:
            return not ask
        if not ask:
            if tensor.type != _F32 or not self._c.ggml_backend_buffer_is_host(tensor.buffer):
                raise EngineError("the hidden states are not in host memory")
            memory = (ctypes.c_uint8 * self._c.ggml_nbytes(pointer)).from_address(tensor.data)
            shape, strides = (tensor.ne[1], tensor.ne[0]), (tensor.nb[1], tensor.nb[0])
            self._states[layer] = np.ndarray(shape, np.float32, memory, strides=strides).copy()
        return True

    @staticmethod
    def _layer(name: str) -> int | None:
        if name in _EMBEDDED:
            return -1
        number = name.removeprefix(_STATES)
        return int(number) if number != name and number.isdigit() else None

    def begin(self) -> None:
        """Captures the hidden states of the next graph."""
        self._states = {}

    def states(self) -> dict[int, npt.NDArray[np.float32]]:
        """The hidden states after each layer of the graph since `begin`, [tokens, hidden]; -1: the embeddings.

        Raises the callback's exception, if any.
        """
        states, self._states = self._states or {}, None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return states

    def effects(self) -> dict[int, float]:
        """How far each layer moves the states of the graph since `begin`, relative to their size; by layer.

        Raises the callback's exception, if any.
        """
        states = self.states()
        found = {}
        for layer, after in states.items():
            before = states.get(layer - 1)
            if before is not None and before.shape == after.shape:
                # The first token's states are often a thousand times as large as the others'.
                some = slice(1, None) if len(after) > 1 else slice(None)
                size = np.linalg.norm(before[some], axis=1)
                moved = np.linalg.norm(after[some] - before[some], axis=1)
                found[layer] = float(np.median(moved / np.maximum(size, 1e-30)))
        return found

    def names(self) -> list[str]:
        """Weights that the graphs so far were computed with."""
        return [*self._weights]

    def replace(self, name: str, path: str) -> None:
        """Overwrites a weight in memory with the bytes of a file, which has as many."""
        pointer = self._weights[name]
        tensor, n_bytes = pointer.contents, self._c.ggml_nbytes(pointer)
        if not self._c.ggml_backend_buffer_is_host(tensor.buffer):
            raise EngineError(f"{name} is not in host memory")
        memory = (ctypes.c_uint8 * n_bytes).from_address(tensor.data)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != n_bytes or file.readinto(memory) != n_bytes:
                raise EngineError(f"{name} has {n_bytes} bytes")

    def reorder(self, name: str, first: int, n_heads: int, size: int, halves: bool) -> None:
        """Reorders the rows of heads of a weight in memory, or the values of a bias.

        Args:
            name: of the weight.
            first: its first row that is reordered.
            n_heads: how many heads follow from there on.
            size: rows of a head.
            halves: from neighbours (0, 1), (2, 3), ... to halves (0, 2, ..., 1, 3, ...); else the other way.
        """
        pointer = self._weights[name]
        tensor = pointer.contents
        if not self._c.ggml_backend_buffer_is_host(tensor.buffer):
            raise EngineError(f"{name} is not in host memory")
        flat = tensor.ne[1] == 1
        rows, step = (tensor.ne[0], tensor.nb[0]) if flat else (tensor.ne[1], tensor.nb[1])
        if first + n_heads * size > rows or rows * step != self._c.ggml_nbytes(pointer):
            raise EngineError(f"{name} has {rows} rows")
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (rows * step)).from_address(tensor.data)).reshape(rows, step)
        heads = memory[first : first + n_heads * size]
        pairs = heads.reshape(n_heads, size // 2, 2, step) if halves else heads.reshape(n_heads, 2, size // 2, step)
        heads[:] = pairs.swapaxes(1, 2).reshape(heads.shape).copy()
