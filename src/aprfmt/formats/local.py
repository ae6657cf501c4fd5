"""Local paths for programs that open files themselves instead of through a `Source`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def on_this_disk(paths: Sequence[str]) -> list[str]:
    """Local paths of the files; remote ones are downloaded into the hub's local cache."""
    if "aprfmt.formats.hub_files" not in sys.modules:
        return [*paths]
    from aprfmt.formats.hub_files import download

    return [download(path) for path in paths]
