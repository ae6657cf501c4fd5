"""The one place that writes to stdout and stderr: data on stdout, everything else on stderr.

mode     stdout                         stderr
human    text and tables                warnings, hints, errors, progress (on a terminal)
json     exactly one JSON object        warnings that the object does not hold
quiet    nothing but asked-for data     errors
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from aprfmt.errors import COMMAND, AprError, StorageError
from aprfmt.text import CONTROLS, format_bytes, format_count, format_seconds
from aprfmt.types import Json

if TYPE_CHECKING:
    from aprfmt.io.pipe import Progress, StartProgress
    from aprfmt.io.remote_file import Traffic

_INTERVAL_S, _FIRST_S = 0.1, 0.5
_BAR_COLUMNS, _LEAST_BAR_COLUMNS = 24, 4
_LEAST_NAME = 32
"""Minimum columns for a name before other columns are dropped: shorter tensor names become ambiguous."""
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def printable(text: str) -> str:
    """`text` with everything that could control a terminal escaped (controls, direction marks, lone surrogates)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(text: str) -> str:
    return text.encode("unicode_escape", "backslashreplace").decode()


_DRIVES = re.compile(
    f"({'|'.join(re.escape(f'{chr(27)}[{code}m') for code in ('0', *_STYLES.values()))})|(?![\t\n])[{CONTROLS}]"
)
"""The styles of `Console.style`, or a character that drives a terminal or reverses text; lines and tabs do neither."""


def harmless(text: str, *, styled: bool = False) -> str:
    """Multi-line `text` with terminal control characters escaped; keeps our own styles if `styled`.

    Keeps other invisible characters: scripts and emoji need them.
    """
    return _DRIVES.sub(lambda found: found[0] if styled and found[1] else _escaped(found[0]), text)


def plain(value: object) -> Json:
    """`value` as strict JSON data: no NaN or infinity, string keys, lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    return [plain(item) for item in value] if isinstance(value, Iterable) else str(value)


def as_text(value: object) -> str:
    """A metadata value for people: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def is_of_mlx(arguments: Sequence[str]) -> bool:
    """Whether a command line is one of mlx_lm.convert, where `-q` means quantize."""
    names = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return bool({"--hf-path", "mlx-lm.convert", "mlx-lm"} & names) or arguments[:1] == ["mlx"]


_TYPE = re.compile(r"i?q\d\w*|tq\d\w*|b?f16|fp?\d+\w*|mxfp4\w*|nvfp4\w*|int\d", re.IGNORECASE)


def quantizes(arguments: Sequence[str]) -> bool:
    """Whether `-q` is followed by a type, as in `ollama create -q q4_K_M`."""
    after = dict(pairwise(arguments)).get("-q", "")
    return _TYPE.fullmatch(after) is not None


class Console:
    """The output of a command: one object per process; `configure` sets its mode before parsing."""

    def __init__(self) -> None:
        self.mode = "human"
        self.command = ""
        self.arguments: Sequence[str] = ()
        self.failure_exit: int | None = None
        self.waiting = 0.0
        """When the line of a work in progress was written; 0: there is none."""
        self.typed: Sequence[str] = ()
        """The command line as typed, which may be one of another program; `arguments` is ours for it."""
        self.has_streamed = False
        """Whether text was streamed to standard output."""
        self._answered = False
        self._screen = threading.RLock()  # else the line of a work in progress comes between

    @property
    def data_stream(self) -> TextIO:
        """Standard output."""
        return sys.stdout

    @property
    def error_stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    def configure(self, arguments: Sequence[str]) -> None:
        """Sets the mode from the raw command line, so that it applies to usage errors, too."""
        self.arguments = arguments
        words = arguments[: arguments.index("--")] if "--" in arguments else arguments
        quiet = "--quiet" in words or ("-q" in words and not is_of_mlx(words) and not quantizes(words))
        self.mode = "json" if "--json" in words else "quiet" if quiet else "human"
        self.command = next((word for word in words if not word.startswith("-")), "")
        # `diff` answers 1 for "different", so its failures must be 2 whatever their cause.
        self.failure_exit = 2 if self.command == "diff" else None
        self._answered = self.has_streamed = False
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    def colour(self, stream: TextIO) -> bool:
        """Whether `stream` gets colour: NO_COLOR and FORCE_COLOR first, then whether it is a terminal."""
        if os.environ.get("NO_COLOR"):
            return False
        if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
            return True
        return stream.isatty() and os.environ.get("TERM") != "dumb"

    def style(self, text: str, style: str, stream: TextIO | None = None) -> str:
        """`text` in a style of _STYLES if the stream (default: stdout) gets colour."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colour(stream or self.data_stream) else text

    def result(self, body: Mapping[str, object], lines: Iterable[str] = ()) -> None:
        """Prints a command's result: the JSON object in json mode, `lines` in human mode.

        Quiet mode prints nothing on success; the exit code is the result.
        """
        if self.mode == "json":
            self.json_object(body)
        elif self.mode == "human":
            for line in lines:
                self._put(harmless(f"{line}\n", styled=True))
            if (hub := _hub_traffic()) is not None:
                self.progress_line(self.style(hub.sentence(), "dim", self.error_stream))

    def json_object(self, body: Mapping[str, object]) -> None:
        """Prints the JSON object in any mode, for commands with their own option for JSON."""
        hub = _hub_traffic()
        more = {"hub": hub.to_json()} if hub is not None else {}
        self._json({"schema": f"apr.{self.command}/1", "ok": True, **body, **more})

    def line(self, text: str = "") -> None:
        """One line of text on stdout, in human mode only."""
        if self.mode == "human":
            self._put(harmless(f"{text}\n", styled=True), flush=True)

    def stream(self, text: str) -> None:
        """Streams requested text to stdout, with terminal control characters escaped.

        Also in a pipe, since its reader may be `less -R` or a log. `--json` has the unescaped text.
        """
        self.has_streamed = self.has_streamed or bool(text)
        self._put(harmless(text), flush=True)

    def warning(self, text: str) -> None:
        """A warning on stderr; the JSON object is expected to hold it too."""
        if self.mode == "human":
            self.clear_wait_line()
            self._tell("warning:", "yellow", text)

    def progress_line(self, text: str) -> None:
        """A progress message on stderr, unless --quiet."""
        if self.mode != "quiet":
            with self._screen:
                self.clear_wait_line()
                print(printable(text), file=self.error_stream, flush=True)

    def wait_line(self, verb: str, seconds: float) -> None:
        """Shows the work in progress on a line that the next output replaces."""
        passed = f" {seconds:.0f} s" if seconds >= 2 else ""
        with self._screen:
            begin, end = ("\r", "\x1b[K") if self.waiting else ("", "")
            self.waiting = time.perf_counter()
            self.error_stream.write(f"{begin}{verb} …{passed}{end}")
            self.error_stream.flush()

    def clear_wait_line(self) -> None:
        """Removes the line of `wait_line`."""
        with self._screen:
            if self.waiting:
                self.waiting = 0.0
                self.error_stream.write("\r\x1b[2K")
                self.error_stream.flush()

    def hint(self, text: str) -> None:
        """What to type next, on stderr in human mode; further lines explain the first."""
        if self.mode == "human":
            self._tell("hint:", "cyan", text)

    def note(self, text: str) -> None:
        """How the command line was interpreted, or what in it has no effect, on stderr in human mode."""
        if self.mode == "human":
            self._tell("note:", "cyan", text)

    def failure(self, error: AprError, body: Mapping[str, object] | None = None) -> None:
        """Prints the error envelope merged with `body` in json mode, else `error: path: message (where)` and a hint."""
        if self.mode == "json" and not self._answered:
            self._json({"schema": "apr.error/1", "ok": False, "error": error.to_json(), **(body or {})})
            return
        self._tell("error:", "red", str(error).replace("\n", "\\n"))
        if error.hint:
            self.hint(error.hint)

    def _tell(self, label: str, style: str, text: str) -> None:
        """Lines on stderr behind a label; a terminal gets prose wrapped, and commands whole, to be copied."""
        import textwrap

        stream, lines = self.error_stream, [printable(line) for line in text.split("\n")]
        if stream.isatty():
            room = max(20, width(stream) - len(label) - 1)
            lines = [
                part
                for line in lines
                for part in (
                    [line]
                    if COMMAND.match(line)
                    else textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
                )
            ]
        indent = "\n" + " " * (len(label) + 1)
        stream.write(f"{self.style(label, style, stream)} {indent.join(lines)}\n")

    def _json(self, body: Mapping[str, object]) -> None:
        # ASCII escapes: correct in every locale, and the only JSON form of names that are not valid Unicode.
        text = json.dumps(plain(body), allow_nan=False)
        self._answered = True
        self._put(text + "\n")

    def _put(self, text: str, *, flush: bool = False) -> None:
        """Writes to stdout. Raises BrokenPipeError when nobody reads it, StorageError when it is full."""
        try:
            with self._screen:
                self.clear_wait_line()
                self.data_stream.write(text)
                if flush:
                    self.data_stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write to standard output: {error.strerror}") from error


def _hub_traffic() -> Traffic | None:
    """Traffic with the hub; None if no model was read from it."""
    module = sys.modules.get("aprfmt.io.remote_file")
    found: Traffic | None = module.traffic if module is not None else None
    return found if found is not None and found.origins else None


out = Console()


def width(stream: TextIO | None = None) -> int:
    """Columns: $COLUMNS, else the width of the terminal `stream` (default: stdout), else 80; at least 40."""
    try:
        columns = os.get_terminal_size((stream or out.data_stream).fileno()).columns
    except (OSError, ValueError):  # no terminal, or no file at all
        columns = 0
    asked = os.environ.get("COLUMNS", "")
    return max(40, int(asked) if asked.isdecimal() and int(asked) else columns or 80)


def shorten(text: str, columns: int) -> str:
    """`text` in at most `columns` columns, shortened in the middle."""
    if len(text) <= columns:
        return text
    head = (columns - 1) // 2
    return f"{text[:head]}…{text[len(text) - (columns - 1 - head) :]}"


def _shorten_names(names: Sequence[str], columns: int) -> list[str]:
    """Names in at most `columns` columns: what the long ones begin with alike goes first, then their middle."""
    long = [name for name in names if len(name) > columns]
    alike = os.path.commonprefix(long).rpartition(".")[0] + "." if len(long) > 1 else ""  # noqa: RUF071
    return [
        name if len(name) <= columns else shorten(f"…{name.removeprefix(alike)}" if len(alike) > 1 else name, columns)
        for name in names
    ]


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str = "",
    indent: int = 2,
    spare: str = "",
    wrap: int = 0,
) -> list[str]:
    """Aligned columns under a dim header, fitted to the width of a terminal.

    If they are too wide, the columns `spare` are hidden in this order, which a last line reports; then the first column
    is shortened and, with `wrap`, the last one wrapped to at least `wrap` characters. `right` (right-aligned) and
    `spare` are header names separated by spaces.
    """
    import textwrap

    cells = [row if "".join(row).isprintable() else [printable(cell) for cell in row] for row in rows]
    columns = dict(zip(header, zip(*cells, strict=True), strict=True)) if cells else dict.fromkeys(header, ())
    widths = {name: max(map(len, (name, *column))) for name, column in columns.items()}
    first, last, gone = header[0], header[-1], list[str]()
    shrinks = widths[last] - min(widths[last], wrap or sys.maxsize)
    room = width() - indent if out.data_stream.isatty() else sys.maxsize

    def lacking(least: int) -> int:
        others = sum(widths.values()) - widths[first] - shrinks
        return others + min(widths[first], least) + 2 * (len(widths) - 1) - room

    for name in spare.split():
        if name in widths and lacking(_LEAST_NAME) > 0:
            gone.append(name)
            del widths[name]
    widths[first] = max(min(widths[first], 16), widths[first] - max(0, lacking(sys.maxsize)))
    if wrap:
        widths[last] -= min(shrinks, max(0, shrinks + lacking(sys.maxsize)))
    numeric = set(right.split())
    form = " " * indent + "  ".join(f"%{w}s" if name in numeric else f"%-{w}s" for name, w in widths.items())
    names = _shorten_names(columns[first], widths[first])
    lines = list(zip(names, *(columns[name] for name in widths if name != first), strict=True))
    if wrap:
        parts = ((line, textwrap.wrap(line[-1], widths[last]) or [""]) for line in lines)
        lines = [
            (*(line[:-1] if i == 0 else [""] * (len(line) - 1)), part)
            for line, of in parts
            for i, part in enumerate(of)
        ]
    hidden = [out.style(f"{' ' * indent}hidden at {width()} columns: {', '.join(gone)}", "dim")] if gone else []
    return [out.style((form % tuple(widths)).rstrip(), "dim"), *((form % line).rstrip() for line in lines), *hidden]


def pairs(rows: Iterable[tuple[str, str]], *, indent: int = 2, label: int = 15) -> list[str]:
    """`label  value` lines, values aligned and wrapped at the terminal's width; a command stays whole, to be copied."""
    import textwrap

    lines = []
    room = max(20, width() - indent - label - 2)
    for name, value in rows:
        text = printable(value)
        wraps = COMMAND.match(text) is None and text != ""
        parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) if wraps else [text]
        lines.append(" " * indent + out.style(name.ljust(label), "dim") + "  " + parts[0])
        lines += [" " * (indent + label + 2) + part for part in parts[1:]]
    return lines


def with_page(
    body: dict[str, object], lines: Iterable[str], output: Path | None
) -> tuple[dict[str, object], Iterable[str]]:
    """A command's result with the path of the HTML report, if one was written."""
    if output is None:
        return body, lines
    return body | {"output": str(output)}, [*lines, *pairs([("wrote", str(output))], indent=0)]


def wrapped(text: str, *, indent: int = 0) -> list[str]:
    """A sentence wrapped to the terminal's width; one line if piped."""
    import textwrap

    if not out.data_stream.isatty():
        return [" " * indent + text]
    room = max(20, width() - indent)
    return [" " * indent + line for line in textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)]


@contextmanager
def progress_bar(verb: str, amount: Callable[[float], str] = format_bytes) -> Iterator[StartProgress | None]:
    """A progress bar with rate and ETA on stderr, for the `progress` parameter of the package's functions.

    `amount` formats the count; the default is bytes.

    Yields None without a bar: stderr is not a terminal, or a dumb one, or with --json or --quiet.
    """
    if out.mode != "human" or not out.error_stream.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    drawn, begun, over = 0.0, time.perf_counter(), threading.Event()
    lock = threading.Lock()

    def tell() -> None:
        """Names work that has shown nothing within the first second, and its seconds, until a bar is drawn."""
        pause = _FIRST_S
        while not over.wait(pause):
            pause = 1.0
            with lock:
                if drawn or over.is_set():
                    return
                out.wait_line(verb, time.perf_counter() - begun)

    waiting = threading.Thread(target=tell, daemon=True)
    waiting.start()

    def start(total: int) -> Progress:
        done, began = 0, time.monotonic()

        def advance(n_bytes: int, label: str) -> None:
            nonlocal done, drawn
            done += n_bytes
            now = time.monotonic()
            if now - drawn >= _INTERVAL_S:
                text = _bar(verb, done, total, max(now - began, 1e-9), label, amount)
                with lock:
                    drawn, out.waiting = now, 0.0
                    out.error_stream.write("\r" + text + "\x1b[K")
                    out.error_stream.flush()

        return advance

    try:
        yield start
    finally:
        with lock:
            over.set()
            if drawn:
                out.error_stream.write("\r\x1b[2K")
                out.error_stream.flush()
            out.clear_wait_line()


def tokens(n: float) -> str:
    """Counts of tokens, for a bar."""
    return f"{format_count(round(n))} tokens"


def _bar(
    verb: str, done: int, total: int, elapsed: float, label: str, amount: Callable[[float], str] = format_bytes
) -> str:
    share = min(1.0, done / total) if total else 1.0
    rate = done / elapsed
    left = format_seconds((total - done) / rate) if rate and share < 1 else "0 s"
    numbers = f"{share:4.0%} {amount(done)}/{amount(total)} {amount(rate)}/s {left}"
    columns = width(out.error_stream) - 1
    # In a narrow terminal, drop the bar first, then the rate and the remaining time.
    bar = min(_BAR_COLUMNS, columns - len(verb) - len(numbers) - 2)
    if bar < _LEAST_BAR_COLUMNS:
        return f"{verb} {numbers}" if len(verb) + len(numbers) < columns else numbers.strip()[:columns]
    filled = round(share * bar)
    text = f"{verb} {'█' * filled}{'░' * (bar - filled)} {numbers}"
    room = columns - len(text) - 2
    return f"{text}  {shorten(printable(label), room)}" if label and room >= 12 else text
