"""License ids: SPDX expressions as users type them, and warnings for the ids in model cards."""

from __future__ import annotations

import re

from aprfmt.errors import UsageError

# Common values that do not name a license.
_FILLERS = frozenset(("the", "license", "licence", "licensed", "under", "version"))
"""Words around the name of a license."""

_PLACEHOLDERS = ("", "unknown", "proprietary", "tbd", "todo", "n/a", "none", "noassertion", "other")


def is_spdx(text: str) -> bool:
    """Whether `text` is an SPDX license expression, in any case; `LicenseRef-<name>` counts."""
    return spdx_expression(text) is not None


def spdx_expression(text: str) -> str | None:
    """`text` in SPDX spelling; None unless it is an SPDX expression."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    if text.strip().lower() in _PLACEHOLDERS:
        return None
    try:
        return str(canonicalize_license_expression(text.strip()))
    except InvalidLicenseExpression:
        return None


def canonical_license(text: str, flag: str) -> str:
    """`text` in SPDX spelling: "apache-2.0" -> "Apache-2.0".

    Raises UsageError, which names `flag` and the most similar id, unless it is an SPDX expression.
    """
    canonical = spdx_expression(text)
    if canonical is not None:
        return canonical
    if not text.strip():
        raise UsageError(f"{flag} is empty", hint=_hint(text))
    raise UsageError(f"{flag} {text!r} is not an SPDX license id", hint=_hint(text))


def _hint(text: str) -> str:
    own = "use LicenseRef-<name> for a custom license"
    nearest = nearest_id(text)
    return f"the nearest id is {nearest}; {own}" if nearest else f"for instance MIT or Apache-2.0; {own}"


def nearest_id(text: str) -> str | None:
    """The SPDX id most similar to `text`, None if none is."""
    from difflib import get_close_matches

    from packaging.licenses._spdx import LICENSES

    if text.strip().lower() in _PLACEHOLDERS:
        return None
    # "MIT Licence" is MIT, though the word is like "Unlicense".
    words = [word for word in re.split(r"[\s,()]+", text.strip().lower()) if word not in _FILLERS]
    name = "-".join(words).removeprefix("v")
    if name in LICENSES:
        return str(LICENSES[name]["id"])
    found = get_close_matches(name, LICENSES, n=1, cutoff=0.6)
    return LICENSES[found[0]]["id"] if found else None


def license_warnings(text: str | None, name: str | None = None) -> list[str]:
    """A warning if a source's license is not an SPDX id; its spelling is kept.

    `name` is the license name that cards state with `license: other`.
    """
    if text is None or all(is_spdx(part) for part in text.split(",")):
        return []
    called = f" ({name})" if name else ""
    return [f"license {text!r}{called} is not an SPDX id; kept unchanged (apr stamp --license replaces it)"]
