"""Conversions of a large model against the floor and against peers: python tools/bench_convert.py [--full]

Whole processes taking turns, from a Hugging Face folder of Qwen2.5-1.5B's shape that is made for it (4 layers, 0.84
GB; with --full 28 layers, 3.09 GB, for which 20 GB of disk must be free). The floors are plain writes of the same
bytes; the peers are llama.cpp's convert_hf_to_gguf.py and the safetensors library.

    --only bf16 q8_0   only these tables; of bf16, f16, q8_0, q4_k_m, fp8, repack, memory
    --layers N         another size; --memory-layers N M for the sizes of the table of memory
"""

from __future__ import annotations

import argparse
import functools
import json
import runpy
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bench_material import FULL_LAYERS, QUICK_LAYERS, qwen_folder
from bench_measure import (
    Job,
    Run,
    clear,
    floor_copy,
    floor_write,
    interleaved,
    knows,
    machine,
    process,
    self_timed,
    show,
    timed,
    touch,
    warm,
)
from fetch_material import CACHE

CONVERTER = CACHE / "llama.cpp-converter"
PEER = "convert_hf_to_gguf.py"
STEPS = f"{PEER}, llama_model_quantize"
WRITE, SYNCED = "write()", "write() + fsync"


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the models are, and how often each contestant runs."""

    folder: Path
    work: Path
    rounds: int
    peer_rounds: int
    memory_layers: tuple[int, ...]

    @property
    def weights(self) -> Path:
        """A large file of the source's bytes for the floors."""
        return max(self.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


# --- contestants ---


def ours(name: str, source: Path, target: Path, *options: str) -> Job:
    """`apr convert` from start to end."""
    command: list[str | Path] = [sys.executable, "-m", "aprfmt", "convert", source, "-o", target, "--quiet"]
    command += options
    return Job(name, lambda: process(*command), (target,))


def both(name: str, source: Path, target: Path, *options: str) -> list[Job]:
    """Ours, and ours without fsync, which is what may be compared with peers and floors that have none."""
    jobs = [ours(name, source, target, *options)]
    if knows("convert", "--no-fsync"):
        jobs.append(ours(f"{name}, no fsync", source, target, *options, "--no-fsync"))
    return jobs


def converter(bench: Bench, dtype: str) -> list[Job]:
    """llama.cpp's converter from start to end, where the material cache has it."""
    out = bench.work / "peer.gguf"
    runs = bench.peer_rounds
    return [Job(PEER, lambda: convert_by_peer(bench, dtype, out), (out,), runs)] if has_peer(bench) else []


def has_peer(bench: Bench) -> bool:
    """Whether the converter takes part."""
    return bool(bench.peer_rounds) and (CONVERTER / PEER).exists()


def convert_by_peer(bench: Bench, dtype: str, out: Path) -> Run:
    """One run of llama.cpp's converter."""
    environment = {"PYTHONPATH": str(CONVERTER / "gguf-py"), "HF_HUB_OFFLINE": "1"}
    command = (sys.executable, __file__, "child", "converter", bench.folder, dtype, out)
    return process(*command, environment=environment)


def two_steps(bench: Bench, mix: str, out: Path) -> Run:
    """What llama.cpp needs from a folder to a mix: the converter, then llama_model_quantize, process by process."""
    between = bench.work / "between.gguf"
    first = convert_by_peer(bench, "bf16", between)
    script = Path(__file__).with_name("bench_quantize.py")
    second = process(sys.executable, script, "child", "llama", between, out, mix, "")
    clear([between])
    peak = max(first.peak_bytes, second.peak_bytes)
    return Run(first.seconds + second.seconds, first.cpu + second.cpu, peak, "")


def floors(bench: Bench, n_bytes: int) -> list[Job]:
    """Plain writes of `n_bytes` bytes."""
    target = bench.work / "floor"
    return [
        floor_write(SYNCED, target, n_bytes, bench.weights, fsync=True),
        floor_write(WRITE, target, n_bytes, bench.weights, fsync=False),
    ]


# --- tables ---


def to_gguf(bench: Bench, dtype: str) -> None:
    """HF folder to GGUF of one dtype (and for bf16 to .apr), beside the converter with the same --outtype."""
    out = bench.work / "out.gguf"
    n_bytes = size_of(ours("", bench.folder, out, "--dtype", dtype))
    base = [SYNCED, WRITE, PEER]
    jobs = floors(bench, n_bytes)
    if dtype == "q8_0":
        source_bytes = _size(bench.folder)
        whole = f"{WRITE} of the source's {source_bytes / 1e9:.2f} GB"
        jobs.append(floor_write(whole, bench.work / "floor", source_bytes, bench.weights, fsync=False))
        base.insert(2, whole)
    jobs += both("aprfmt to GGUF", bench.folder, out, "--dtype", dtype)
    if dtype == "bf16":
        jobs += both("aprfmt to .apr", bench.folder, bench.work / "out.apr")
    jobs += converter(bench, dtype)
    compare(bench, f"HF folder to {dtype}", n_bytes, jobs, base, [bench.folder])


def to_mix(bench: Bench, mix: str) -> None:
    """HF folder to a mix in one pass, beside llama.cpp's two; once each, since computing outweighs all else."""
    out, peer = bench.work / "out.gguf", bench.work / "peer.gguf"
    jobs = [ours("aprfmt to GGUF", bench.folder, out, "--dtype", mix)]
    if has_peer(bench):
        jobs.append(Job(STEPS, lambda: two_steps(bench, mix, peer), (peer,)))
    n_bytes = _size(bench.folder) // 3
    compare(replace(bench, rounds=1), f"HF folder to {mix}", n_bytes, jobs, [STEPS], [bench.folder])


def serving(bench: Bench, scheme: str) -> None:
    """HF folder to a folder for serving engines, beside writes of as many bytes as it writes and reads."""
    out = bench.work / "out"
    options = ("--format", "hf", "--quantize", scheme)
    n_bytes = size_of(ours("", bench.folder, out, *options))
    source_bytes = _size(bench.folder)
    whole = f"{SYNCED} of the source's {source_bytes / 1e9:.2f} GB"
    jobs = floors(bench, n_bytes)
    jobs.append(floor_write(whole, bench.work / "floor", source_bytes, bench.weights, fsync=True))
    jobs += both(f"aprfmt to {scheme}", bench.folder, out, *options)
    compare(bench, f"HF folder to {scheme}", n_bytes, jobs, [SYNCED, WRITE, whole], [bench.folder])


def _size(path: Path) -> int:
    """Bytes of a file, or of the weights of a folder."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def repack(bench: Bench) -> None:
    """The same tensors in another container: bytes move and nothing is decoded."""
    apr, gguf = bench.work / "source.apr", bench.work / "source.gguf"
    ours("", bench.folder, apr).run()
    ours("", apr, gguf).run()
    n_bytes = apr.stat().st_size
    jobs = floors(bench, n_bytes)
    jobs.append(floor_copy("copy + fsync", apr, bench.work / "floor"))
    jobs += both(".apr to GGUF", apr, bench.work / "out.gguf")
    jobs += both("GGUF to .apr", gguf, bench.work / "out.apr")
    jobs += both(".apr to .apr", apr, bench.work / "out.apr")
    out = bench.work / "peer.safetensors"
    if bench.peer_rounds:
        command = (sys.executable, __file__, "child", "safetensors", bench.folder, out)
        name = "safetensors loads and saves"
        jobs.append(Job(name, lambda: self_timed(*command), (out,), bench.peer_rounds))
    compare(bench, "bytes kept", n_bytes, jobs, [SYNCED, WRITE, "copy + fsync"], [apr, gguf, bench.folder])
    clear([apr, gguf])


def memory(bench: Bench) -> None:
    """Peak memory of ours at several sizes."""
    targets = {"GGUF": "out.gguf", "GGUF f16": "out.gguf", "GGUF q8_0": "out.gguf", ".apr": "out.apr"}
    columns: list[list[str]] = [["peak MB, HF folder to", "", *targets]]
    for layers in bench.memory_layers:
        folder = bench.work / f"layers{layers}"
        column = [f"{qwen_folder(folder, layers) / 1e9:.2f} GB, {layers} layers", "---:"]
        for name, file in targets.items():
            dtype = name.partition(" ")[2]
            job = ours("", folder, bench.work / file, *(["--dtype", dtype] if dtype else []))
            column.append(f"{job.run().peak_bytes / 1e6:.0f}")
            clear(job.outputs)
        clear([folder])
        columns.append(column)
    columns[0][1] = "---"
    print("\n" + "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)), flush=True)


def compare(bench: Bench, title: str, n_bytes: int, jobs: list[Job], bases: list[str], sources: list[Path]) -> None:
    """Runs the jobs, prints the table, and says whether the GGUF files hold the same tensors.

    `n_bytes` is about what an output takes.
    """
    prints: dict[str, str] = {}
    sizes: list[int] = []

    def first(job: Job) -> None:
        if not job.floor:
            sizes.append(_size(job.outputs[0]))
        if job.outputs[0].suffix == ".gguf":
            said = process(sys.executable, __file__, "child", "fingerprint", job.outputs[0]).said
            prints[job.name] = said

    ready = functools.partial(touch, bench.work, n_bytes + n_bytes // 4)
    series = interleaved(jobs, bench.rounds, sources, ready, first)
    title = f"{title}, {max(sizes) / 1e9:.2f} GB written"
    show(title, series, bases, {job.name for job in jobs if job.floor})
    if len(prints) > 1:
        same = len(set(prints.values())) == 1
        verdict = "the same names, types and bytes" if same else "THEY DIFFER"
        print(f"\nTensors of {'; '.join(prints)}: {verdict}.", flush=True)


def size_of(job: Job) -> int:
    """Runs the job once, which also compiles and warms what it needs; returns the size of its output."""
    clear(job.outputs)
    job.run()
    n_bytes = _size(job.outputs[0])
    clear(job.outputs)
    return n_bytes


TABLES: dict[str, Callable[[Bench], None]] = {
    "bf16": functools.partial(to_gguf, dtype="bf16"),
    "f16": functools.partial(to_gguf, dtype="f16"),
    "q8_0": functools.partial(to_gguf, dtype="q8_0"),
    "q4_k_m": functools.partial(to_mix, mix="q4_k_m"),
    "fp8": functools.partial(serving, scheme="fp8-dynamic"),
    "repack": repack,
    "memory": memory,
}


# --- children ---


def run_converter(folder: str, dtype: str, out: str) -> None:
    """convert_hf_to_gguf.py in this process."""
    from transformers.utils import is_sentencepiece_available

    if not is_sentencepiece_available():  # it imports the package before it looks for a tokenizer.model
        stub = ModuleType("sentencepiece")
        stub.SentencePieceProcessor = stub.sentencepiece_model_pb2 = None  # type: ignore[attr-defined]
        sys.modules["sentencepiece"] = stub
    sys.path.insert(0, str(CONVERTER))
    script = str(CONVERTER / PEER)
    sys.argv = [script, folder, "--outtype", dtype, "--outfile", out]
    runpy.run_path(script, run_name="__main__")


def run_safetensors(folder: str, out: str) -> None:
    """Loads the tensors of all shards and saves them as one file; takes its time without the imports."""
    from safetensors.torch import load_file, save_file

    def resave() -> None:
        tensors: dict[str, Any] = {}
        for shard in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(shard)
        save_file(tensors, out)

    timed(resave)


def run_fingerprint(path: str) -> None:
    """Says what tensors a model has."""
    import aprfmt

    with aprfmt.open(path) as model:
        rows = sorted((t.name, t.dtype, t.shape, zlib.crc32(t.raw())) for t in model.tensors.entries)
    print(zlib.crc32(json.dumps(rows).encode()), len(rows))


CHILDREN: dict[str, Callable[..., None]] = {
    "converter": run_converter,
    "safetensors": run_safetensors,
    "fingerprint": run_fingerprint,
}


def main() -> None:
    """Makes the folder and prints the tables."""
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench") as name:
        print(machine(Path(name)), flush=True)
        bench = Bench(
            Path(name, "model"), Path(name), options.rounds, options.peer_rounds, tuple(options.memory_layers)
        )
        if set(options.only) - {"memory"}:
            qwen_folder(bench.folder, options.layers)
            warm(bench.folder)
        for table in options.only:
            TABLES[table](bench)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"{FULL_LAYERS} layers")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--memory-layers", type=int, nargs="+", metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1, help="0: no peers")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--work", type=Path, help="folder for a temporary folder with all files")
    options = parser.parse_args()
    options.layers = options.layers or (FULL_LAYERS if options.full else QUICK_LAYERS)
    options.memory_layers = options.memory_layers or sorted({(options.layers + 1) // 2, options.layers})
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
    else:
        main()
