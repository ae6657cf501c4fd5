"""Times the README's commands from nothing to a running GGUF: `python tools/first_minute.py`.

They run in a fresh clone with an empty home, no virtual environment and no caches; only pip's settings (an index, a
certificate) are taken over from the environment. Prints the seconds of each command and of all; exit 1 when one fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commands() -> list[str]:
    """The lines of the first script of the README, without comments."""
    block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    return [re.sub(r"\s+#.*", "", line) for line in block[1].splitlines()]


def main() -> int:
    """Runs and times them."""
    with tempfile.TemporaryDirectory() as folder:
        home, clone = Path(folder, "home"), Path(folder, "clone")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        env = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        env |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PIP_NO_CACHE_DIR": "1"}
        typed, began = commands(), time.monotonic()
        script = "\n".join(f"{line}\nprintf 'done %s\\n' $(date +%s.%N)" for line in typed)
        start, seconds = time.time(), []
        with subprocess.Popen(
            ["bash", "-e", "-c", script],
            cwd=clone,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("done "):
                    seconds.append(float(line[5:]) - start)
                    start += seconds[-1]
                    print(f"{seconds[-1]:7.1f} s  {typed[len(seconds) - 1]}", flush=True)
                else:
                    print(line, end="", flush=True)
        print(f"{time.monotonic() - began:7.1f} s  together")
        return child.returncode


if __name__ == "__main__":
    sys.exit(main())
