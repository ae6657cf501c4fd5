"""`apr tree`: the module tree of a model, as text, dot, Mermaid or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import FilterOption, ModelArgument
from aprfmt.cli.output import out, printable, table
from aprfmt.errors import UsageError
from aprfmt.text import format_bytes, format_count, format_shape, plural

if TYPE_CHECKING:
    from aprfmt.inspection.tree import Tree, TreeStep

_FORMATS = ("ascii", "dot", "mermaid", "json")


def tree(
    file: ModelArgument,
    *,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="ascii, dot, mermaid or json. [default: ascii]")
    ] = None,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Show parameters and bytes; a folded line shows the sum.")
    ] = False,
    depth: Annotated[int, typer.Option(metavar="N", min=0, help="Show N levels; 0: all.")] = 0,
    filter: FilterOption = None,
    unfold: Annotated[bool, typer.Option("--all", help="Show every layer instead of folding identical ones.")] = False,
) -> None:
    """Show a model's module tree, built from tensor names; identical layers fold into one line.

    \b
    apr tree model.gguf
    apr tree model.safetensors --sizes --depth 3
    apr tree ./Qwen2.5-0.5B --filter '*layers.0.*'
    apr tree model.gguf --format dot | dot -Tsvg > model.svg
    """
    if format not in (None, *_FORMATS):
        raise UsageError(f"unknown format {format!r}", hint=f"one of: {', '.join(_FORMATS)}")
    if out.mode == "json" and format not in (None, "json"):
        raise UsageError(f"--json prints the tree as JSON, not as {format}", hint="leave out one of the two options")
    found = aprfmt.tree(file, depth=depth, filter=filter)
    if format == "json":
        out.json_object(found.to_json())
        return
    steps = found.steps(fold=not unfold)
    draw = {"dot": _dot, "mermaid": _mermaid}.get(format or "ascii")
    out.result(found.to_json(), draw(found, steps, sizes) if draw is not None else _text(found, steps, sizes))
    if not found.matched and found.tensor_count:
        out.hint(f"no tensor matches {filter!r}; without --filter all {found.tensor_count} are shown")


def _text(found: Tree, steps: list[TreeStep], sizes: bool) -> Iterator[str]:
    yield f"{out.style(printable(found.file), 'bold')}  {found.format}, {plural(found.matched, 'tensor')}"
    rows: list[list[str]] = []
    prefixes: list[str] = []
    for step in steps:
        above = "" if step.parent < 0 else prefixes[step.parent]
        prefixes.append(above + ("   " if step.is_last else "│  "))
        tensor = step.node.tensor
        cells = [above + ("└─ " if step.is_last else "├─ ") + _label(step)]
        cells += [tensor.dtype, format_shape(tensor.shape)] if tensor is not None else ["", ""]
        cells += (
            [format_count(step.times * step.node.params), format_bytes(step.times * step.node.n_bytes)] if sizes else []
        )
        rows.append(cells)
    header = ["module", "dtype", "shape", *(["params", "size"] if sizes else [])]
    yield from table(header, rows, right="params size", indent=0) if rows else ()


def _label(step: TreeStep) -> str:
    text = (step.label or "(no name)") + (f" ({step.times:,} ×)" if step.times > 1 else "")
    return text + (f" … {plural(step.node.tensor_count, 'tensor')}" if step.is_closed else "")


def _details(step: TreeStep, sizes: bool) -> list[str]:
    """The lines below a node's label in dot and Mermaid."""
    tensor = step.node.tensor
    lines = [f"{tensor.dtype} {format_shape(tensor.shape)}"] if tensor is not None else []
    if sizes:
        lines.append(f"{format_count(step.times * step.node.params)}, {format_bytes(step.times * step.node.n_bytes)}")
    return lines


def _dot(found: Tree, steps: list[TreeStep], sizes: bool) -> Iterator[str]:
    """Graphviz; in a quoted string only the quote and the backslash need escaping."""

    def quoted(lines: list[str]) -> str:
        texts = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
        return '"' + "\\n".join(texts) + '"'

    yield f"digraph {quoted([found.file])} {{"
    yield '  rankdir=LR; node [shape=box, fontname="monospace"];'
    yield f"  root [label={quoted([found.file, found.format])}];"
    for i, step in enumerate(steps):
        yield f"  n{i} [label={quoted([_label(step), *_details(step, sizes)])}];"
        yield f"  {'root' if step.parent < 0 else f'n{step.parent}'} -> n{i};"
    yield "}"


def _mermaid(found: Tree, steps: list[TreeStep], sizes: bool) -> Iterator[str]:
    """Mermaid; characters that could be syntax are written as code points."""

    def quoted(lines: list[str]) -> str:
        texts = (
            "".join(c if c.isalnum() or c in " ._-–×," else f"#{ord(c)};" for c in printable(line)) for line in lines
        )
        return '"' + "<br/>".join(texts) + '"'

    yield "flowchart LR"
    yield f"  root[{quoted([found.file, found.format])}]"
    for i, step in enumerate(steps):
        yield f"  n{i}[{quoted([_label(step), *_details(step, sizes)])}]"
        yield f"  {'root' if step.parent < 0 else f'n{step.parent}'} --> n{i}"
