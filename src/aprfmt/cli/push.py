"""`apr push`: upload a model to the hub with a model card, or to an OCI registry."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import FollowLinksOption, PlanOption
from aprfmt.cli.output import out, pairs, printable, progress_bar, table
from aprfmt.errors import UsageError
from aprfmt.io.registry_path import is_registry
from aprfmt.text import format_bytes, plural

if TYPE_CHECKING:
    from aprfmt.publishing.push import PushReport


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model file, or a folder to upload as a whole.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Target: org/name, or oci://HOST/NAME:TAG.")],
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
    follow_links: FollowLinksOption = False,
    card: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Publish this model card instead of the repository's.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Layout of an OCI artifact: modelpack or docker. [default: modelpack]"),
    ] = None,
    plan: PlanOption = False,
) -> None:
    """Upload a model to the hub in one commit, with a model card: origin, bits per weight, checksums.

    In an existing card only apr's own section is replaced. Uses the token of `hf auth login`, or HF_TOKEN. oci://...
    uploads to an OCI registry as an artifact, with the credentials of docker login.

    \b
    apr push model-Q4_K_M.gguf org/model-GGUF --plan
    apr push ./my-model org/my-model --private --license apache-2.0
    apr push model.gguf oci://registry.example.com/team/model:q4_k_m --plan
    """
    if is_registry(repo):
        given = {
            "--revision": revision != "main", "--message": message is not None, "--private": private is not None,
            "--no-create": not create, "--card": card is not None,
        }  # fmt: skip
        if unfit := [option for option, is_given in given.items() if is_given]:
            raise UsageError(f"{', '.join(unfit)}: applies to the hub only, not to a registry")
        _push_oci(source, repo, layout or "modelpack", license, plan, no_license=no_license, follow_links=follow_links)
        return
    if not os.path.exists(source) and os.path.exists(repo) and "/" in source:  # `hf upload` names the repository first
        source, repo = repo, source
        out.note(shlex.join(["apr", "push", source, repo]))
    if layout is not None:
        raise UsageError("--layout applies to registries only", hint="apr push FILE oci://HOST/NAME:TAG")
    from aprfmt.publishing.push import push

    if out.mode != "human":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of huggingface_hub, which is not loaded yet
    with progress_bar("checksums") as progress:
        report = push(
            source, repo, revision=revision, message=message, private=private, create=create, license=license,
            no_license=no_license, follow_links=follow_links, card=card, plan=plan, progress=progress,
            log=out.progress_line,
        )  # fmt: skip
    for warning in report.warnings:
        out.warning(warning)
    out.result(report.to_json(), _lines(report))


def _push_oci(
    source: str, target: str, layout: str, license: str | None, plan: bool, *, no_license: bool, follow_links: bool
) -> None:
    with progress_bar("uploading") as progress:
        report = aprfmt.push_oci(
            source, target, layout=layout, license=license, no_license=no_license, follow_links=follow_links, plan=plan,
            progress=progress, log=out.progress_line,
        )  # fmt: skip
    for warning in report.warnings:
        out.warning(warning)
    name = out.style(printable(report.target), "bold")
    done = (
        f"{out.style('plan', 'cyan')} for {name}; nothing is uploaded"
        if plan
        else f"{out.style('published', 'green')} {name}"
    )
    rows = [
        ("digest", report.digest),
        ("files", f"{plural(len(report.files), 'file')}, {format_bytes(report.size_bytes)}"),
        ("license", report.license or "none"),
    ]
    if not plan:
        n_known = len(report.files) - len(report.uploaded)
        others = f"; the registry had {plural(n_known, 'file')}" if n_known else ""
        rows.append(("uploaded", f"{plural(len(report.uploaded), 'file')}{others}"))
    cells = [[file.name, file.media_type, format_bytes(file.size_bytes)] for file in report.files]
    out.result(report.to_json(), [done, *pairs(rows), "", *table(["file", "type", "size"], cells, right="size")])


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
