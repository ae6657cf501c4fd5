"""`apr canary` and `apr parity`: golden outputs, and what two models compute layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import ForceOption, ModelArgument
from aprfmt.cli.output import out, pairs, printable, progress_bar, table
from aprfmt.errors import UsageError
from aprfmt.text import plural

if TYPE_CHECKING:
    from aprfmt.running.canary import CanaryReport

ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact", help="Require bit-identical states after every layer (same weights, machine and llama.cpp)."
    ),
]
_BAR = 30


def canary(
    action: Annotated[str, typer.Argument(metavar="make|check", help="Save golden outputs, or compare with them.")],
    file: ModelArgument,
    *,
    canary: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Golden outputs. [default: FILE.canary.json, else those in FILE]"),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="With make: use this prompt; repeatable. [default: four bundled prompts]"),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="With make: store them in the .apr itself.")] = False,
    exact: ExactOption = False,
    force: ForceOption = False,
) -> int:
    """Save golden outputs of a model, or check that a conversion of it still computes them.

    Golden outputs are tokens, greedy continuations, likely tokens and hidden states after each layer, computed by
    llama.cpp. Exit status of check: 0 within the tolerance of the dtype, 1 beyond it.

    \b
    apr canary make model.gguf
    apr canary make model.apr --in-place
    apr canary check model-q8_0.gguf --canary model.gguf.canary.json
    """
    if action not in ("make", "check"):
        raise UsageError(f"unknown action {action!r}", hint="apr canary make FILE; apr canary check FILE")
    if action == "make":
        if exact:
            raise UsageError("--exact applies to check only")
        options = {"prompts": prompt} if prompt else {}
        with progress_bar("computing"):
            made = aprfmt.make_canary(file, canary, in_place=in_place, force=force, log=out.progress_line, **options)
        place = file if in_place else str(canary) if canary is not None else f"{file.rstrip('/')}.canary.json"
        body = {"file": file, "output": place, "engine": made.engine, "prompt_count": len(made.prompts)}
        rows = [("prompts", str(len(made.prompts))), ("engine", made.engine)]
        out.result(body, [f"{out.style('wrote', 'green')} {out.style(printable(place), 'bold')}", *pairs(rows)])
        return 0
    if prompt or in_place:
        raise UsageError("--prompt and --in-place apply to make only: check uses the saved prompts")
    with progress_bar("checking"):
        found = aprfmt.check_canary(file, canary, exact=exact, log=out.progress_line)
    out.result(found.to_json(), _lines(found))
    return 0 if found.passed else 1


def parity(
    a: Annotated[str, typer.Argument(metavar="A", help="The original model, in any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to compare with it.")],
    *,
    exact: ExactOption = False,
) -> int:
    """Compare the outputs of two forms of a model in llama.cpp, layer by layer; exit 1 beyond the tolerance of their
    dtypes.

    \b
    apr parity model.gguf model-q8_0.gguf
    """
    with progress_bar("comparing"):
        found = aprfmt.parity(a, b, exact=exact, log=out.progress_line)
    out.result(found.to_json(), _lines(found))
    return 0 if found.passed else 1


def _lines(found: CanaryReport) -> Iterator[str]:
    word, style = ("passed", "green") if found.passed else ("FAILED", "red")
    yield f"{out.style(printable(found.file), 'bold')}  {out.style(word, style)}"
    yield from (f"  {printable(finding)}" for finding in found.findings)
    yield from pairs(
        [
            ("compared with", found.canary),
            ("band", f"{found.band:g} of the states after a layer"),
            ("output", f"KL {found.kl:.2g} nats, {found.agreement:.1%} the same token, {found.greedy:.1%} greedy"),
        ]
    )
    top = max([found.band, *(value for value in found.layers.values() if value < float("inf"))])
    rows = [
        ["embeddings" if layer < 0 else str(layer), f"{value:.2g}", "█" * round(_BAR * min(1.0, value / top))]
        for layer, value in found.layers.items()
    ]
    if rows:
        yield from ("", *table(["layer", "difference", ""], rows, right="difference"))
    beyond = sum(not value <= found.band for value in found.layers.values())
    if beyond:
        yield f"  {plural(beyond, 'layer')} beyond the tolerance"
