"""`apr sbom`: a bill of materials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import aprfmt
from aprfmt.cli.options import FollowLinksOption, ForceOption, ModelArgument
from aprfmt.cli.output import out, pairs, printable, progress_bar


def sbom(
    file: ModelArgument,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Output file. [default: standard output]")
    ] = None,
    force: ForceOption = False,
    follow_links: FollowLinksOption = False,
) -> None:
    """Write a model's bill of materials as CycloneDX 1.6: files, license, data sets, base models, training run.

    \b
    apr sbom model.gguf
    apr sbom ./Qwen2.5-0.5B -o model.cdx.json
    """
    from aprfmt.io.sink import AtomicFile, check_target
    from aprfmt.io.source import watch_opened

    if output is not None:
        check_target(output, [file], force)
    with watch_opened(), progress_bar("hashing") as progress:
        document = aprfmt.sbom(file, follow_links=follow_links, progress=progress)
        if output is not None:
            check_target(output, [file], force)  # again: the files of the model are known now
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        out.result({"bom": document}, text.splitlines())
        return
    with AtomicFile(output, force=force) as sink:
        sink.write(text.encode("utf-8", "surrogateescape"))
    components = document["components"]
    count = len(components) if isinstance(components, list) else 0
    body = {"file": file, "output": str(output), "component_count": count}
    rows = [("format", "CycloneDX 1.6"), ("components", str(count))]
    out.result(body, [f"{out.style('wrote', 'green')} {out.style(printable(str(output)), 'bold')}", *pairs(rows)])
