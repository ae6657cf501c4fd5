"""How one tensor's bytes travel: read in pieces, move rows, change dtype. Nothing here holds a whole tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aprfmt.arch.transforms import INVERSE, apply_move, move_group
from aprfmt.codecs.convert import OverflowCount, recode
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import CHUNK_BYTES, source_chunks
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """A reversible row move of arch.transforms over `n_heads` heads."""

    name: str
    n_heads: int

    def inverse(self) -> Move:
        """The move that undoes this one."""
        return Move(INVERSE[self.name], self.n_heads)


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """A source tensor under its Hugging Face name; `move` brings its rows into Hugging Face order."""

    name: str
    source: Tensor
    move: Move | None = None

    @property
    def dtype(self) -> str:
        """Stored dtype, as in the source."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape."""
        return self.source.shape

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""
        return self.source.n_bytes

    def chunks(self) -> Iterator[Buffer]:
        """The stored bytes with rows in Hugging Face order (decoded to F32 first where rows cannot be moved)."""
        return iter(self.out(self.name).chunks())

    def out(
        self,
        name: str,
        dtype: str | None = None,
        move: Move | None = None,
        overflow: OverflowCount | None = None,
    ) -> OutTensor:
        """This tensor as the output tensor `name` of `dtype`, its rows moved from HF order by `move`.

        Raises RefusedError where the rows do not divide into the heads of a move.
        """
        target = find_dtype(dtype or self.dtype).name
        moves = tuple(m for m in (self.move, move) if m is not None)
        if len(moves) == 2 and moves[0] == moves[1].inverse():
            moves = ()
        for step in moves:
            move_group(step.name, self.shape[0] if self.shape else 0, step.n_heads)
        if 0 in self.shape:
            moves = ()
        n_bytes = self.n_bytes if target == self.dtype else DTYPES[target].n_bytes(self.shape)
        return OutTensor(name, target, self.shape, n_bytes, lambda: self._produce(target, moves, overflow))

    def _produce(
        self, target: str, moves: tuple[Move, ...], overflow: OverflowCount | None
    ) -> Iterator[Buffer]:
        tensor = self.source
        if moves and not rows_can_move(tensor):
            float_row_bytes = 4 * _row_elements(self.shape)

            def read_floats() -> Iterator[Buffer]:
                floats = recode(self.dtype, "F32", self.shape, lambda: _read(tensor, 1))
                return self._moved(floats, moves, float_row_bytes)

            return (
                read_floats() if target == "F32" else recode("F32", target, self.shape, read_floats, overflow)
            )
        row_bytes = tensor.n_bytes // max(1, self.shape[0]) if self.shape else tensor.n_bytes

        def read() -> Iterator[Buffer]:
            if not moves:
                return _read(tensor, 1)
            return self._moved(_read(tensor, row_bytes), moves, row_bytes)

        return read() if target == self.dtype else recode(self.dtype, target, self.shape, read, overflow)

    def _moved(self, chunks: Iterable[Buffer], moves: tuple[Move, ...], row_bytes: int) -> Iterator[Buffer]:
        for move in moves:
            head_rows = self.shape[0] // move.n_heads
            chunks = _apply(move, chunks, row_bytes, head_rows)
        return iter(chunks)


def rows_can_move(tensor: Tensor) -> bool:
    """Whether the stored bytes are whole rows: true of plain dtypes and of GGML blocks, not of AprQ4 and AprQ8."""
    return (
        DTYPES[tensor.dtype].kind != "aprq"
        and bool(tensor.shape)
        and tensor.n_bytes % max(1, tensor.shape[0]) == 0
    )


def _row_elements(shape: tuple[int, ...]) -> int:
    n = 1
    for dim in shape[1:]:
        n *= dim
    return n


def _read(tensor: Tensor, multiple: int) -> Iterator[Buffer]:
    return iter(source_chunks(tensor.source, tensor.offset, tensor.n_bytes, multiple))


def _apply(move: Move, chunks: Iterable[Buffer], row_bytes: int, head_rows: int) -> Iterator[Buffer]:
    for chunk in regroup(chunks, head_rows * row_bytes):
        yield apply_move(move.name, chunk, row_bytes, head_rows)


def regroup(chunks: Iterable[Buffer], multiple: int) -> Iterator[Buffer]:
    """The same bytes in pieces whose lengths are multiples of `multiple`, about CHUNK_BYTES long."""
    step = max(multiple, CHUNK_BYTES // multiple * multiple)
    pending = bytearray()
    for chunk in chunks:
        if not pending and len(chunk) % multiple == 0:
            yield chunk
            continue
        pending += chunk
        while len(pending) >= step:
            yield bytes(pending[:step])
            del pending[:step]
    if pending:
        yield bytes(pending)
