"""Converting against the floor and against peers, interleaved in one run: python tools/bench_convert.py [GGUF]

The floor is a plain copy of the source with fsync; peers are gguf-py and safetensors where they can do the job.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import aprfmt
from bench_open import CACHE, best_ms, table


def copy_with_fsync(source: Path, target: Path) -> None:
    """What any conversion has to beat: the bytes, once."""
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


def safetensors_by_library(source: Path, target: Path) -> None:
    """GGUF to F32 safetensors the way scripts do it: gguf-py decodes, safetensors saves."""
    import numpy as np
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    tensors = {
        t.name: np.ascontiguousarray(dequantize(t.data, t.tensor_type)) for t in GGUFReader(source).tensors
    }
    save_file(tensors, target)


def main() -> None:
    """Prints two tables: moving bytes, decoding."""
    gguf = Path(sys.argv[1]) if len(sys.argv) > 1 else next((CACHE / "smollm2").glob("*.gguf"))
    with tempfile.TemporaryDirectory() as folder:
        apr, out = Path(folder, "m.apr"), Path(folder, "out.gguf")
        aprfmt.import_model(gguf, apr)
        jobs: dict[str, Callable[[], object]] = {
            "copy with fsync": lambda: copy_with_fsync(gguf, out),
            "import GGUF to .apr": lambda: (
                aprfmt.import_model(gguf, Path(folder, "n.apr"), force=True) and None
            ),
            "export .apr to GGUF": lambda: aprfmt.export_model(apr, out, force=True),
            ".apr to .apr": lambda: aprfmt.convert_model(apr, Path(folder, "n.apr"), force=True),
        }
        table("98 MB, bytes kept", best_ms(jobs, 7), "copy with fsync")
        flat = Path(folder, "m.safetensors")
        jobs = {
            "aprfmt": lambda: aprfmt.convert_model(gguf, flat, dtype="f32", force=True),
            "gguf-py + safetensors": lambda: safetensors_by_library(gguf, flat),
        }
        table("GGUF Q4_1 to F32 safetensors, 540 MB", best_ms(jobs, 3), "gguf-py + safetensors")


if __name__ == "__main__":
    main()
