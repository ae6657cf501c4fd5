"""Teacher files: a teacher's top-k log-probabilities at each labelled position, so that training needs no teacher.

A folder of safetensors files, PART-NNNNN-of-NNNNN; docs/teacher-files.md describes their tensors and metadata. A
sequence is found by its hash, whatever its number in a run, and its checksum is compared on every read.

Shape suffixes: P labelled positions of a sequence, K saved ids per position, R temperatures.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aprfmt.errors import ChecksumError, CorruptError, NotFoundError, RefusedError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.formats.safetensors import layout, read_shard
from aprfmt.io.crc import crc32_of
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file
from aprfmt.io.source import Source
from aprfmt.texts.sequences import Windows
from aprfmt.texts.shards import PARTS
from aprfmt.types import Array, construct

FORMAT = "aprtrain-teacher/2"
_SLACK = 1e-3
"""How far the probabilities of a position may be from a sum of 1."""

_PER_NAT = 2048
"""Stored log-probabilities are multiples of its inverse: an error of at most 0.00025 nats, down to -32."""


@dataclass(frozen=True, slots=True)
class TeacherHeader:
    """What all files of a folder share.

    Attributes:
        teacher, sha256: name of the model's file, or of its source, and a hash of its content.
        architecture, parameters: of the model; "" and 0 if unknown.
        engine: what computed it.
        tokenizer: SHA-256 of the tokenizer that read the text, as in the header of token shards.
        seq_len: tokens of a window.
        n_ids: size of the vocabulary; all ids are below it.
        k: ids known at a position.
        temperatures: at which the residual mass is stored; the first is 1.
    """

    teacher: str
    sha256: str
    architecture: str
    parameters: int
    engine: str
    tokenizer: str
    seq_len: int
    n_ids: int
    k: int
    temperatures: tuple[float, ...]

    @property
    def high_bits(self) -> int:
        """Bits of an id beyond the 16 of `ids`: 0, 1, 2, 4 or 8."""
        return next(bits for bits in (0, 1, 2, 4, 8) if self.n_ids <= 1 << (16 + bits) or bits == 8)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each tensor of `_TENSORS`."""
        return 1, self.k, -(-self.k * self.high_bits // 8), self.k, len(self.temperatures), 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a position."""
        return sum(n * _NUMPY[dtype][0] for n, dtype in zip(self.widths, _TENSORS.values(), strict=True))

    def to_metadata(self) -> dict[str, str]:
        """As strings; numbers as JSON."""
        return {name: v if isinstance(v, str) else json.dumps(v) for name, v in asdict(self).items()}


class Answer(NamedTuple):
    """One sequence: its labelled positions and the teacher's log-probabilities there.

    Attributes:
        positions_P: positions in the sequence, int32, ascending.
        ids_PK: the most likely ids, int32, the most likely first.
        logprobs_PK: their log-probabilities at temperature 1, float32.
        rest_PR: probability of all other ids at each temperature, float32.
        label_P: log-probability of the label, float32.
    """

    positions_P: Array
    ids_PK: Array
    logprobs_PK: Array
    residual_PR: Array
    label_P: Array


def answer_of(columns: Iterable[tuple[Array, ...]], facts: TeacherHeader) -> Answer:
    """Concatenates the parts of a sequence, each with the fields of Answer in any dtype."""
    none, k, r = np.zeros(0), facts.k, len(facts.temperatures)
    empty = (none, none.reshape(0, k), none.reshape(0, k), none.reshape(0, r), none)
    joined = (np.concatenate(column) for column in zip(empty, *columns, strict=True))
    return Answer(*(v.astype(dtype) for v, dtype in zip(joined, ("<i4", "<i4", "<f4", "<f4", "<f4"), strict=True)))


_TENSORS = {
    "positions": "I32", "ids": "U16", "ids_high": "U8", "logprobs": "U16", "rest": "F32", "label_logprobs": "F32",
}  # fmt: skip
_NUMPY = {"I32": (4, "<i4"), "F32": (4, "<f4"), "I64": (8, "<i8"), "U8": (1, "<u1"), "U16": (2, "<u2")}

_WIDE = ("ids", "ids_high", "logprobs", "rest")


def _stored(answer: Answer, facts: TeacherHeader) -> tuple[Array, ...]:
    """The columns of a file: ids without their high bits, those bits, multiples of 1 / _PER_NAT."""
    ids, bits = answer.ids_PK.astype(np.uint32), facts.high_bits
    high_PW = np.zeros((len(ids), facts.widths[2]), np.uint8)
    for slot in range(8 // bits if bits else 0):
        part_PW = (ids[:, slot :: 8 // bits] >> 16) << (slot * bits)
        high_PW[:, : part_PW.shape[1]] |= part_PW.astype(np.uint8)
    nats = np.rint(answer.logprobs_PK * np.float32(-_PER_NAT)).clip(0, 65535)
    return answer.positions_P, ids & 0xFFFF, high_PW, nats, answer.residual_PR, answer.label_P


def _restored(columns: Sequence[Array], facts: TeacherHeader) -> Answer:
    positions_P, low_PK, high_PW, nats_PK, residual_PR, label_P = columns
    ids_PK, bits = low_PK.astype(np.int32), facts.high_bits
    for slot in range(8 // bits if bits else 0):
        part_PK = ids_PK[:, slot :: 8 // bits]
        part_PK |= (high_PW[:, : part_PK.shape[1]].astype(np.int32) >> (slot * bits) & ((1 << bits) - 1)) << 16
    return Answer(positions_P, ids_PK, nats_PK.astype(np.float32) / np.float32(-_PER_NAT), residual_PR, label_P)


def hashes_of(windows: Windows, ids: Iterable[int]) -> list[bytes]:
    """SHA-256 of each sequence: its tokens, its labels, the lengths of its documents' pieces, each int32."""
    return [
        hashlib.sha256(np.concatenate([r.tokens_NT[0], r.labels_NT[0], r.lengths[0]]).astype("<i4").tobytes()).digest()
        for r in (windows.rows([i]) for i in ids)
    ]


def shard_path(folder: Path, part: str, number: int, count: int) -> Path:
    """Path of the file `number`, from 0, of a part."""
    return folder / f"{part}-{number + 1:05}-of-{count:05}.safetensors"


def write_shard(path: Path, facts: TeacherHeader, hashes: Sequence[bytes], answers: Sequence[Answer]) -> None:
    """Writes some windows as one file, which replaces another. Raises StorageError."""
    stored = [_stored(answer, facts) for answer in answers]
    columns = [np.concatenate(column) for column in zip(*stored, strict=True)]
    tensors: list[tuple[str, str, Array]] = [
        ("windows", "U8", np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)),
        ("counts", "I64", np.array([len(answer.positions_P) for answer in answers])),
        ("sums", "I64", np.array([_sum(each) for each in stored])),
        *((name, dtype, column) for (name, dtype), column in zip(_TENSORS.items(), columns, strict=True)),
    ]
    out = []
    for name, dtype, values in tensors:
        data = values.astype(_NUMPY[dtype][1]).tobytes()
        out.append(OutTensor(name, dtype, values.shape, len(data), lambda data=data: [data]))  # type: ignore[misc]
    metadata = {"format": FORMAT, **facts.to_metadata()}
    write_file(str(path), FileLayout(path.name, layout(out, metadata)), WriteOptions(force=True))


def _sum(stored: Sequence[Array]) -> int:
    columns = zip(stored, _TENSORS.values(), strict=True)
    return crc32_of(*(column.astype(_NUMPY[dtype][1]).tobytes() for column, dtype in columns))


class TeacherShard:
    """One file, of which everything but the answers was read.

    Attributes:
        path, facts: of the file.
        hashes: of its sequences.
    """

    def __init__(self, path: Path) -> None:
        """Raises CorruptError and its kinds, UnsupportedError, StorageError."""
        self.path = path
        with ExitStack() as stack:
            shard = read_shard(path, stack)
            self.facts = _facts_of(path, shard.metadata)
            found = {t.name: (t.dtype, t.shape) for t in shard.tensors}
            n, rows = ((found[name][1] or (0,))[0] if name in found else 0 for name in ("windows", "ids"))
            shapes = [
                (rows, n) if name in _WIDE else (rows,) for name, n in zip(_TENSORS, self.facts.widths, strict=True)
            ]
            wanted = {"windows": ("U8", (n, 32)), "counts": ("I64", (n,)), "sums": ("I64", (n,))}
            wanted |= {name: (dtype, shape) for (name, dtype), shape in zip(_TENSORS.items(), shapes, strict=True)}
            for name in wanted:
                if found.get(name) != wanted[name]:
                    raise CorruptError(
                        f"it has {found.get(name)}, but its metadata requires {wanted[name]}", path=path, tensor=name
                    )
            self._offsets = {t.name: t.offset for t in shard.tensors}
            read = {t.name: shard.source.read(t.offset, t.n_bytes) for t in shard.tensors if t.name not in _TENSORS}
        self.hashes = [read["windows"][i : i + 32] for i in range(0, 32 * n, 32)]
        self._counts, self._sums = (np.frombuffer(read[name], "<i8") for name in ("counts", "sums"))
        if (self._counts < 0).any() or (self._counts > self.facts.seq_len).any() or self._counts.sum() != rows:
            raise CorruptError(
                "the positions of its sequences do not add up to those of the file", path=path, tensor="counts"
            )
        self._starts = np.cumsum(self._counts) - self._counts

    def read(self, number: int) -> Answer:
        """Reads a sequence. Raises ChecksumError, CorruptError for values that are not probabilities, StorageError."""
        start, n = int(self._starts[number]), int(self._counts[number])
        columns = []
        with Source.open(self.path) as source:
            for (name, dtype), width in zip(_TENSORS.items(), self.facts.widths, strict=True):
                each, kind = _NUMPY[dtype]
                data = source.read(self._offsets[name] + each * width * start, each * width * n)
                values = np.frombuffer(data, kind)
                columns.append(values.reshape(n, width) if name in _WIDE else values)
        if _sum(columns) != self._sums[number]:
            raise ChecksumError(f"sequence {number} of the file was modified", path=self.path, hint=AGAIN)
        answer = _restored(columns, self.facts)
        if fault := fault_of(answer, self.facts):
            raise CorruptError(f"sequence {number} of the file: {fault}", path=self.path, hint=AGAIN)
        return answer


AGAIN = "delete the file; apr teacher with the same options writes it again"
"""The hint for a damaged file."""


def _facts_of(path: Path, metadata: dict[str, str]) -> TeacherHeader:
    if metadata.get("format") != FORMAT:
        raise CorruptError(
            f"not a teacher file ({FORMAT})", path=path, hint="docs/teacher-files.md describes the format"
        )
    try:
        values = {
            f.name: metadata[f.name] if f.type == "str" else json.loads(metadata[f.name]) for f in fields(TeacherHeader)
        }
        facts = construct(TeacherHeader, values | {"temperatures": tuple(map(float, values["temperatures"]))})
        is_good = (
            0 < facts.k <= facts.n_ids <= 1 << 24
            and facts.k < 1 << 20
            and 1 < facts.seq_len < 1 << 31
            and facts.temperatures[0] == 1
        )
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        is_good = False
    if not is_good:
        raise CorruptError("its metadata lacks keys that docs/teacher-files.md requires", path=path)
    return facts


def fault_of(answer: Answer, facts: TeacherHeader) -> str | None:
    """Why these cannot be a teacher's probabilities; None if they can."""
    logprobs, rest, ids = answer.logprobs_PK.astype(np.float64), answer.residual_PR, np.sort(answer.ids_PK, 1)
    ends = np.concatenate([[-1], answer.positions_P, [facts.seq_len]])
    with np.errstate(all="ignore"):
        total = np.exp(logprobs).sum(1) + rest[:, 0]
        far = np.abs(total - 1)
        rising = np.diff(rest[:, np.argsort(facts.temperatures)], axis=1)
        faults = {
            "non-finite value": not all(np.isfinite(v).all() for v in (logprobs, rest, answer.label_P)),
            "positions do not ascend within the sequence": (np.diff(ends) < 1).any(),
            "the log-probabilities of a position do not descend, or that of its label is above 0": (
                (np.diff(logprobs, axis=1) > 0).any() or (answer.label_P > _SLACK).any()
            ),
            "duplicate token id at a position": (np.diff(ids, axis=1) == 0).any(),
            f"a token id is not below {facts.n_ids}": (ids[:, :1] < 0).any() or (ids[:, -1:] >= facts.n_ids).any(),
            (
                f"the probabilities of a position add up to {total[far.argmax()] if len(far) else 0:.4g}, "
                "residual mass included"
            ): ((rest < 0).any() or (rest > 1 + _SLACK).any() or (far > _SLACK).any()),
            "the residual mass decreases as the temperature increases": (rising < -_SLACK).any(),
        }
    return next((words for words, is_so in faults.items() if is_so), None)


class Places(NamedTuple):
    """Sequences, and for some of them the file with their answer and its number there."""

    windows: Windows
    at: dict[int, tuple[TeacherShard, int]]


class TeacherFiles:
    """A folder of teacher files.

    Attributes:
        folder: its path.
        facts: what the files share.
    """

    def __init__(self, folder: Path) -> None:
        """Reads everything but the answers. Raises NotFoundError, RefusedError (a file is missing), CorruptError."""
        self.folder = folder
        names = {path.name for path in folder.glob("*-of-*.safetensors")}
        if not names:
            raise NotFoundError("no teacher files found", path=folder, hint="apr teacher F --data D -o DIR")
        self._places: dict[bytes, tuple[TeacherShard, int]] = {}
        shards = []
        for part in PARTS:
            own = sorted(name for name in names if name.startswith(f"{part}-"))
            count = re.fullmatch(rf"{part}-\d{{5,}}-of-(\d{{5,9}})\.safetensors", own[0]) if own else None
            n = int(count[1]) if count else 1
            wanted = (shard_path(folder, part, i, n) for i in range(n))  # a name can claim a billion
            if (missing := next((path.name for path in wanted if path.name not in names), None)) is not None:
                raise RefusedError(
                    f"{missing} is missing", path=folder, hint="run apr teacher with the same options to resume"
                )
            shards += [TeacherShard(shard_path(folder, part, i, n)) for i in range(n)]
        self.facts = shards[0].facts
        for shard in shards:
            if shard.facts != self.facts:
                raise RefusedError(f"its teacher or text differs from that of {shards[0].path.name}", path=shard.path)
            self._places.update({window: (shard, i) for i, window in enumerate(shard.hashes)})

    def check(self, tokenizer: str, seq_len: int, k: int | None, temperature: float) -> None:
        """Refuses a run that these files do not match: by its tokenizer's digest, sequences, --top-k, --temperature."""
        facts = self.facts
        known = ", ".join(f"{t:g}" for t in facts.temperatures)
        for is_wrong, message, hint in (
            (facts.tokenizer != tokenizer, "the teacher files were made with a different tokenizer",
                "apr teacher F --student S --data D -o DIR tokenizes with the student's tokenizer"),
            (facts.seq_len != seq_len, f"the teacher files contain sequences of {facts.seq_len} tokens, not {seq_len}",
                f"--seq-len {facts.seq_len}"),
            (k is not None and k > facts.k, f"the teacher files store {facts.k} ids per position, not {k}",
                f"--top-k {facts.k}, or write them again with apr teacher --top-k {k}"),
            (temperature not in facts.temperatures,
                f"the teacher files store the residual mass at temperature {known}, not at {temperature:g}",
                f"--temperature {min(facts.temperatures, key=lambda t: abs(t - temperature)):g}, or apr teacher "
                f"--temperature {temperature:g}"),
        ):  # fmt: skip
            if is_wrong:
                raise RefusedError(message, path=self.folder, hint=hint)

    def bind(self, windows: Windows, ids: Iterable[int], what: str) -> Places:
        """Locates the sequences with these numbers. Raises RefusedError if one is missing."""
        places = Places(windows, {})
        for i in ids:
            place = self._places.get(hashes_of(windows, [i])[0])
            if place is None:
                raise RefusedError(
                    f"sequence {i} of the {what} data is not in the teacher files: text, split or loss mask differ",
                    path=self.folder,
                    hint="use the --data and --held-out of apr teacher, or the tokens folder of its output",
                )
            places.at[i] = place
        return places
