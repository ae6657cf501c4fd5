"""Commands that run out of memory at their n-th allocation, each in a child of its own.

    python tests/support/oom.py FOLDER COUNT

For each of COMMANDS and COUNT numbers n, spread evenly over their logarithms up to MOST, a JSON line tells the exit
code, the end of standard error, and what became of the output: "old", "new" or another word.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "src/aprfmt/cli/demo-tiny.gguf"
OLD = b"what was there before"
FIRST, MOST = 8, 60_000
"""Those before the first are of this file; those of the longest of the commands, and some more."""

SECONDS = 30

COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "m.gguf", "--json"],
    "validate": ["validate", "m.gguf"],
    "import": ["import", "m.gguf", "-o", "out.apr", "--force"],
    "export": ["export", "m.apr", "-o", "out.gguf", "--force"],
    "convert": ["convert", "m.gguf", "-o", "out.safetensors", "--force"],
    "stamp": ["stamp", "out.gguf", "--in-place", "--set", "general.name=new"],
}


def prepare(folder: Path) -> None:
    """The inputs of all commands, and every module that they import."""
    import aprfmt

    shutil.copy(DEMO, folder / "m.gguf")
    aprfmt.import_model(folder / "m.gguf", folder / "m.apr")
    for name in COMMANDS:
        place = fresh(folder, name)
        code = run(name, place, 0, in_child=False)
        assert code == 0, (name, (place / "stderr").read_text())
        for path in sorted(place.glob("out.*")):
            shutil.copy(path, folder / f"{name}-{path.name}")
        shutil.rmtree(place)


def fresh(folder: Path, name: str) -> Path:
    """A folder for one run, with what was there before."""
    place = folder / "place"
    place.mkdir()
    for source in ("m.gguf", "m.apr"):
        os.link(folder / source, place / source)
    words = COMMANDS[name]
    if name == "stamp":
        shutil.copy(DEMO, place / "out.gguf")
    elif "-o" in words:
        (place / words[words.index("-o") + 1]).write_bytes(OLD)
    return place


def run(name: str, place: Path, n: int, *, in_child: bool = True) -> int:
    """The exit code of a command whose n-th allocation fails; 0: none does."""
    child = os.fork() if in_child else 0
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    from aprfmt.cli.main import main

    os.chdir(place)
    kept = [os.dup(1), os.dup(2)]
    with open("stderr", "w") as file, open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not in_child:
        code = 98
        try:
            main(COMMANDS[name])
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        return code

    memory = importlib.import_module("_testcapi")
    faulthandler.disable()
    signal.alarm(SECONDS)
    code = 98
    try:
        memory.set_nomemory(n, n + 1)
        main(COMMANDS[name])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        sys.stderr.write(f"raised {error!r}")
    finally:
        memory.remove_mem_hooks()
        sys.stderr.flush()
        os._exit(code)


def outcome(name: str, place: Path, folder: Path) -> str:
    """What became of the output."""
    words = COMMANDS[name]
    left = sorted(path.name for path in place.iterdir() if path.name not in ("m.gguf", "m.apr", "stderr"))
    output = "out.gguf" if name == "stamp" else words[words.index("-o") + 1] if "-o" in words else None
    if left != ([output] if output else []):
        return f"left {left}"
    if output is None:
        return "old"
    data = (place / output).read_bytes()
    if data == (DEMO.read_bytes() if name == "stamp" else OLD):
        return "old"
    return "new" if data == (folder / f"{name}-{output}").read_bytes() else "another"


if __name__ == "__main__":
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    prepare(folder)
    numbers = random.Random(1)
    for name in COMMANDS:
        for i in range(count):
            n = FIRST + int(MOST ** ((i + numbers.random()) / count))
            place = fresh(folder, name)
            code = run(name, place, n)
            said = (place / "stderr").read_text(errors="replace")[-400:]
            print(json.dumps({"name": name, "n": n, "code": code, "out": outcome(name, place, folder), "said": said}),
                flush=True)  # fmt: skip
            shutil.rmtree(place)
