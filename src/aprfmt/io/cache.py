"""A folder of files that can be made again: found by a key, made by one process at a time, the oldest removed.

$APR_CACHE, else $XDG_CACHE_HOME/aprfmt, else ~/.cache/aprfmt
    KIND/KEY.SUFFIX       complete files, used last at their time of modification
    KIND/KEY.SUFFIX.lock  held while one is made
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from aprfmt.errors import StorageError, UsageError

try:
    import fcntl
except ImportError:  # Windows: two processes may make the same file, and the later one stays
    fcntl = None  # type: ignore[assignment]

CACHE_VARIABLE = "APR_CACHE"
"""Environment variable: the folder."""


def cache_home(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of everything that is cached; it need not exist. Raises UsageError without a home."""
    env = os.environ if environment is None else environment
    if env.get(CACHE_VARIABLE):
        return _expanded(env[CACHE_VARIABLE])
    return _expanded(env.get("XDG_CACHE_HOME") or "~/.cache") / "aprfmt"


def _expanded(path: str) -> Path:
    """`path` with its ~ as the folder of the user. Raises UsageError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            f"the cache cannot be placed: {path} names the home of a user who has none",
            hint=f"{CACHE_VARIABLE}=FOLDER names one",
        ) from None


class CacheFolder:
    """The files of one kind.

    Args:
        kind: the name of the folder below cache_home().
    """

    def __init__(self, kind: str) -> None:
        self.path = cache_home() / kind

    @contextmanager
    def make(self, name: str) -> Iterator[tuple[Path, bool]]:
        """The path of the file `name`, and whether it is there; if not, nobody else makes it meanwhile.

        A file that is there becomes the one that was used last. Raises StorageError.
        """
        target = self.path / name
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(f"{target}.lock", "ab")  # noqa: SIM115
        except OSError as error:
            raise StorageError(
                f"the cache cannot be written: {error.strerror}",
                path=self.path,
                hint=f"{CACHE_VARIABLE}=FOLDER names another one",
            ) from error
        with lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            found = target.is_file()
            if found:
                with suppress(OSError):  # a cache that others own may be read
                    os.utime(target)
            yield target, found

    def trim(self, max_bytes: int, keep: Path) -> list[Path]:
        """Removes the files that were not used for longest until the rest has at most `max_bytes`; those removed.

        `keep` stays, whatever its size.
        """
        files = []
        with suppress(FileNotFoundError):
            for path in self.path.iterdir():
                with suppress(OSError):
                    if path.suffix != ".lock":
                        status = path.stat()
                        files.append((status.st_mtime_ns, status.st_size, path))
        total, removed = sum(size for _, size, _ in files), []
        for _, size, path in sorted(files):
            if total <= max_bytes:
                break
            if path != keep:
                with suppress(OSError):
                    path.unlink()
                    Path(f"{path}.lock").unlink(missing_ok=True)
                    total -= size
                    removed.append(path)
        return removed
