"""Importance matrices: computed by llama.cpp on text, or put together of several."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from aprfmt import formats
from aprfmt.errors import CorruptError, RefusedError, UnsupportedError, UsageError
from aprfmt.formats.imatrix import DEFAULT_CHUNK, OLD_SUFFIX, ImatrixEntry, ImatrixSums, add_sums, file_of, read_sums
from aprfmt.formats.second_moments import CollectedMoments, moments_file
from aprfmt.io.pipe import FileLayout, Literal, StartProgress, WriteOptions, write_file
from aprfmt.io.sink import check_target
from aprfmt.io.source import exists
from aprfmt.io.temporary import scratch_folder
from aprfmt.llama.client import Llama, encoder_pooling
from aprfmt.llama.engine import MOMENT_COLUMNS
from aprfmt.running.generate import check_reads_text, metadata_of
from aprfmt.running.token_chunks import token_chunks, with_bos
from aprfmt.text import plural
from aprfmt.types import PathLike

STATE_SUFFIX = ".state"
SAVE_SECONDS = 60.0
"""How much work a run that is killed may lose."""


@dataclass(slots=True)
class ImatrixReport:
    """The result of `imatrix` or `merge_imatrix`.

    Attributes:
        output: the file; legacy format if it ends in .dat.
        sources: the model, or the merged importance matrices.
        datasets: names of the texts.
        entries: number of weights with statistics.
        chunks, chunk_size: number of chunks of text, and tokens per chunk.
        tokens: number of processed tokens; 0 for merged matrices.
        resumed: chunks processed by an interrupted earlier run.
        unused: experts that no token was routed to, by name of their weights.
        second_moments: the file with the second moments of the inputs, if one was requested.
        engine: the package that provides llama.cpp.
        seconds: wall time.
        warnings: warnings for the user.
    """

    output: str
    sources: list[str]
    datasets: list[str]
    entries: int
    chunks: int
    chunk_size: int
    tokens: int = 0
    resumed: int = 0
    unused: dict[str, list[int]] = field(default_factory=dict)
    second_moments: str | None = None
    engine: str | None = None
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """The object of `apr imatrix --json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ImatrixRequest:
    """What decides over an importance matrix, beside the text.

    Attributes:
        gguf: the model, in a form that llama.cpp loads.
        name: the model as given, which errors name.
        model: another name when the model has changed.
        chunk_size: tokens of a piece of text.
        chunks: at most so many pieces; None: all.
        output: whether the output head gets an entry too.
        parse_special: whether the names of special tokens in the text mean those.
        n_threads, gpu_layers: as for Llama.
        second_moments: the file for the second moments of the inputs, too.
    """

    gguf: str
    name: str
    model: str = ""
    chunk_size: int = DEFAULT_CHUNK
    chunks: int | None = None
    output: bool = False
    parse_special: bool = False
    n_threads: int = 0
    gpu_layers: int = 0
    second_moments: str | None = None


def compute(
    wanted: ImatrixRequest,
    text: Iterable[str],
    datasets: Sequence[str],
    target: str,
    *,
    inputs: Sequence[str] = (),
    resume: bool = False,
    plan: bool = False,
    force: bool = False,
    progress: StartProgress | None = None,
) -> ImatrixReport:
    """Computes an importance matrix of `text` and writes it to `target`.

    What is computed lies beside the target every minute, as `target` + STATE_SUFFIX, until it is complete.

    Args:
        wanted: what decides over the matrix.
        text: all of it, in parts.
        datasets: names of the text.
        target: the file to write.
        inputs: files that it must not be, beside the model's GGUF.
        resume: go on from the state of an earlier run.
        plan: only count chunks.
        force: replace the target.
        progress: called with the number of tokens to compute; returns a function to call as they are computed.

    Raises:
        RefusedError: the target is an input, the text is too short, or `resume` finds the state of another run.
        UnsupportedError: the model has no products that are looked at.
        RunError: llama.cpp refuses the file, dies, or computes NaN.
    """
    started = time.monotonic()
    check_target(target, [wanted.gguf, *inputs], force or plan)
    if wanted.second_moments is not None:
        check_target(wanted.second_moments, [wanted.gguf, target, *inputs], force or plan)
    check_reads_text(metadata_of(wanted.gguf), wanted.name)
    pooling, n_bytes = encoder_pooling(wanted.gguf)
    importance = "output" if wanted.output else "layers"
    with (
        scratch_folder("imatrix") as scratch,
        Llama(
            wanted.gguf,
            name=wanted.name,
            n_ctx=wanted.chunk_size,
            pooling=pooling,
            n_bytes=n_bytes,
            n_threads=wanted.n_threads,
            gpu_layers=wanted.gpu_layers,
            importance=importance,
            moments=scratch if wanted.second_moments is not None else None,
        ) as llama,
    ):
        chunks = _chunks(llama, text, wanted)
        if not chunks:
            raise RefusedError(
                f"the text is too short for an importance matrix: fewer than {wanted.chunk_size} tokens",
                path=datasets[0] if datasets else None,
                hint="add text with --data (100,000 words are usual), or use a smaller --chunk-size",
            )
        if plan:
            return _report(ImatrixSums({}, tuple(datasets), len(chunks), wanted.chunk_size), target, [wanted.name])
        state = _State(target + STATE_SUFFIX, scratch, _identity(wanted, chunks))
        done = state.load(llama) if resume else 0
        if not done:
            # A worker that cannot use some instructions dies here, where nothing is lost.
            llama.embed("a") if pooling else llama.generate("a", 1)
        advance = progress(len(chunks) * wanted.chunk_size) if progress is not None else None
        if advance is not None and done:
            advance(done * wanted.chunk_size, "resumed")
        saved = time.monotonic()
        for number, ids in enumerate(chunks[done:], done + 1):
            found = llama.collect(ids)
            if not found["weights"]:
                raise UnsupportedError(
                    "llama.cpp uses none of the model's layer weights", path=wanted.name, hint="apr inspect FILE"
                )
            if advance is not None:
                advance(wanted.chunk_size, f"chunk {number:,} of {len(chunks):,}")
            if time.monotonic() - saved >= SAVE_SECONDS and number < len(chunks):
                state.save(llama, number)
                saved = time.monotonic()
        sums = ImatrixSums(state.entries(llama), tuple(datasets), len(chunks), wanted.chunk_size)
        engine = llama.engine
        if wanted.second_moments is not None:
            write_moments(llama, scratch, datasets, wanted.second_moments, force=force)
    write_file(target, file_of(sums, os.path.basename(target)), WriteOptions(force=force))
    state.remove()
    report = _report(sums, target, [wanted.name])
    report.tokens, report.resumed, report.engine = len(chunks) * wanted.chunk_size, done, engine
    report.second_moments = wanted.second_moments
    report.seconds = time.monotonic() - started
    return report


def write_moments(llama: Llama, folder: str, datasets: Sequence[str], target: str, *, force: bool) -> None:
    """Writes the second moments that the worker has collected in `folder`."""
    inputs: dict[int, CollectedMoments] = {}
    for name, (number, columns, tokens) in llama.moments().items():
        starts = range(0, columns, MOMENT_COLUMNS)
        blocks = [
            (os.path.join(folder, f"{number}.{i}"), min(MOMENT_COLUMNS, columns - first))
            for i, first in enumerate(starts)
        ]
        known = inputs.setdefault(number, CollectedMoments((), blocks, tokens))
        inputs[number] = replace(known, weights=(*known.weights, name))
    layout = moments_file([*inputs.values()], datasets, os.path.basename(target))
    write_file(target, layout, WriteOptions(force=force))


def merge(files: Sequence[PathLike], target: str, *, plan: bool = False, force: bool = False) -> ImatrixReport:
    """Adds importance matrices of one model. Raises RefusedError where they are of different ones."""
    started = time.monotonic()
    names = [formats.path_text(file, "file") for file in files]
    if len(names) < 2:
        raise UsageError("--merge needs two importance matrices or more")
    if (folder := next(filter(os.path.isdir, names), None)) is not None:
        raise UsageError(
            "a folder is not an importance matrix",
            path=folder,
            hint=f"apr imatrix {folder} --data TEXT -o OUT computes one",
        )
    check_target(target, names, force or plan)
    sums = add_sums([(name, read_sums(name)) for name in names])
    if not plan:
        write_file(target, file_of(sums, os.path.basename(target)), WriteOptions(force=force))
    report = _report(sums, target, names)
    report.seconds = time.monotonic() - started
    return report


def _report(sums: ImatrixSums, target: str, sources: list[str]) -> ImatrixReport:
    unused = {
        name: [int(i) for i in (entry.counts == 0).nonzero()[0]]
        for name, entry in sorted(sums.entries.items())
        if (entry.counts == 0).any()
    }
    report = ImatrixReport(
        target, sources, [*sums.datasets], len(sums.entries), sums.chunks, sums.chunk_size, unused=unused
    )
    report.warnings = remarks(sums, target)
    return report


def remarks(sums: ImatrixSums, target: str) -> list[str]:
    """What a user should know of an importance matrix."""
    warnings = []
    names = [name for name, entry in sorted(sums.entries.items()) if (entry.counts == 0).any()]
    if names:
        n = sum(int((sums.entries[name].counts == 0).sum()) for name in names)
        first = int((sums.entries[names[0]].counts == 0).argmax())
        warnings.append(
            f"no token reached {plural(n, 'expert weight')}, such as expert {first} of {names[0]}: quantization "
            f"will weigh their columns equally; use more text, or more varied text"
        )
    if sums.chunks and sums.chunks * sums.chunk_size < _FEW_TOKENS:
        warnings.append(
            f"{sums.chunks * sums.chunk_size:,} tokens are few for an importance matrix; 50,000 or more are usual"
        )
    if names and target.lower().endswith(OLD_SUFFIX):
        warnings.append("the legacy format has no expert counts")
    return warnings


_FEW_TOKENS = 10_000


# --- text ---


def _chunks(llama: Llama, text: Iterable[str], wanted: ImatrixRequest) -> list[list[int]]:
    """The chunks to evaluate, each with the BOS token in place of its first one."""
    found = token_chunks(llama, text, wanted.chunk_size, wanted.chunks, parse_special=wanted.parse_special)
    return [with_bos(llama, ids) for ids in found]


# --- what a killed run leaves ---


def _identity(wanted: ImatrixRequest, chunks: list[list[int]]) -> dict[str, object]:
    import hashlib

    return {
        "model": wanted.model,
        "text": hashlib.sha256(json.dumps(chunks).encode()).hexdigest(),
        "chunk_size": wanted.chunk_size,
        "output": wanted.output,
    }


_DIFFERENT = {
    "model": "the model has changed since",
    "text": "its text differs",
    "chunk_size": "its chunk size differs",
    "output": "only one of the two includes the output head",
}


class _State:
    """What is computed so far, beside the target."""

    def __init__(self, path: str, scratch: str, identity: dict[str, object]) -> None:
        self._path, self._identity = path, identity
        self._scratch = str(Path(scratch, "collected.npz"))

    def load(self, llama: Llama) -> int:
        """Puts the state of an earlier run into the worker; how many chunks it has. Raises RefusedError."""
        import numpy as np

        if not exists(self._path):
            return 0
        try:
            with open(self._path, "rb") as file, np.load(file) as arrays:
                header = json.loads(arrays["header"].tobytes())
                found = {name: arrays[name] for name in arrays if name != "header"}
            done, identity = int(header["chunks"]), dict(header["identity"])
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise CorruptError(
                f"the state of the earlier run cannot be read: {error}",
                path=self._path,
                hint="delete it and start again",
            ) from None
        for key, what in _DIFFERENT.items():
            if identity.get(key) != self._identity[key]:
                raise RefusedError(
                    f"the earlier run cannot be resumed: {what}",
                    path=self._path,
                    hint="run without --resume to start again",
                )
        np.savez(self._scratch, **found)
        llama.load_collected(self._scratch)
        return done

    def save(self, llama: Llama, chunks: int) -> None:
        """Writes what the worker has collected."""
        import numpy as np

        llama.save_collected(self._scratch)
        header = json.dumps({"chunks": chunks, "identity": self._identity}).encode()
        memory = io.BytesIO()
        with np.load(self._scratch) as arrays:
            np.savez(memory, header=np.frombuffer(header, np.uint8), **{name: arrays[name] for name in arrays})
        layout = FileLayout(os.path.basename(self._path), [Literal(memory.getvalue())])
        write_file(self._path, layout, WriteOptions(force=True))

    def entries(self, llama: Llama) -> dict[str, ImatrixEntry]:
        """All that the worker has collected."""
        import numpy as np

        llama.save_collected(self._scratch)
        with np.load(self._scratch) as arrays:
            names = {name.rpartition(".")[0] for name in arrays}
            return {name: ImatrixEntry(arrays[f"{name}.squares"], arrays[f"{name}.counts"]) for name in names}

    def remove(self) -> None:
        """The target is complete."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
