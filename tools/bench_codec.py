"""Codecs against peers, interleaved in one run: python tools/bench_codec.py [--full] [DTYPE ...]

Tables of decoding, encoding and casts between plain dtypes: GB/s of the float32 side (minimum of the rounds), and the
time as a multiple of a memcpy of that side. Ours with numpy and with libggml, by one and by two threads; beside them
gguf-py and torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.codecs import DTYPES, backend, ggml, ggml_numpy, plain

Array = np.ndarray[Any, Any]
Work = Callable[[], object]

COLS = 4096
PIECE_ROWS = 64
"""Rows that a worker of a conversion takes at a time: 1 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table: contestants by column."""

    name: str
    n_bytes: int
    jobs: dict[str, Work]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dtypes", nargs="*", help="dtypes to measure (all)")
    parser.add_argument("--full", action="store_true", help="more rounds, and the IQ types that take minutes")
    options = parser.parse_args()
    rounds = 15 if options.full else 5
    names = options.dtypes or [name for name in DTYPES if ggml.decodable(name)]
    for direction, cases in (("decode", decoding(names)), ("encode", encoding(names, full=options.full))):
        show(direction, cases, rounds)
    if not options.dtypes:
        show("cast", casting(), rounds)


# --- contestants ---


def forced(name: str, work: Work) -> Work:
    """`work` with one backend."""

    def run() -> None:
        os.environ[backend.VARIABLE] = name
        try:
            work()
        finally:
            del os.environ[backend.VARIABLE]

    return run


def in_pieces(run: Callable[[slice], object], rows: int, threads: int) -> Work:
    """All rows by `threads` threads, a piece at a time, as a conversion does."""
    step = min(PIECE_ROWS, rows // 4)
    pieces = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    if threads == 1:
        return lambda: [run(piece) for piece in pieces]
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(run, pieces))


def ours(run: Callable[[slice], object], rows: int, *, numpy: bool) -> dict[str, Work]:
    """Our backends by one and two threads."""
    names = (["numpy"] if numpy else []) + (["ggml"] if any(backend.libraries()) else [])
    return {f"{name} {n}t": forced(name, in_pieces(run, rows, n)) for name in names for n in (1, 2)}


def decoding(names: Sequence[str]) -> list[Case]:
    """Random blocks with sane scales."""
    cases = []
    for name in names:
        row, rows = DTYPES[name], 1024
        stored = sane_blocks(name, rows * COLS // row.block).reshape(rows, -1)

        def run(part: slice, name: str = name, stored: Array = stored) -> object:
            return ggml.decode(name, stored[part])

        jobs = ours(run, rows, numpy=True)
        peer = gguf_py(name, "dequantize", stored)
        cases.append(Case(name, rows * COLS * 4, jobs | ({"gguf-py": peer} if peer else {})))
    return cases


def sane_blocks(name: str, n: int) -> Array:
    """Blocks of random bytes whose scales are ordinary numbers."""
    stored = np.random.default_rng(0).integers(0, 256, (n, DTYPES[name].block_bytes), dtype="u1")
    for at in DTYPES[name].scales:
        stored.view("<f2")[:, at // 2] = 0.01
    return stored


def encoding(names: Sequence[str], *, full: bool) -> list[Case]:
    """Normal values; an importance of the columns where a type needs it."""
    cases = []
    for name in names:
        if not ggml.encodable(name) or (name.startswith(("IQ1", "IQ2", "IQ3")) and not full):
            continue
        rows = 512 if name in ggml_numpy.ENCODABLE else 16 if name.startswith("IQ") and "4" not in name else 64
        values = np.random.default_rng(0).standard_normal((rows, COLS)).astype("f4")
        weights = np.ones(COLS, dtype="f4") if ggml.needs_weights(name) else None

        def run(part: slice, name: str = name, values: Array = values, weights: Array | None = weights) -> object:
            return ggml.encode(name, values[part].reshape(-1), COLS, weights)

        jobs = ours(run, rows, numpy=name in ggml_numpy.ENCODABLE)
        peer = gguf_py(name, "quantize", values)
        cases.append(Case(name, values.nbytes, jobs | ({"gguf-py": peer} if peer else {})))
    return cases


CASTS = (
    *(("F32", "BF16"), ("BF16", "F32"), ("F32", "F16"), ("F16", "F32"), ("BF16", "F16"), ("F16", "BF16")),
    *(("F64", "F32"), ("F32", "F8_E4M3"), ("BF16", "F8_E4M3"), ("F8_E4M3", "F32"), ("BF16", "F8_E5M2")),
)


def casting() -> list[Case]:
    """Normal values from one plain dtype to another; torch on whole tensors with as many threads as it likes."""
    rows = 1024
    values = np.random.default_rng(0).standard_normal((rows, COLS)).astype("f4")
    cases = []
    for source, target in CASTS:
        stored = plain.encode(source, values.reshape(-1)).view("u1").reshape(rows, -1)

        def run(part: slice, names: tuple[str, str] = (source, target), stored: Array = stored) -> object:
            return plain.cast(*names, stored[part])

        jobs = ours(run, rows, numpy=True)
        cases.append(Case(f"{source} to {target}", values.nbytes, jobs | torch_cast(source, target, values)))
    return cases


def torch_cast(source: str, target: str, values: Array) -> dict[str, Work]:
    """The same by torch, where it is installed."""
    try:
        import torch
    except ImportError:
        return {}
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    kinds |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    tensor = torch.from_numpy(values).to(kinds[source])
    return {"torch": lambda: tensor.to(kinds[target])}


def gguf_py(name: str, verb: str, data: Array) -> Work | None:
    """The same by gguf-py, where it can."""
    import gguf.quants

    def work(part: Array = data) -> None:
        with np.errstate(all="ignore"):
            getattr(gguf.quants, verb)(part, gguf.GGMLQuantizationType[name])

    try:
        work(data[:1])
    except (KeyError, NotImplementedError):
        return None
    return work


# --- tables ---


def best_s(jobs: dict[str, Work], rounds: int) -> dict[str, float]:
    """Seconds of the fastest round of each job, the jobs taking turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for number in range(rounds + 1):  # the first one warms up
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def show(title: str, cases: Sequence[Case], rounds: int) -> None:
    """Prints a Markdown table: GB/s (multiple of a memcpy)."""
    columns = list(dict.fromkeys(column for case in cases for column in case.jobs))
    print(f"\n| {title}, GB/s of float32 (x memcpy) | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for case in cases:
        source = np.ones(case.n_bytes // 4, dtype="f4")
        target = np.empty_like(source)
        times = best_s({"memcpy": lambda: np.copyto(target, source), **case.jobs}, rounds)  # noqa: B023
        base = times.pop("memcpy")
        cells = [
            f"{case.n_bytes / times[name] / 1e9:.2f} ({times[name] / base:.1f}x)" if name in times else ""
            for name in columns
        ]
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
