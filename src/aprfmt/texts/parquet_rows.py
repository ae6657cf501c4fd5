"""Rows of Parquet files: `python -m aprfmt.texts.parquet_rows` is the process in which pyarrow reads them.

A Parquet file's claims about its pages and dictionaries determine how much pyarrow allocates, so it runs within the
limits of `io.serving`. Each row is sent as the text of a JSON object, which the parent parses like a line of JSON
lines.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from aprfmt.errors import AprError, CorruptError, MissingDependencyError, storage_error
from aprfmt.io.serving import serve
from aprfmt.limits import MAX_RECORD_BYTES

ANSWER_CHARS = 4 << 20
"""Characters of rows per answer; the row that exceeds it is the last one."""

_MOST_ROWS = 256
_BUFFER_BYTES = 1 << 20
_open: list[tuple[Any, Iterator[str | None]]] = []
"""The open file and its rows."""


def _answer(request: list[object]) -> object:
    """The reply to ["open", path], ["columns", names] or ["rows"]: {"ok": value}, or {"error": [class, message, hint]}.

    "open" gives [column names, number of rows]; "rows" the next rows, none at the end; a row of more than
    MAX_RECORD_BYTES characters is null.
    """
    call, *arguments = request
    try:
        return {"ok": _CALLS[call](*arguments)}
    except AprError as error:
        return {"error": [type(error).__name__, error.message, error.hint]}
    except MemoryError:
        raise
    except Exception as error:  # pyarrow has many classes, and OSError for damaged pages
        if isinstance(error, OSError) and error.errno is not None:
            failed = storage_error(error, str(arguments[0]) if arguments else "")
            return {"error": [type(failed).__name__, failed.message, failed.hint]}
        return {"error": [CorruptError.__name__, f"not a complete Parquet file: {error}", None]}


def _start(path: str) -> object:
    _open.clear()
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependencyError(
            "reading Parquet needs pyarrow", hint="pip install pyarrow, or use .jsonl"
        ) from error
    # A column is read in chunks, however large its row groups are.
    file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    _open.append((file, iter(())))
    return [file.schema_arrow.names, file.metadata.num_rows]


def _choose(columns: list[str]) -> None:
    file, _ = _open.pop()
    _open.append((file, _rows(file, columns)))


def _rows(file: Any, columns: list[str]) -> Iterator[str | None]:
    n_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
    of_a_row = max(1, n_bytes // max(1, file.metadata.num_rows))
    n_rows = max(1, min(_MOST_ROWS, ANSWER_CHARS // of_a_row))
    for batch in file.iter_batches(batch_size=n_rows, columns=columns, use_threads=False):
        for row in batch.to_pylist():
            text = json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False, default=_other)
            yield text if len(text) <= MAX_RECORD_BYTES else None


def _plain(value: object) -> object:
    """A column's value; types that records cannot contain become an empty object instead of text."""
    return value if value is None or isinstance(value, str | list | dict) else {}


def _other(value: object) -> object:
    """Types that JSON lacks: a date becomes text, bytes are omitted."""
    return {} if isinstance(value, bytes) else str(value)


def _next() -> list[str | None]:
    found: list[str | None] = []
    n_chars = 0
    for text in _open[0][1]:
        found.append(text)
        n_chars += len(text or "")
        if n_chars >= ANSWER_CHARS or len(found) >= _MOST_ROWS:
            break
    return found


_CALLS: dict[object, Callable[..., object]] = {"open": _start, "columns": _choose, "rows": _next}


def _main() -> None:
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = (
        "system"  # other allocators reserve more address space than the limit allows
    )
    with suppress(ImportError):  # reported by the first answer
        pyarrow = importlib.import_module("pyarrow")
        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        importlib.import_module("pyarrow.parquet")
    serve(_answer)


if __name__ == "__main__":
    _main()
