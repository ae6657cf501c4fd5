"""Runs a tokenizer.json: in this process if it is known to be fast, else in a process with limits.

`python -m aprfmt.tokenizer.fast` is that process. A stranger's regex may take years for a line, and the library reacts
to the unexpected with a panic, which prints to standard error before it can be caught.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from aprfmt.errors import AprError, CorruptError, LimitError, MissingDependencyError
from aprfmt.io.child import Child, Service
from aprfmt.io.serving import serve
from aprfmt.limits import MAX_TOKENIZER_SECONDS, TOKENIZER_BYTE_SECONDS, TOKENIZER_MEMORY_BYTES
from aprfmt.tokenizer.growth import check_growth
from aprfmt.tokenizer.known import is_known, load_unique

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library
    from tokenizers.processors import PostProcessor

_T = TypeVar("_T")
_MEMORY_PER_BYTE = 16
_MOST_BYTES = 64 << 20
_REQUEST_CHARS = 1 << 19
"""Texts per request; a longer text has a request of its own."""
_KEPT = 4
_HINT = "download the tokenizer from the model's publisher"


class Encoded(NamedTuple):
    """The ids of a text, and the character range of each, if requested."""

    ids: list[int]
    places: list[tuple[int, int]]


class FastTokenizer(Protocol):
    """Runs a tokenizer.json. Methods raise CorruptError if it fails, LimitError if it takes too much."""

    def encode(self, texts: Sequence[str], *, special: bool = False, places: bool = False) -> list[Encoded]:
        """Encodes each text; with `special`, adds the post-processor's tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, special tokens included."""

    def added(self) -> list[int]:
        """The ids of the added tokens in a text, in order."""

    def drop_post_processor(self) -> None:
        """Removes the post-processor: from then on `special` adds nothing."""


def load(text: bytes) -> FastTokenizer:
    """Loads a tokenizer.json, without truncation and padding.

    Raises CorruptError if invalid, LimitError if loading takes too much or it expands texts without limit,
    MissingDependencyError without `tokenizers`.
    """
    try:
        parsed, is_unique = load_unique(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"tokenizer.json cannot be loaded: {error}") from error
    check_growth(parsed)
    if is_unique and is_known(parsed):
        return _Local(text)
    return _Remote(text)


_OTHERS = (KeyboardInterrupt, SystemExit, MemoryError, UnicodeError)
"""Exceptions that are no failures of the library."""


class _Local:
    """The library in this process."""

    def __init__(self, text: bytes) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingDependencyError(
                "tokenizing text needs the tokenizers package", hint="pip install tokenizers"
            ) from error
        try:
            self._library: _Library = tokenizers.Tokenizer.from_buffer(text)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises nothing more precise, and its panics are not Exceptions
            raise CorruptError(f"tokenizer.json cannot be loaded: {error}") from error
        # A crafted file could make these messages arbitrarily large.
        self._library.no_truncation()
        self._library.no_padding()

    def encode(self, texts: Sequence[str], *, special: bool = False, places: bool = False) -> list[Encoded]:
        try:
            function = self._library.encode_batch if places else self._library.encode_batch_fast
            found = function([*texts], add_special_tokens=special)
            return [Encoded(one.ids, one.offsets if places else []) for one in found]
        except _OTHERS:
            raise
        except BaseException as error:
            raise _failure(error) from error

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return str(self._library.decode([*ids], skip_special_tokens=False))
        except _OTHERS:
            raise
        except BaseException as error:
            raise _failure(error) from error

    def added(self) -> list[int]:
        return sorted(self._library.get_added_tokens_decoder())

    def drop_post_processor(self) -> None:
        self._library.post_processor = None


def _failure(error: BaseException) -> CorruptError:
    """The error for an exception of the library, whose panics are not Exceptions."""
    return CorruptError(f"the tokenizer cannot be run: {error}")


# --- in a process with limits ---


class _Process:
    """The process of one tokenizer.json. It is not restarted: what killed it once would kill it again."""

    def __init__(self, text: bytes) -> None:
        self._text, self._memory = text, TOKENIZER_MEMORY_BYTES + _MEMORY_PER_BYTE * len(text)
        self._failure: LimitError | None = None
        self._loaded: Child | None = None
        threads = str(min(4, os.cpu_count() or 1))
        self.service = Service(
            "aprfmt.tokenizer.fast", seconds=MAX_TOKENIZER_SECONDS, memory=self._memory, most_bytes=_MOST_BYTES,
            byte_seconds=TOKENIZER_BYTE_SECONDS,
            more={"RAYON_NUM_THREADS": threads, "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"},
        )  # fmt: skip

    def ask(self, kind: type[_T], call: str, *arguments: object) -> _T:
        """The answer of one of _CALLS, of type `kind`. Raises AprError."""
        with self.service.lock:
            if self._failure is not None:
                raise self._failure
            try:
                if self.service.start() is not self._loaded:
                    loaded = self.service.start()
                    self._value(["load", self._text.decode("utf-8", "surrogateescape")], type(None))
                    self._loaded = loaded
                return self._value([call, *arguments], kind)
            except LimitError as failure:
                self._failure = failure
                raise

    def _value(self, request: Sequence[object], kind: type[_T]) -> _T:
        return self.service.value(request, kind, "running the tokenizer", path=_NAME, hint=_HINT)


_NAME = "tokenizer.json"
_processes: dict[bytes, _Process] = {}
"""The most recent ones, by digest of the tokenizer.json."""


def _process_of(text: bytes) -> _Process:
    digest = hashlib.sha256(text).digest()
    process = _processes.pop(digest, None) or _Process(text)
    _processes[digest] = process
    while len(_processes) > _KEPT:
        _processes.pop(next(iter(_processes))).service.close()
    return process


class _Remote:
    """The library in a process with limits."""

    def __init__(self, text: bytes) -> None:
        self._process, self._processed = _process_of(text), True
        self._added: list[int] = self._process.ask(list, "added")

    def encode(self, texts: Sequence[str], *, special: bool = False, places: bool = False) -> list[Encoded]:
        found = []
        for some in _portions(texts):
            answer = self._process.ask(list, "encode", some, special, places, self._processed)
            found += [Encoded(ids, [(start, end) for start, end in ranges]) for ids, ranges in answer]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return self._process.ask(str, "decode", [*ids])

    def added(self) -> list[int]:
        return self._added

    def drop_post_processor(self) -> None:
        self._processed = False


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        if some and size + len(text) > _REQUEST_CHARS:
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


class _Server:
    """The state of the process."""

    tokenizer: _Local
    post_processor: PostProcessor | None

    def load(self, text: str) -> None:
        self.tokenizer = _Local(text.encode("utf-8", "surrogateescape"))
        self.post_processor = self.tokenizer._library.post_processor

    def encode(self, texts: list[str], special: bool, places: bool, processed: bool) -> list[Encoded]:
        self.tokenizer._library.post_processor = self.post_processor if processed else None
        return self.tokenizer.encode(texts, special=special, places=places)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def added(self) -> list[int]:
        return self.tokenizer.added()

    def answer(self, request: list[object]) -> object:
        """The reply to [call, argument, ...]: {"ok": value}, or {"error": [class, message, hint]}."""
        call, *arguments = request
        try:
            return {"ok": _CALLS[call](self, *arguments)}
        except AprError as error:
            return {"error": [type(error).__name__, error.message, error.hint]}
        except UnicodeError as error:
            return {"error": [CorruptError.__name__, f"a text is not valid Unicode: {error}", None]}


_CALLS: dict[object, Callable[..., object]] = {
    "load": _Server.load, "encode": _Server.encode, "decode": _Server.decode, "added": _Server.added
}  # fmt: skip

if __name__ == "__main__":
    serve(_Server().answer)
