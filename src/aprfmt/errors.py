"""Every error of the package, with its exit code and its JSON form.

AprError                         code              exit
├── UsageError(ValueError)       usage             2
│   └── UnknownTensorError(Key)  usage             2
├── NotFoundError(FileNotFound)  not-found         3
├── UnknownFormatError(Value)    unknown-format    3
├── CorruptError(ValueError)     corrupt           4
│   ├── TruncatedError           truncated         4
│   ├── ChecksumError            checksum          4
│   └── LimitError               limit             4
├── UnsupportedError(ValueError) unsupported       4
├── RefusedError(ValueError)     refused           5
│   ├── ExistsError(FileExists)  exists            5
│   └── UnmappedError            unmapped          5
├── MissingDependencyError       missing-dependency 6
├── StorageError(OSError)        storage           7
│   └── ChangedError(Corrupt)    changed           4
├── OutOfMemoryError(Memory)     memory            7
└── RunError(RuntimeError)       run               8
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ClassVar, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

EXIT_CODES = range(2, 9)
"""The exit codes of the table above."""

_LONGEST_TEXT = 800
"""Messages quote file contents, and a name or key in a file may be arbitrarily long."""


def _shortened(text: str) -> str:
    """`text` without its middle if it is too long."""
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}"


class AprError(Exception):
    """What went wrong, where (path, tensor, byte offset) and what to type next.

    Args:
        message: one sentence: what and why.
        path: the file concerned.
        tensor: the tensor concerned.
        offset: byte offset from the start of the file.
        hint: the next thing to try, preferably a command; by default the class's general hint.
        code: overrides the class's code; scripts rely on it.
    """

    code: str = "error"
    exit_code: ClassVar[int] = 4
    usual_hint: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.message = message
        self.path = os.fspath(path) if path is not None else None
        self.tensor = tensor
        self.offset = offset
        self.hint = hint if hint is not None else self.usual_hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        where = [f"tensor {_shortened(repr(self.tensor))}"] if self.tensor is not None else []
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        text = self.message + (f" ({', '.join(where)})" if where else "")
        return f"{self.path}: {text}" if self.path else text

    def to_json(self) -> dict[str, str | int | None]:
        """The `error` object of the JSON envelope."""
        return {name: getattr(self, name) for name in ("code", "message", "path", "tensor", "offset", "hint")}


def error_class(name: str) -> type[AprError]:
    """The class of that name; classes of modules that are not imported are unknown. Raises KeyError."""
    kinds = [AprError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.__name__: kind for kind in kinds}[name]


class UsageError(AprError, ValueError):
    """An invalid option or argument."""

    code = "usage"
    exit_code = 2


class UnknownTensorError(UsageError, KeyError):
    """A model has no tensor of that name; a KeyError too, as of any mapping."""


class NotFoundError(AprError, FileNotFoundError):
    """A file does not exist."""

    code = "not-found"
    exit_code = 3
    usual_hint = "check the path"


class UnknownFormatError(AprError, ValueError):
    """The file exists, but its format is unknown."""

    code = "unknown-format"
    exit_code = 3
    usual_hint = "pass an .apr, .gguf or .safetensors file, or a Hugging Face folder; was the file copied completely?"


class CorruptError(AprError, ValueError):
    """The container violates its format."""

    code = "corrupt"


class TruncatedError(CorruptError):
    """The file ends before the data that its header announces."""

    code = "truncated"
    usual_hint = "the file is incomplete or damaged: copy or download it again"


class ChecksumError(CorruptError):
    """A stored checksum or signature does not match the bytes."""

    code = "checksum"
    usual_hint = "the file is damaged: copy or download it again"


class LimitError(CorruptError):
    """A count, length or depth exceeds its limit."""

    code = "limit"


class UnsupportedError(AprError, ValueError):
    """A well-formed container that this version cannot read or write."""

    code = "unsupported"


class RefusedError(AprError, ValueError):
    """The request would lose data or produce a broken model."""

    code = "refused"
    exit_code = 5


class ExistsError(RefusedError, FileExistsError):
    """The output already exists."""

    code = "exists"


class UnmappedError(RefusedError):
    """A tensor, or a whole architecture, has no name in the target format."""

    code = "unmapped"


class MissingDependencyError(AprError, ImportError):
    """An optional package or a device is missing."""

    code = "missing-dependency"
    exit_code = 6


class StorageError(AprError, OSError):
    """The operating system refused: disk full, permission, I/O error; `errno` of the OSError, if it was one."""

    code = "storage"
    exit_code = 7


class ChangedError(CorruptError, StorageError):
    """A file changed while it was read; like a StorageError, it says nothing about the file's content."""

    code = "changed"
    exit_code = 4
    usual_hint = "run it again when no other process writes to the file"


class OutOfMemoryError(AprError, MemoryError):
    """Out of memory, or at a memory limit of the process."""

    code = "memory"
    exit_code = 7
    usual_hint = "close other programs, or use a machine with more memory"


class RunError(AprError, RuntimeError):
    """Inference, evaluation or training produced no valid result."""

    code = "run"
    exit_code = 8


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; raised so that unfinished outputs are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_OS_HINTS = {
    errno.ENOSPC: "free some space or write to another disk; no partial output is left",
    errno.EDQUOT: "free some space or raise the quota; no partial output is left",
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.EPERM: "check the permissions of the file and of its folder",
    errno.EROFS: "write to another folder",
    errno.EFBIG: "the file exceeds a size limit (ulimit -f, or the file system): try another folder",
}


def storage_error(error: OSError, path: str | os.PathLike[str]) -> AprError:
    """An OSError as the matching AprError (missing files are NotFoundError, the rest StorageError)."""
    if isinstance(error, AprError):
        return error
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError("no such file or folder", path=path)
    reason = error.strerror or type(error).__name__
    found = StorageError(reason, path=path, hint=_OS_HINTS.get(error.errno or 0))
    found.errno = error.errno
    return found


ZERO_BYTE = "a path cannot contain a zero byte"

_NO_MEMORY = (
    *("cannot allocate memory", "failed to map segment", "can't start new thread", "can't allocate memory"),
    *("can't allocate lock", "error return without exception set", "returned null without setting an exception"),
    *("os.pathlike, not posixpath", "os.pathlike or integer, not posixpath", "os.pathlike object, not posixpath"),
)
"""Messages of libraries that have no exception class for it, in lower case; the last five are CPython's, if an
allocation failed while it raised an exception or called a method of a path.
"""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, its cause, the cause of that, and so on; each once, although `raise e from e` makes a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """The error for an exception that is, or was caused by, a lack of memory, unless it is an AprError."""
    for link in causes(error):
        if isinstance(link, AprError):
            return link if isinstance(link, OutOfMemoryError) else None
        is_lacking = isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        if not is_lacking and isinstance(link, ImportError | RuntimeError | SystemError | TypeError):
            is_lacking = any(words in str(link).lower() for words in _NO_MEMORY)
        if is_lacking:
            return _not_enough()
    return None


def _not_enough() -> OutOfMemoryError:
    if (limit := memory_limit()) is None:
        return OutOfMemoryError("not enough memory")
    return OutOfMemoryError(
        f"not enough memory: this process is limited to {limit >> 20} MiB", hint="raise its limit: ulimit -v unlimited"
    )


def memory_limit() -> int | None:
    """The limit of this process's address space in bytes, None without a limit."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def memory_errors(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: turns a lack of memory into OutOfMemoryError."""

    @wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return function(*args, **named)
        except AprError:
            raise
        except Exception as error:
            if (found := out_of_memory(error)) is None:
                raise
            raise found from error

    return call


_words: list[Callable[[str], str]] = []
"""What the public functions word their hints with, the last; none: hints name options of the command line."""


def set_hint_words(words: Callable[[str], str] | None) -> Callable[[str], str] | None:
    """Sets how the public functions word their hints, None as the command line does; returns the previous setting."""
    before = _words[-1] if _words else None
    _words[:] = [] if words is None else [words]
    return before


def worded_errors(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, whose errors have hints for its caller: `force=True` instead of `--force`."""

    @wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return function(*args, **named)
        except AprError as error:
            if error.hint and _words:
                error.hint = _words[-1](error.hint)
            raise

    return call


ONE_FILE = "name the file: "
"""Beginning of the hint that names the only model in a folder."""

COMMAND = re.compile(r"\b(apr|pip|git|torchrun|ssh|aws|gcloud|curl|hf|ollama|docker) [a-z./-]")
"""A command line in a hint, at its beginning."""
_FLAG = re.compile(
    r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)(?: ([A-Z][A-Z0-9_]*\b|\d[\w.]*|'[^']*'|\"[^\"]*\")|=([\w.-]*\w))?"
)
_SWITCHES = re.compile(
    r"allow_(?!changed)\w+|force|plan|strict|repeat|qa|raw|pure|follow_links|deterministic|resume|verify|in_place"
)


def python_words(hint: str) -> str:
    """A hint with the options of a command line as keyword arguments; one that is a command stays as it is."""
    if COMMAND.search(hint):
        return hint

    def argument(match: re.Match[str]) -> str:
        name, value = match[2].replace("-", "_"), match[3]
        if match[1]:
            return f"{name}=False"
        if match[4] is not None:
            return f"{name}={match[4]!r}"
        if value is not None:
            return f"{name}={value}"
        return f"{name}=True" if _SWITCHES.fullmatch(name) else name

    return _FLAG.sub(argument, hint)


set_hint_words(python_words)


@contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError of the block into the matching AprError about `path`; a zero byte is a UsageError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, AprError):
            raise
        raise storage_error(error, path) from error
    except ValueError as error:
        if isinstance(error, AprError) or "\0" not in str(os.fspath(path)):
            raise
        raise UsageError(ZERO_BYTE, path=path) from error
