"""`apr pull`: get a model from an OCI registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import aprfmt
from aprfmt.cli.options import ForceOption
from aprfmt.cli.output import out, pairs, printable, progress_bar, table
from aprfmt.errors import UsageError
from aprfmt.text import format_bytes, plural


def pull(
    source: Annotated[str, typer.Argument(metavar="ADDRESS", help="oci://HOST/NAME[:TAG][@sha256:DIGEST].")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Output folder. [default: end of NAME]")
    ] = None,
    allow_names: Annotated[
        bool, typer.Option("--allow-names", help="Allow file names that other programs execute or reserve.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Download a model from an OCI registry: ModelPack, docker model package or oras push.

    Continues interrupted downloads, compares every digest, and uses the credentials of docker login.

    \b
    apr pull oci://registry.example.com/team/model:q4_k_m -o model
    apr pull oci://localhost:5000/model:1 -o model --force
    """
    if "://" not in source:
        from aprfmt.cli.special_lines import pulled

        raise UsageError("apr pull reads OCI registries: oci://HOST/NAME", path=source, hint=pulled(source))
    with progress_bar("downloading") as progress:
        report = aprfmt.pull(source, output, allow_names=allow_names, force=force, progress=progress)
    rows = [
        ("from", report.source),
        ("digest", report.digest),
        ("files", f"{plural(len(report.files), 'file')}, {format_bytes(report.size_bytes)}"),
    ]
    rows += [("continued", format_bytes(report.reused_bytes))] if report.reused_bytes else []
    rows += [("signature", report.signature)] if report.signature else []
    cells = [[file.name, format_bytes(file.size_bytes)] for file in report.files]
    done = f"{out.style('wrote', 'green')} {out.style(printable(report.output), 'bold')}"
    out.result(report.to_json(), [done, *pairs(rows), "", *table(["file", "size"], cells, right="size")])
