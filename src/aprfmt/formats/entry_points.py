"""Readers and targets of other packages: loaded from entry points, isolated from the command.

Exceptions of a plugin become errors that name its package, and its prints go to standard error: standard output is for
data.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from aprfmt.errors import EXIT_CODES, AprError, MissingDependencyError, Terminated
from aprfmt.model import Model

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

GROUP = "aprfmt.formats"
"""The entry point group of readers and targets."""

_READS, _WRITES = ("detect", "open"), ("layouts",)
_TEXTS = ("name", "container", "label")
_PLAIN: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(_TEXTS, str.__str__),
    "suffixes": lambda values: tuple(map(str.__str__, values)),
    "folder": bool,
    "takes": lambda values: frozenset(map(str.__str__, values)),
}
"""Attribute -> conversion to a plain built-in value."""
_SLOW_SECONDS = 5.0


def load_all() -> tuple[object, ...]:
    """Loads every plugin. Raises MissingDependencyError if one cannot be imported, or neither reads nor writes."""
    from importlib.metadata import distributions, entry_points

    try:
        points = entry_points(group=GROUP)
    except Exception as error:  # of arbitrary files of any package
        broken = next(filter(None, map(_unreadable, distributions())), "an installed package")
        what = f"the entry points of {broken} cannot be read: {type(error).__name__}: {error}"
        raise MissingDependencyError(what, hint=f"reinstall or remove {broken}") from error
    return tuple(map(_Plugin, points))


def _unreadable(package: Distribution) -> str | None:
    """The name of a package whose entry points cannot be read; None if all can."""
    try:
        _ = package.entry_points
    except Exception:
        return _name_of(package) or f"a package in {package.locate_file('')}"
    return None


def _name_of(package: Distribution | None) -> str | None:
    try:
        return package.name if package is not None else None
    except Exception:  # its metadata may be arbitrary
        return None


class _Plugin:
    """A reader, a target or both: the plugin's attributes, and methods that raise only AprErrors."""

    def __init__(self, point: EntryPoint) -> None:
        self._package = _name_of(point.dist) or point.value
        self._entry = point.name
        with self._guarded("cannot be loaded"):
            plugin: object = point.load()
            names = (*_PLAIN, *_READS, *_WRITES)
            found: dict[str, object] = {name: getattr(plugin, name, None) for name in names}
            self._check(found)
            for name in (*_READS, *_WRITES):
                if callable(method := found[name]):
                    setattr(self, name, self._method(name, method))
            for name, plain in _PLAIN.items():
                if found[name] is not None:
                    setattr(self, name, plain(found[name]))

    def _check(self, found: dict[str, object]) -> None:
        """Raises MissingDependencyError."""
        does = [methods for methods in (_READS, _WRITES) if all(callable(found[name]) for name in methods)]
        suffixes = found["suffixes"]
        if not does:
            raise self._error("is neither a reader (detect, open) nor a target (layouts)")
        if not isinstance(found["name"], str) or not isinstance(suffixes, tuple | list):
            raise self._error("needs a name (str) and suffixes (tuple of str)")
        if not all(isinstance(found[name], str | None) for name in _TEXTS):
            raise self._error("needs a container and a label (str)")
        if not all(isinstance(suffix, str) for suffix in suffixes):
            raise self._error("needs suffixes (str)")

    def _method(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            begin = time.monotonic()
            with self._guarded(f"failed in {name}"):
                answer = method(*arguments)
                if name == "detect":
                    answer = bool(answer)
            if name == "open" and not isinstance(answer, Model):
                raise self._error(f"failed in open: it returned a {type(answer).__name__}, not a Model")
            if name == "detect" and (seconds := time.monotonic() - begin) > _SLOW_SECONDS:
                what = f"{self._name()} took {seconds:.1f} s to detect a file's format"
                warnings.warn(what, RuntimeWarning, stacklevel=2)
            return answer

        return call

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        with _stdout_as_stderr():
            try:
                yield
            except (KeyboardInterrupt, Terminated, MemoryError):
                raise
            except BaseException as error:  # third-party code: catch anything, sys.exit too
                if isinstance(error, AprError) and type(error).exit_code in EXIT_CODES:
                    raise
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise self._error(f"{what}: {reason}") from error

    def _name(self) -> str:
        return f"the plugin {self._entry!r} of {self._package}"

    def _error(self, what: str) -> MissingDependencyError:
        hint = f"pip install --upgrade {self._package}, or uninstall it"
        return MissingDependencyError(f"{self._name()} {what}", hint=hint)


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Redirects standard output of the block, from Python or libraries, to standard error."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
