"""The skeleton of an HTML page that stands alone: no network, no libraries, light and dark, readable on a phone.

Every function gives a piece of HTML; text from outside is escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--text:#1b1f27;--soft:#5f6875;--line:#dfe3e9;--grid:#e9ecf1;
--c0:#2563eb;--c1:#c2410c;--c2:#0f8a6a;--c3:#7c3aed;--good:#0f8a55;--bad:#c62828;--warn:#b45309}
@media (prefers-color-scheme:dark){:root{--page:#0f1217;--card:#181c23;--text:#e7eaf0;--soft:#99a3b3;--line:#2b323d;
--grid:#242a34;--c0:#6ea0ff;--c1:#ff9a5c;--c2:#3fd0a4;--c3:#b99cff;--good:#4ccb8a;--bad:#ff7b72;--warn:#f0b152}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1280px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.55rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:32px 0 10px}
p{margin:.35rem 0}
.soft,.lead small{color:var(--soft)}
.lead{font-size:1.15rem;margin:.5rem 0 0}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.pill{display:inline-block;vertical-align:middle;font-size:.78rem;font-weight:600;line-height:1;padding:5px 10px;
border-radius:99px;border:1px solid currentColor;margin-left:8px;white-space:nowrap}
.track{height:6px;border-radius:3px;background:var(--line);margin:14px 0 0;overflow:hidden}
.track i{display:block;height:100%;background:var(--c0)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px;margin:20px 0 0}
.tile,.card,figure{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:12px 14px}
.tile span{display:block;color:var(--soft);font-size:.82rem}
.tile b{font-size:1.4rem;font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile small{display:block;font-size:.82rem;color:var(--soft)}
.tile small.good{color:var(--good)}.tile small.bad{color:var(--bad)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));gap:14px}
figure{margin:0;padding:12px 12px 6px;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;font-size:.84rem;color:var(--soft)}
figcaption b{color:var(--text);font-size:.95rem;margin-right:auto}
figcaption i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
figcaption i.dot{width:8px;height:8px;border-radius:50%}
figure output{display:block;white-space:pre-wrap;min-height:1.5em;font-size:.8rem;
color:var(--soft);font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.card{padding:4px 14px;overflow-x:auto}.card+.grid{margin-top:14px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}
tr:last-child>td{border-bottom:0}
td:not([class]):last-child{min-width:7em}
td.n,th.n{text-align:right;white-space:nowrap}
td.code{white-space:pre-wrap;font:.82rem/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
details{margin-top:10px}
summary{cursor:pointer;color:var(--soft);padding:4px 0}
footer{margin-top:36px;color:var(--soft);font-size:.82rem}
@media (max-width:600px){main{padding:18px 12px 32px}svg text{font-size:13px}.tile b{font-size:1.2rem}
.tiles{grid-template-columns:repeat(2,1fr);gap:8px}h1{font-size:1.25rem}.pill{margin-left:0}}
@media print{body{background:none}figure,.card{break-inside:avoid}}
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """A whole document with `parts` in its body; `style` and `script` are trusted text."""
    body = "\n".join(part for part in parts if part)
    code = f"<script>{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{code}</body>\n</html>\n"
    )


def text(value: object) -> str:
    """`value` as text that is safe inside an element and inside a quoted attribute."""
    words = str(value).encode("utf-8", "replace").decode()
    return escape(
        "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words)
    )


def heading(words: str) -> str:
    """The title of a section."""
    return f"<h2>{text(words)}</h2>"


def tiles(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Big numbers: (label, value, note, "good" | "bad" | "" as the note's colour)."""
    cells = (
        f"<div class=tile><span>{text(label)}</span><b>{text(value)}</b>"
        + (f'<small class="{tone}">{text(note)}</small>' if note else "")
        + "</div>"
        for label, value, note, tone in rows
    )
    return f"<div class=tiles>{''.join(cells)}</div>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "", code: str = "") -> str:
    """A table in a card; `right` and `code` name columns (by header, separated by |) of numbers and of code."""
    numeric, coded = ({name for name in names.split("|") if name} for names in (right, code))
    kinds = ["n" if name in numeric else "code" if name in coded else "" for name in header]

    def cells(tag: str, row: Sequence[str]) -> str:
        marked = (f' class="{kind}"' if kind and (tag == "td" or kind == "n") else "" for kind in kinds)
        return "".join(f"<{tag}{mark}>{text(cell)}</{tag}>" for mark, cell in zip(marked, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=card><table><tr>{cells('th', header)}</tr>{body}</table></div>" if body else ""


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names with their values, in a card; "" where there are none."""
    body = "".join(f"<tr><th>{text(name)}</th><td class=code>{text(value)}</td></tr>" for name, value in rows)
    return f"<div class=card><table>{body}</table></div>" if body else ""


def fold(words: str, inner: str) -> str:
    """`inner` behind a line that opens it."""
    return f"<details><summary>{text(words)}</summary>{inner}</details>" if inner else ""


def grid(pieces: Iterable[str]) -> str:
    """Figures side by side, as many as fit."""
    inner = "\n".join(piece for piece in pieces if piece)
    return f"<div class=grid>\n{inner}\n</div>" if inner else ""
