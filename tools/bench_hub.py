"""Converting a repository of the hub: python tools/bench_hub.py [--layers N] [--rate MB/s ...]

A BF16 model of Qwen2.5-1.5B's shape (3.09 GB in shards of 0.7 GB) on a server on this machine, to a GGUF: `apr convert
hf://...`, which reads by ranges, beside `huggingface_hub.snapshot_download` and then `apr convert FOLDER`. The disk is
what lies in the caches beside the output, looked at every 20 ms. Then a server that cuts connections, and a run that is
killed halfway and made again.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench_material import FULL_LAYERS, qwen_folder
from bench_measure import Run, machine, process

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

_LOOK_S = 0.02
_CUT_BYTES = 5_000_000
_HEADER = ("run", "seconds", "disk GB", "memory MB", "fetched GB", "same bytes")


class Disk:
    """The most bytes that lay below some folders during a block."""

    def __init__(self, *folders: Path) -> None:
        self.peak = 0
        self._folders = folders
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.peak = max(self.peak, sum(map(used, self._folders)))

    def __enter__(self) -> Disk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def used(folder: Path) -> int:
    """Bytes that the files below a folder take of the disk; links count nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(where, name))
                total += status.st_blocks * 512
    return total


@contextmanager
def served(folder: Path, rate: float, cuts: bool = False) -> Iterator[str]:
    """A server of the folder in a process of its own; its address."""
    words = [sys.executable, __file__, "child", "serve", str(folder), str(rate), "cuts" if cuts else ""]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.terminate()
        child.wait()


def environment(address: str, work: Path) -> dict[str, str]:
    """Where everything goes to."""
    return {
        "HF_ENDPOINT": address,
        "HF_HUB_CACHE": str(work / "hfcache"),
        "APR_CACHE": str(work / "cache"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def measure(work: Path, words: list[str], address: str) -> tuple[Run, int]:
    """A run from empty caches, and the peak of the disk."""
    folders = (work / "hfcache", work / "cache")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    (work / "there.gguf").unlink(missing_ok=True)
    with Disk(*folders) as disk:
        run = process(*words, environment=environment(address, work))
    return run, disk.peak


def row(name: str, run: Run, disk: int, work: Path) -> list[str]:
    """A row of the table."""
    fetched = json.loads(run.said).get("hub", {}).get("fetched_bytes") if run.said.startswith("{") else None
    same = subprocess.run(["cmp", "-s", work / "here.gguf", work / "there.gguf"], check=False).returncode == 0
    return [
        name,
        f"{run.seconds:.1f}",
        f"{disk / 1e9:.2f}",
        f"{run.peak_bytes / 1e6:.0f}",
        f"{fetched / 1e9:.2f}" if fetched is not None else "",
        "yes" if same else "NO",
    ]


def resumed(work: Path, words: list[str], address: str) -> list[list[str]]:
    """A run that is killed after half of the bytes, and the next one."""
    folders = (work / "hfcache", work / "cache")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    (work / "there.gguf").unlink(missing_ok=True)
    env = os.environ | environment(address, work)
    with Disk(*folders) as disk:
        start = time.perf_counter()
        child = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        half = (work / "here.gguf").stat().st_size // 2
        while child.poll() is None and written(child.pid) < half:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        seconds = time.perf_counter() - start
        left = used(work / "cache")
        run = process(*words, environment=environment(address, work))
    reused = json.loads(run.said)["hub"]["reused_bytes"]
    killed = ["killed halfway", f"{seconds:.1f}", f"{left / 1e9:.2f} left", "", "", ""]
    return [killed, row(f"the next run ({reused / 1e9:.2f} GB reused)", run, disk.peak, work)]


def written(pid: int) -> int:
    """Bytes that a process has written to the disk's cache so far; half of them are what it fetched."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            found = dict(line.split(": ") for line in file.read().splitlines())
        return int(found["wchar"]) // 2
    except (OSError, KeyError, ValueError):
        return 0


# --- children ---


def serve(folder: str, rate: str, cuts: str) -> None:
    """Serves the folder until the process ends."""
    from hub_server import Answer, Hub, Request

    hub = Hub()
    hub.rate = float(rate) * 1e6 if float(rate) else None
    for path in sorted(Path(folder).iterdir()):
        with open(path, "rb") as file:
            hub.files[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        hub.digest(path.name)
    seen = 0

    def fault(request: Request) -> Answer | None:
        nonlocal seen
        seen += request.span is not None and request.span[1] - request.span[0] > _CUT_BYTES
        return Answer(cut=_CUT_BYTES) if cuts and seen % 10 == 5 else None

    hub.fault = fault
    print(hub.address, flush=True)
    signal.pause()


def download(target: str) -> None:
    """Fetches everything, then converts it."""
    from huggingface_hub import snapshot_download

    import aprfmt

    aprfmt.convert_model(snapshot_download("org/name"), target, fsync=False)


def make(folder: str, layers: str) -> None:
    """The repository, in shards of 0.7 GB."""
    import aprfmt

    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as whole:
        qwen_folder(Path(whole), int(layers))
        aprfmt.convert_model(whole, folder, format="hf", shard_size="700MB", fsync=False)


CHILDREN: dict[str, Callable[..., None]] = {"serve": serve, "download": download, "make": make}


def main() -> None:
    """Prints a table for each rate of the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=FULL_LAYERS)
    parser.add_argument("--rate", type=float, nargs="*", default=[0.0, 200.0], help="MB/s of the server; 0: no limit")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench") as name:
        work = Path(name)
        print(machine(work), flush=True)
        # Under the name that the cache of the hub would give it, so that the outputs are the same bytes.
        folder = work / "models--org--name" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        folder.parent.mkdir(parents=True)
        process(sys.executable, __file__, "child", "make", folder, str(options.layers))
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards, the largest {max(sizes) / 1e9:.2f} GB")
        process(sys.executable, "-m", "aprfmt", "convert", folder, "-o", work / "here.gguf", "--quiet")
        target = str(work / "there.gguf")
        words = [sys.executable, "-m", "aprfmt", "convert", "hf://org/name", "-o", target, "--json", "--no-fsync"]
        after = [sys.executable, __file__, "child", "download", target]
        for rate in options.rate:
            print(f"\nserver: {f'{rate:.0f} MB/s' if rate else 'no limit'}")
            print(" | ".join(_HEADER))
            with served(folder, rate) as address:
                for title, command in (("by ranges", words), ("download, then convert", after)):
                    print(" | ".join(row(title, *measure(work, command, address), work)), flush=True)
                small = [*words, "--max-disk", "128MiB"]
                print(" | ".join(row("--max-disk 128MiB", *measure(work, small, address), work)), flush=True)
                if not rate:
                    for line in resumed(work, words, address):
                        print(" | ".join(line), flush=True)
            if not rate:
                with served(folder, rate, cuts=True) as address:
                    title = "every tenth connection cut"
                    print(" | ".join(row(title, *measure(work, words, address), work)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
    else:
        main()
