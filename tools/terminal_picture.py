"""Draws what commands print on a terminal as an SVG: `python tools/terminal_picture.py OUT.svg FOLDER 'COMMAND' ...`.

The README's picture, docs/tour.svg, is of `demo-output` after `make demo`; a test compares it with what its commands
print.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ANSI = re.compile(r"\x1b\[([\d;]*)m")
_COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff", "2": "#9da7b3"}
_TEXT, _PROMPT, _BACKGROUND = "#e6edf3", "#7ee787", "#0d1117"
_COLUMNS, _SIZE, _CHARACTER, _LINE, _MARGIN = 80, 14, 8.43, 19, 18


def picture(commands: Sequence[str], folder: Path) -> str:
    """The SVG of `commands` run one after the other in `folder`, each below a prompt."""
    lines = []
    for command in commands:
        lines.append(f'<tspan fill="{_PROMPT}">$</tspan> <tspan font-weight="bold">{html.escape(command)}</tspan>')
        lines += [_spans(line) for line in _output(command, folder).splitlines()]
    width, height = round(_COLUMNS * _CHARACTER) + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    rows = "\n".join(
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * (n + 1) - 5}" xml:space="preserve">{line}</text>'
        for n, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="{_SIZE}" '
        f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" fill="{_TEXT}">\n'
        f"<title>{html.escape('; '.join(commands))}</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="{_BACKGROUND}"/>\n{rows}\n</svg>\n'
    )


def _output(command: str, folder: Path) -> str:
    env = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(_COLUMNS)}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def _spans(line: str) -> str:
    """A line of a terminal with its colours as elements."""
    spans, style = "", ""
    parts = _ANSI.split(line)
    for n, part in enumerate(parts):
        if n % 2:
            style = "" if part in ("", "0") else f"{style};{part}"
        elif part:
            spans += _span(part, set(style.split(";")) - {""})
    return spans


def _span(text: str, codes: set[str]) -> str:
    look = [f'fill="{_COLOURS[code]}"' for code in sorted(codes) if code in _COLOURS]
    look += ['font-weight="bold"'] if "1" in codes else []
    return f"<tspan {' '.join(look)}>{html.escape(text)}</tspan>" if look else html.escape(text)


if __name__ == "__main__":
    target, place, *typed = sys.argv[1:]
    Path(target).write_text(picture(typed, Path(place)), encoding="utf-8")
