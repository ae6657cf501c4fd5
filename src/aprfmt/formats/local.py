"""Files for those who read them by a path of their own, and not through a `Source`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def on_this_disk(paths: Sequence[str]) -> list[str]:
    """The same files, for programs that read them by themselves: those of the hub are fetched into its local cache."""
    if "aprfmt.formats.hub_files" not in sys.modules:
        return [*paths]
    from aprfmt.formats.hub_files import download

    return [download(path) for path in paths]
