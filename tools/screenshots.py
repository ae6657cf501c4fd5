"""Draws the pictures of docs/pages.md: each page at another width, theme or on paper; needs Chromium and the material.

python tools/screenshots.py MODEL.gguf OTHER.gguf
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from browser import browser  # noqa: E402
from sample_pages import write_all  # noqa: E402

# Page -> (width, dark, medium, height, scale)
SHOTS = {
    "model": (1280, False, "", 1000, 0.75),
    "diff": (768, True, "", 900, 0.9),
    "run": (1280, True, "", 1000, 0.75),
    "qa": (360, False, "", 760, 1.0),
    "bench": (720, True, "print", 900, 0.9),
    "quantize": (1280, False, "", 1500, 0.7),
    "divergence": (1280, True, "", 1000, 0.75),
}
MOST_BYTES = 150_000


def main(model: str, other: str) -> int:
    """Writes docs/pages/NAME.png; 1 where one is too large."""
    large = 0
    with tempfile.TemporaryDirectory() as name, browser() as found:
        for source in (model, other):
            shutil.copy(source, name)
        os.chdir(name)  # a page shows the path that was given
        paths = write_all(Path(), Path(Path(model).name), Path(Path(other).name))
        for page, (width, dark, medium, height, scale) in SHOTS.items():
            found.open(paths[page], width=width, dark=dark, media=medium)
            data = found.picture(height, scale)
            (ROOT / "docs" / "pages" / f"{page}.png").write_bytes(data)
            print(f"{page}.png: {len(data):,} bytes")
            large += len(data) > MOST_BYTES
    return int(large > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
