"""Numbers and lists as words for people: pages, tables and messages use the same ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

CONTROLS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""For a regular expression's class: characters that end lines, control terminals, reverse text, or are not text."""

_IEC_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TYPED_UNITS = ((1000, ("kB", "MB", "GB", "TB")), (1024, ("KiB", "MiB", "GiB", "TiB")))
_SI_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_bytes(n: float) -> str:
    """`n` bytes in IEC units, three significant digits: `93.5 MiB`."""
    size, unit = float(n), 0
    while size >= 1023.995 and unit < len(_IEC_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{int(size)} B"
    digits = 2 if size < 9.995 else 1 if size < 999.95 else 0
    return f"{size:.{digits}f} {_IEC_UNITS[unit]}"


def format_limit(n: int) -> str:
    """A size that somebody typed, in the unit that makes it the smallest whole number: `10 MB`, `300 MiB`."""
    units = ((base**power, name) for base, names in _TYPED_UNITS for power, name in enumerate(names, 1))
    whole = [(n // size, name) for size, name in units if n and n % size == 0]
    return "{} {}".format(*min(whole)) if whole else format_bytes(n)


def format_count(n: int) -> str:
    """A count in thousands, millions, billions: `134.5 M`, `7.62 B`; exact below 10,000."""
    if n < 10_000:
        return f"{n:,}"
    for limit, unit in ((1e6, "K"), (1e9, "M"), (1e12, "B"), (1e15, "T")):
        size = n / (limit / 1e3)
        if size < 999.95 or unit == "T":
            return f"{size:.{2 if size < 9.995 else 1}f} {unit}"
    return str(n)


def format_number(number: float) -> str:
    """A number in at most four digits and an SI unit, as axes and tiles show it: `85.2k`, `0.0379`, `3.1e-05`."""
    if not math.isfinite(number):
        return str(number)
    size = abs(number)
    for limit, unit in _SI_UNITS:
        if size >= limit:
            return f"{number / limit:.3g}{unit}" if size < 999.5 * limit else f"{number / limit:.0f}{unit}"
    return f"{number:.3g}" if size < 100 else f"{number:.4g}"


def format_seconds(seconds: float) -> str:
    """A duration: `12 ms`, `3.42 s`, `2 min 05 s`, `1 h 07 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def format_clock(seconds: float) -> str:
    """A duration as a clock shows it, in a fixed width while it runs down: `1:07:05`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def format_age(seconds: float) -> str:
    """How long ago something was: `now`, `40 s`, `12 min`, `5 h`, `3 d`."""
    for limit, size, unit in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if seconds >= 1 else "now"
    return f"{seconds / 86_400:.0f} d"


def format_figure(x: float) -> str:
    """`49,152` of a whole number, `0.02345` and `-1.773` of others: four digits."""
    return f"{x:,.0f}" if float(x).is_integer() else f"{x:,.4g}"


MAX_PERPLEXITY = 1e6
"""Above it a perplexity says no more than that the model predicts nothing; the loss does."""


def format_perplexity(value: float) -> str:
    """A perplexity as `8.166`; one above MAX_PERPLEXITY as its loss: `exp(24.31)`."""
    return f"{value:,.3f}" if value <= MAX_PERPLEXITY else f"exp({math.log(value):.2f})"


def format_setting(value: object) -> str:
    """The value of an option in a table: `yes`, `a.txt, b.txt`, `5e-05`, `-` for none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def plural(n: int, noun: str) -> str:
    """`1 tensor`, `1,234 tensors`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def first_few(names: Iterable[object], n: int = 3, total: int | None = None) -> str:
    """`a, b, c and 4 more`: the first `n` of `names`, which may be the beginning of `total`."""
    known = list(names)
    more = (len(known) if total is None else total) - min(n, len(known))
    return ", ".join(map(str, known[:n])) + (f" and {more} more" if more else "")


def format_shape(shape: Iterable[int]) -> str:
    """`64×576`, or `scalar`."""
    return "×".join(map(str, shape)) or "scalar"


def name_filter(glob: str | None) -> Callable[[str], bool]:
    """What tells whether a name matches `glob`; one without wildcards matches what contains it, None everything."""
    if glob is None:
        return lambda name: True
    pattern = glob if any(c in glob for c in "*?[") else f"*{glob}*"
    return lambda name: fnmatchcase(name, pattern)


def percent(value: float | None) -> str:
    """A fraction as `8.42 %` or `3e-05 %`; None, an infinite one, as `∞`."""
    return "∞" if value is None else "0 %" if value == 0 else f"{100 * value:.3g} %"


def decibels(value: float | None) -> str:
    """`27.4`; a dash where nothing differs, or everything."""
    return "–" if value is None else f"{value:.1f}"


def cosine(value: float | None) -> str:
    """Six digits, and as many nines as it takes where it is all but one."""
    if value is None:
        return "–"
    far = 1 - value
    return f"{value:.6f}" if far >= 1e-6 or far <= 0 else f"1−{far:.0e}"


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading items two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_NOT_SHOWN = re.compile(r"<!--.*?-->|<(script|style)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)


def one_line(body: str, limit: int = 200) -> str:
    """A server's words about an error, as at most one line: the first text of an HTML page, other text joined."""
    if body.lstrip("\ufeff \t\r\n").startswith("<"):
        from html import unescape

        texts = re.split(r"<[^>]*>?", _NOT_SHOWN.sub("", body))
        body = unescape(next((text for text in texts if text.strip()), ""))
    return " ".join(re.sub(f"[{CONTROLS}]", " ", body).split())[:limit]
