"""Parquet files, read in a process with limits: `texts.parquet_rows`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from aprfmt.errors import LimitError
from aprfmt.io.child import Service
from aprfmt.limits import (
    MAX_PARQUET_SECONDS,
    MAX_RECORD_BYTES,
    MAX_UNPACKED_AHEAD,
    MAX_UNPACKED_RATIO,
    PARQUET_MEMORY_BYTES,
)
from aprfmt.texts.parquet_rows import ANSWER_CHARS

_MOST_BYTES = 12 * (ANSWER_CHARS + MAX_RECORD_BYTES)
"""Bytes of an answer: a control character takes six bytes of JSON, plus one for nested text."""
_ROW_BYTES = 64
"""Minimum size of a row for the limits."""
_HINT = "rewrite it with smaller row groups, or use .jsonl"
_idle: list[Service] = []
"""The process that read the last file, reused for the next one: starting it takes as long as reading 20 MB."""


@contextmanager
def _service() -> Iterator[Service]:
    """A process for one file: several are read alternately."""
    own = _idle.pop() if _idle else Service(
        "aprfmt.texts.parquet_rows", seconds=MAX_PARQUET_SECONDS, memory=PARQUET_MEMORY_BYTES, most_bytes=_MOST_BYTES
    )  # fmt: skip
    try:
        yield own
    finally:
        if _idle:
            own.close()
        else:
            _idle.append(own)


_T = TypeVar("_T")


class ParquetRows:
    """The rows of a file.

    Args:
        path: the file.
        choose: returns the columns to read, given all column names.

    Attributes:
        part: how much of the file was read, 0 to 1.
    """

    def __init__(self, path: Path, choose: Callable[[list[str]], list[str]]) -> None:
        self._path, self._choose = path, choose
        self.part = 0.0

    def __iter__(self) -> Iterator[str | None]:
        """The JSON text of each row; None for one of more than MAX_RECORD_BYTES characters.

        Raises LimitError for a file that takes too much memory or time, or unpacks to far more than its size;
        CorruptError, MissingDependencyError, StorageError.
        """
        size, given, number = self._path.stat().st_size, 0, 0
        with _service() as service:
            names, n_rows = self._ask(service, list, "open", os.path.abspath(self._path))
            self._ask(service, type(None), "columns", self._choose(names))
            while rows := self._ask(service, list, "rows"):
                for row in rows:
                    number += 1
                    self.part = min(1.0, number / max(1, n_rows))
                    given += max(_ROW_BYTES, len(row or ""))
                    yield row
                if given > MAX_UNPACKED_RATIO * size + MAX_UNPACKED_AHEAD:
                    message = (
                        f"{size:,} bytes decompress to {given:,} or more; the limit is "
                        f"{MAX_UNPACKED_RATIO} times their size"
                    )
                    raise LimitError(message, path=self._path, hint="convert it to .jsonl if you trust it")

    def _ask(self, service: Service, kind: type[_T], call: str, *arguments: object) -> _T:
        task = "reading a row group" if call == "rows" else "reading its schema"
        return service.value([call, *arguments], kind, task, path=self._path, hint=_HINT)
