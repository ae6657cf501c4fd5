"""Kills writers with SIGKILL, in calls to the operating system and at random moments, and counts what is left."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import writers
from publications import WAYS, Kills


def main() -> int:
    """Prints the counts and every outcome that must not be; 1 where there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to write, to try another file system")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        writers.prepare(Path(folder))
        kills = Kills(Path(folder))
        turns = itertools.cycle(itertools.product((kills.kill_at, kills.kill_after), WAYS, writers.WRITERS))
        while kills.counts["killed"] < given.kills:
            kill, way, name = next(turns)
            kill(name, way, draw)
    print(", ".join(f"{n} {what}" for what, n in sorted(kills.counts.items())))
    print("\n".join(kills.faults) or "nothing wrong")
    return 1 if kills.faults else 0


if __name__ == "__main__":
    sys.exit(main())
