"""How the towers of each class are verified, as docs/towers.md says it: by what its cases hold (tower_steps)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from registry_sources import tower_classes
from tower_models import TowerCase, all_tower_cases

from aprfmt.arch.table import TOWERS
from aprfmt.text import plural

PAGE = Path(__file__).resolve().parents[2] / "docs/towers.md"
HEADING = "## How each class is verified\n"


def cases_of(hf_class: str) -> tuple[TowerCase, ...]:
    """The cases that show a class: its own, or else those of the rows that have it."""
    rows = {row.id for row in TOWERS.values() if hf_class in row.hf_classes}
    cases = tuple(case for case in all_tower_cases() if case.row in rows)
    return tuple(case for case in cases if (case.named or case.model_class) == hf_class) or cases


def is_equal(case: TowerCase) -> bool:
    """Whether the converter gives the same GGUF."""
    return not case.differs and not case.converter_cannot


def is_computed(case: TowerCase) -> bool:
    """Whether mtmd gives the embeddings of transformers."""
    return bool(case.feed) and not case.mtmd_cannot


def page_of(classes: Sequence[str]) -> str:
    """The chapter of the page, heading and all."""
    shown = {name: cases_of(name) for name in classes}
    known = {name: cases for name, cases in shown.items() if cases}
    equal, computed = (
        {name for name, cases in known.items() if any(map(test, cases))} for test in (is_equal, is_computed)
    )
    edited = {name for name in equal if not any(is_equal(case) and not case.patched for case in known[name])}
    said = (
        f"{len(known)} of the {len(classes)} classes whose towers llama.cpp's converter writes have a row. For "
        f"{len(equal)} the GGUF equals the converter's, for {len(computed)} mtmd's embeddings match transformers' "
        f"within 1e-2 (three images or two sounds); {len(equal | computed)} have one or both. {len(edited)} of the "
        "former need a converter edited for other sizes than the published ones. Computed values (roots, sines, "
        "exponentials) may differ from the converter's by a millionth of the largest."
    )
    lines = [
        *wrap(said, 120),
        "",
        "| class | row | llama.cpp's converter | mtmd compared with transformers |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {', '.join(_rows(cases))} | {_converter(cases)} | {_mtmd(cases)} |"
            for name, cases in known.items()
        ),
    ]
    return f"{HEADING}\n" + "\n".join(lines) + "\n"


def _rows(cases: Sequence[TowerCase]) -> Iterator[str]:
    return iter(dict.fromkeys(case.row for case in cases))


def _converter(cases: Sequence[TowerCase]) -> str:
    found = next(filter(is_equal, cases), None)
    if found is None:
        case = cases[0]
        return (
            f"fails: {case.converter_cannot}"
            if case.converter_cannot
            else f"differs: {next(iter(case.differs.values()))}"
        )
    if found.patched:
        return f"equal; {found.patched}"
    return "equal, but for last bits" if found.rounds else "equal"


def _mtmd(cases: Sequence[TowerCase]) -> str:
    if (found := next(filter(is_computed, cases), None)) is not None:
        return plural(len(found.images), "image" if len(found.images[0]) == 2 else "sound")
    if any(case.feed for case in cases):
        return f"not: {next(case.mtmd_cannot for case in cases if case.feed)}"
    if any(case.config_class for case in cases):
        return "not asked"
    return next((f"not: {case.mtmd_cannot}" for case in cases if case.mtmd_cannot), "transformers has no such network")


def write_page() -> None:
    """Writes the chapter into the page, at its end."""
    text = PAGE.read_text().partition(HEADING)[0].rstrip("\n")
    PAGE.write_text(f"{text}\n\n{page_of(tower_classes())}")
