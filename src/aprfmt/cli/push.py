"""`apr push`: upload a model to the hub, with a model card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.options import PlanOption
from aprfmt.cli.output import out, pairs, printable, progress_bar, table
from aprfmt.text import format_bytes, plural

if TYPE_CHECKING:
    from aprfmt.publishing.push import PushReport


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model file, or a folder to upload completely.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Target repository: org/name.")],
    *,
    revision: Annotated[str, typer.Option(metavar="BRANCH", help="Branch; created if it does not exist.")] = "main",
    message: Annotated[str | None, typer.Option("--message", "-m", metavar="TEXT", help="Commit message.")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a newly created repository.")
    ] = None,
    create: Annotated[bool, typer.Option(help="Create the repository if it does not exist.")] = True,
    license: Annotated[
        str | None, typer.Option(metavar="SPDX", help="License of the weights, if the card has none.")
    ] = None,
    no_license: Annotated[bool, typer.Option("--no-license", help="Publish without a license.")] = False,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Follow symlinks that point outside the folder.")
    ] = False,
    card: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Publish this model card instead of the repository's.")
    ] = None,
    plan: PlanOption = False,
) -> None:
    """Upload a model to the hub in one commit, with a model card: origin, bits per weight, checksums.

    In an existing card only apr's own section is replaced. Uses the token of `hf auth login`, or HF_TOKEN.

    \b
    apr push model-Q4_K_M.gguf org/model-GGUF --plan
    apr push ./my-model org/my-model --private --license apache-2.0
    """
    from aprfmt.publishing.push import push

    if out.mode != "human":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of huggingface_hub, which is not loaded yet
    with progress_bar("checksums") as progress:
        report = push(
            source,
            repo,
            revision=revision,
            message=message,
            private=private,
            create=create,
            license=license,
            no_license=no_license,
            follow_links=follow_links,
            card=card,
            plan=plan,
            progress=progress,
            log=out.progress_line,
        )
    for warning in report.warnings:
        out.warning(warning)
    out.result(report.to_json(), _lines(report))


def _lines(report: PushReport) -> Iterator[str]:
    name = out.style(printable(report.repo), "bold")
    if report.plan:
        yield f"{out.style('plan', 'cyan')} for {name}; nothing is uploaded"
    else:
        yield f"{out.style('published', 'green')} {name}"
    rows = [
        ("branch", report.revision),
        ("files", f"{plural(len(report.files), 'file')}, {format_bytes(report.size_bytes)}"),
    ]
    if report.created:
        rows.append(("repository", "will be created" if report.plan else "made"))
    rows += [("license", report.license or "none"), ("card", report.card)]
    rows += [("commit", report.url)] if report.url else []
    yield from pairs(rows)
    cells = [
        [row.file, row.type, f"{row.bits_per_weight:.2f}" if row.bits_per_weight else "", format_bytes(row.size_bytes)]
        for row in report.models
    ]
    yield from ("", *table(["model", "type", "bits", "size"], cells, right="bits size"))
