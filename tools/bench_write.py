"""Writing 1 GiB of tensors from memory against the floor and peers: python tools/bench_write.py [--mib N]

64 F16 tensors as .apr (with its CRC), GGUF and safetensors; peers are safetensors.numpy and gguf.GGUFWriter, the
floor is write() of the same bytes. Each with and without fsync. Every contestant is a process with the tensors in its
memory, which times the writing alone; its peak memory tells whether it copies them.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_measure import PIECE, Job, interleaved, machine, self_timed, show, timed, touch, write_pieces

if TYPE_CHECKING:
    import numpy as np

    from aprfmt.formats.out_tensor import OutTensor
    from aprfmt.io.pipe import Segment

    Tensors = dict[str, np.ndarray[Any, Any]]

N_TENSORS = 64
WRITE = "write()"


def write_floor(tensors: Tensors, target: Path, fsync: bool) -> None:
    """The bytes and nothing else."""
    write_pieces(target, (piece for data in tensors.values() for piece in _pieces(data)), fsync)


def write_apr(tensors: Tensors, target: Path, fsync: bool) -> None:
    """Ours: .apr with its CRC-32."""
    from aprfmt.formats import apr2_write, apr_metadata

    metadata = apr_metadata.dump({}, "Current")
    _write(apr2_write.layout(metadata, _out(tensors), flags=0), target, fsync, crc=True)


def write_gguf(tensors: Tensors, target: Path, fsync: bool) -> None:
    """Ours: GGUF."""
    from aprfmt.formats import gguf_write
    from aprfmt.formats.gguf_fields import GgufType

    kv = [("general.architecture", GgufType.STRING, "llama")]
    _write(gguf_write.layout(kv, _out(tensors)), target, fsync)


def write_safetensors(tensors: Tensors, target: Path, fsync: bool) -> None:
    """Ours: safetensors."""
    from aprfmt.formats import safetensors

    _write(safetensors.layout(_out(tensors)), target, fsync)


def write_by_safetensors(tensors: Tensors, target: Path, fsync: bool) -> None:
    """The safetensors library."""
    from safetensors.numpy import save_file

    save_file(tensors, target)
    _sync(target, fsync)


def write_by_gguf(tensors: Tensors, target: Path, fsync: bool) -> None:
    """gguf-py."""
    from gguf import GGUFWriter

    writer = GGUFWriter(target, "llama")
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _sync(target, fsync)


WRITERS: dict[str, Callable[[Tensors, Path, bool], None]] = {
    WRITE: write_floor,
    "aprfmt, .apr": write_apr,
    "aprfmt, GGUF": write_gguf,
    "aprfmt, safetensors": write_safetensors,
    "safetensors.numpy.save_file": write_by_safetensors,
    "gguf.GGUFWriter": write_by_gguf,
}


def _pieces(data: np.ndarray[Any, Any]) -> list[memoryview]:
    view = data.data.cast("B")
    return [view[start : start + PIECE] for start in range(0, len(view), PIECE)]


def _out(tensors: Tensors) -> list[OutTensor]:
    from aprfmt.formats.out_tensor import OutTensor

    return [
        OutTensor(name, "F16", data.shape, data.nbytes, functools.partial(_pieces, data))
        for name, data in tensors.items()
    ]


def _write(segments: Sequence[Segment], target: Path, fsync: bool, *, crc: bool = False) -> None:
    from aprfmt.io.pipe import FileLayout, write_layout
    from aprfmt.io.sink import AtomicFile

    plan = FileLayout(target.name, segments, crc_footer=crc)
    with AtomicFile(target, n_bytes=plan.n_bytes, fsync=fsync) as sink:
        write_layout(plan, sink)


def _sync(target: Path, fsync: bool) -> None:
    if fsync:
        with open(target, "rb+") as file:
            os.fsync(file.fileno())


def child(name: str, target: str, mib: str, fsync: str) -> None:
    """Makes the tensors, writes them once untimed at a small size (imports), then all of them."""
    import numpy as np

    rows = max(1, int(mib) * PIECE // N_TENSORS // 2048)
    generator = np.random.default_rng(0)
    tensors = {
        f"blk.{i}.weight": generator.integers(0, 0x7C00, (rows, 1024), np.uint16).view(np.float16)
        for i in range(N_TENSORS)
    }
    few = Path(target).with_suffix(".few")
    WRITERS[name]({"blk.0.weight": tensors["blk.0.weight"][:1]}, few, False)
    few.unlink()
    timed(lambda: WRITERS[name](tensors, Path(target), bool(int(fsync))))


def main() -> None:
    """Prints two tables: without and with fsync."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=Path, help="folder for a temporary folder with the output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench") as name:
        print(machine(Path(name)), flush=True)
        target = Path(name, "out")
        ready = functools.partial(touch, Path(name), options.mib * PIECE * 5 // 4)
        for fsync in (False, True):
            jobs = [
                Job(writer, functools.partial(_run, writer, target, options.mib, fsync), (target,))
                for writer in WRITERS
            ]
            series = interleaved(jobs, options.rounds, ready=ready)
            show(f"{options.mib} MiB{', each with fsync' if fsync else ''}", series, [WRITE])


def _run(writer: str, target: Path, mib: int, fsync: bool) -> Any:
    return self_timed(sys.executable, __file__, "child", writer, target, str(mib), str(int(fsync)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
