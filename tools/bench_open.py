"""Opening, listing, inspecting and verifying against peers that take turns: python tools/bench_open.py [GGUF | --plans]

Fastest round of each job, and the ratio to the peer in the same table. The GGUF is SmolLM2 out of the material cache
where none is named: an `.apr` has no id for its Q4_1 and names the true dtypes in the metadata, which the bare read
does not look at. The model with a large vocabulary has 300 tiny tensors and the tokenizer of Qwen3.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import aprfmt
from aprfmt.io import crc
from bench_material import LATENT, latent_folder
from bench_measure import process
from fetch_material import CACHE

ROUNDS = 15
VERIFIED_BYTES = 512 << 20
_SLOW = 2  # rounds of what takes seconds
_BUFFER = 512 << 10

Jobs = dict[str, Callable[[], object]]


# --- contestants ---


def open_ours(path: Path) -> None:
    """Opens `path` with aprfmt and touches every tensor."""
    with aprfmt.open(path) as model:
        assert sum(t.n_bytes for t in model.tensors.values())


def bare_index(path: Path) -> None:
    """What no reader of an `.apr` can leave out: header, index entries as tuples, the mapping; nothing is checked."""
    with open(path, "rb") as file:
        count, _, _, index, data = struct.unpack_from("<IQIQQ", file.read(64), 8)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    raw = mapped[index:data]
    tails = [struct.Struct(f"<{ndim + 2}Q") for ndim in range(9)]
    tensors = []
    at = 0
    for _ in range(count):
        end = at + 2 + (raw[at] | raw[at + 1] << 8)
        ndim = raw[end + 1]
        *shape, offset, n_bytes = tails[ndim].unpack_from(raw, end + 2)
        tensors.append((raw[at + 2 : end].decode(), raw[end], tuple(shape), data + offset, n_bytes))
        at = end + 18 + 8 * ndim
    assert sum(tensor[4] for tensor in tensors)
    mapped.close()


def open_gguf_py(path: Path) -> None:
    """The same with gguf-py."""
    from gguf import GGUFReader

    assert sum(t.n_bytes for t in GGUFReader(path).tensors)


def open_safetensors(path: Path) -> None:
    """The same with safetensors."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert sum(len(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def processes(cache: Path, **commands: tuple[str, ...]) -> Jobs:
    """Whole processes of Python, with compiled modules as an installed package has them."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def job(command: tuple[str, ...]) -> Callable[[], object]:
        return lambda: subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment
        )

    return {name.replace("_", " "): job(command) for name, command in commands.items()}


# --- material ---


def vocabulary_model(folder: Path) -> None:
    """A Hugging Face folder: 27 layers of Qwen3 of width 16, zeros, with the real tokenizer of 151,669 tokens."""
    folder.mkdir()
    for file in (CACHE / "tokenizers" / "qwen3").iterdir():
        shutil.copyfile(file, folder / file.name)
    hidden, ffn, head, vocabulary, layers = 16, 32, 8, 151_669, 27
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": head, "vocab_size": vocabulary, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [head],
        "self_attn.k_norm": [head], "self_attn.q_proj": [2 * head, hidden], "self_attn.k_proj": [head, hidden],
        "self_attn.v_proj": [head, hidden], "self_attn.o_proj": [hidden, 2 * head], "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden], "mlp.down_proj": [hidden, ffn],
    }  # fmt: skip
    shapes = {"lm_head.weight": [vocabulary, hidden], "model.embed_tokens.weight": [vocabulary, hidden]}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
    shapes["model.norm.weight"] = [hidden]
    _write_zeros(folder / "model.safetensors", shapes)


def _write_zeros(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + offset)


# --- measuring ---


def best_ms(jobs: Jobs, slow: tuple[str, ...] = ()) -> dict[str, float]:
    """Milliseconds of the fastest round of each job, the jobs taking turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for number in range(ROUNDS):
        for name, job in jobs.items():
            if name in slow and number >= _SLOW:
                continue
            start = time.perf_counter()
            job()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def table(title: str, times: dict[str, float], peer: str) -> None:
    """Prints a Markdown table; `peer` is the 1.0."""
    print(f"\n| {title} | ms | x {peer} |\n|---|---|---|")
    for name, value in times.items():
        print(f"| {name} | {value:.2f} | {value / times[peer]:.3g} |")
    sys.stdout.flush()


# --- verification ---


def in_threads(n: int, n_bytes: int, work: Callable[[int, int], object]) -> None:
    """`work(start, end)` on each of n equal parts."""
    step = n_bytes // n
    threads = [threading.Thread(target=work, args=(i * step, (i + 1) * step)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def verification(path: Path) -> None:
    """Prints the table: reading the bytes once in memory, from the page cache, and the checksum of the file."""
    import zlib

    import numpy as np

    memory = np.fromfile(path, "u1", VERIFIED_BYTES)
    file = os.open(path, os.O_RDONLY)

    def add(start: int, end: int) -> None:
        for at in range(start, end, 1 << 20):
            memory[at : min(at + (1 << 20), end)].view("<u8").sum()

    def read(start: int, end: int) -> None:
        buffer = bytearray(_BUFFER)
        for at in range(start, end, _BUFFER):
            os.preadv(file, [buffer], at)

    def verify(**changed: Any) -> None:
        with mock.patch.multiple(crc, __name__="", **changed), aprfmt.open(path) as model:
            assert model.checksum()["footer"] == "ok"

    n = VERIFIED_BYTES
    jobs: Jobs = {
        "memory, read once (numpy sum)": lambda: in_threads(1, n, add),
        "memory, two threads": lambda: in_threads(2, n, add),
        "page cache, read into one buffer": lambda: in_threads(1, n, read),
        "page cache, two threads": lambda: in_threads(2, n, read),
        "aprfmt": verify,
        "aprfmt, one thread": lambda: verify(_MOST_THREADS=1),
        "aprfmt, one thread, zlib": lambda: verify(_MOST_THREADS=1, crc32=zlib.crc32),
    }
    times = best_ms(jobs, slow=("aprfmt, one thread, zlib",))
    peer = times["memory, read once (numpy sum)"]
    print(f"\n| verify an `.apr` of {n >> 20} MiB | GB/s | x memory, read once |\n|---|---|---|")
    for name, value in times.items():
        print(f"| {name} | {n / value / 1e6:.1f} | {peer / value:.2f} |")
    os.close(file)


def big_apr(path: Path) -> None:
    """An `.apr` of VERIFIED_BYTES and a little."""
    piece = os.urandom(1 << 20)
    data = b"".join(piece[i:] + piece[:i] for i in range(VERIFIED_BYTES >> 20))
    aprfmt.save_file({"w": aprfmt.RawTensor("U8", (len(data),), data)}, path)


def plans(folder: Path) -> None:
    """CPU seconds and memory of planning what a model of a hundred thousand tensors becomes."""
    print("\n| plan | tensors | to a GGUF of q4_k_m, CPU | memory | to an `.apr`, CPU | memory |")
    print("|---|---|---|---|---|---|")
    for title, sizes in LATENT.items():
        source = folder / "latent"
        count = latent_folder(source, sizes)
        apr = (sys.executable, "-m", "aprfmt")
        ways: tuple[tuple[str | Path, ...], ...] = (
            ("export", "-o", folder / "x.gguf", "--dtype", "q4_k_m"),
            ("import", "-o", folder / "x.apr"),
        )
        runs = [process(*apr, command, source, *rest, "--plan") for command, *rest in ways]
        cells = " | ".join(f"{run.cpu:.1f} s | {run.peak_bytes >> 20} MiB" for run in runs)
        print(f"| {title} | {count:,} | {cells} |", flush=True)
        shutil.rmtree(source)


def main() -> None:
    """Prints all tables."""
    if "--plans" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as name:
            plans(Path(name))
        return
    gguf = Path(sys.argv[1]) if len(sys.argv) > 1 else next((CACHE / "smollm2").glob("*.gguf"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        apr, flat, vocabulary = folder / "m.apr", folder / "m.safetensors", folder / "vocabulary"
        aprfmt.import_model(gguf, apr)
        aprfmt.export_model(apr, flat, dtype="f16")
        vocabulary_model(vocabulary)
        big, big_gguf = folder / "v.apr", folder / "v.gguf"
        aprfmt.import_model(vocabulary, big)
        aprfmt.export_model(big, big_gguf)
        for title, one, other in (("SmolLM2-135M", apr, gguf), ("300 tensors, 151,669 tokens", big, big_gguf)):
            jobs: Jobs = {
                "bare index read": lambda one=one: bare_index(one),  # type: ignore[misc]
                "aprfmt, `.apr`": lambda one=one: open_ours(one),  # type: ignore[misc]
                "aprfmt, GGUF": lambda other=other: open_ours(other),  # type: ignore[misc]
                "gguf-py, GGUF": lambda other=other: open_gguf_py(other),  # type: ignore[misc]
            }
            table(f"open and list, {title}", best_ms(jobs, ("gguf-py, GGUF",)), "bare index read")
        jobs = {"aprfmt": lambda: open_ours(flat), "safetensors": lambda: open_safetensors(flat)}
        table("open and list, the first one as F16 safetensors", best_ms(jobs), "safetensors")
        jobs = processes(
            folder / "compiled",
            python_and_argparse=("-c", "import argparse"),
            apr_version=("-m", "aprfmt", "--version"),
            apr_tensors=("-m", "aprfmt", "tensors", str(big)),
            apr_inspect_of_the_GGUF=("-m", "aprfmt", "inspect", str(big_gguf)),
            apr_inspect_of_the_apr=("-m", "aprfmt", "inspect", str(big)),
        )
        table("process, 300 tensors and 151,669 tokens", best_ms(jobs), "python and argparse")
        big_apr(folder / "big.apr")
        verification(folder / "big.apr")


if __name__ == "__main__":
    main()
