"""`apr inspect`, `tensors`, `validate` and `architectures`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.ci import JunitOption, SarifOption, ci_reports
from aprfmt.cli.complete import complete_architecture
from aprfmt.cli.inspect_text import show
from aprfmt.cli.options import BaseOption, FilterOption, ModelArgument
from aprfmt.cli.output import out, pairs, printable, progress_bar, table, width, wrapped
from aprfmt.text import format_bytes, format_shape

if TYPE_CHECKING:
    from aprfmt.arch.row import Architecture
    from aprfmt.inspection.tensor_list import ListedTensor
    from aprfmt.inspection.validate import Validation

_MARKS = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skip": ("-   ", "dim")}
_MAX_OF_RULE = 20


def inspect(
    file: ModelArgument,
    *,
    vocab: Annotated[bool, typer.Option("--vocab", help="List the tokens with their ids.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="List the tensors.")] = False,
    quality: Annotated[bool, typer.Option("--quality", help="Score the completeness of the file's metadata.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="List every metadata key as stored.")] = False,
) -> None:
    """Show a model's container, architecture, dimensions, dtypes, tokenizer and provenance.

    \b
    apr inspect model.gguf
    apr inspect model.gguf --metadata
    apr inspect model.apr --quality --json
    """
    show(file, vocab=vocab, weights=weights, quality=quality, metadata=metadata)


def tensors(
    file: ModelArgument,
    *,
    filter: FilterOption = None,
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Show at most N tensors; 0: all.")] = 0,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Show mean, standard deviation, range, and counts of NaN, infinity and zero."),
    ] = False,
    hash: Annotated[bool, typer.Option("--hash", help="Show the SHA-256 of the stored bytes.")] = False,
) -> None:
    """List the tensors: name, dtype, shape (row-major), offset, size.

    \b
    apr tensors model.gguf --filter '*attn_q*' --stats
    apr tensors model.apr --hash --json
    """
    with progress_bar("reading") as progress:
        found = aprfmt.tensors(file, filter=filter, limit=limit, stats=stats, hash=hash, progress=progress)
    out.result(found.to_json(), _tensor_table(found.tensors))
    if len(found.tensors) < found.matched:
        out.hint(f"{len(found.tensors)} of {found.matched} tensors shown; --limit 0 shows all")
    elif not found.tensors and found.tensor_count:
        out.hint(f"no tensor matches {filter!r}; without --filter all {found.tensor_count} are shown")


def _tensor_table(rows: Sequence[ListedTensor]) -> list[str]:
    columns = {
        "name": [row.tensor.name for row in rows],
        "dtype": [row.tensor.dtype for row in rows],
        "shape": [format_shape(row.tensor.shape) for row in rows],
    }
    figures = [row.stats for row in rows if row.stats is not None]
    if figures:
        for key in ("mean", "std", "min", "max"):
            columns[key] = ["-" if (value := stats[key]) is None else f"{value:.3g}" for stats in figures]
        zeros = [stats["zero_fraction"] for stats in figures]
        columns["zeros"] = ["-" if share is None else f"{share:.1%}" for share in zeros]
        notes = [_tensor_note(row) for row in rows]
        columns |= {"note": notes} if any(notes) else {}
    else:
        columns["size"] = [format_bytes(row.tensor.n_bytes) for row in rows]
        columns["offset"] = [str(row.tensor.offset) for row in rows]
    digests = [row.sha256 for row in rows if row.sha256 is not None]
    if digests:
        columns["sha256"] = [digest[:12] for digest in digests] if out.data_stream.isatty() else digests
    cells = list(zip(*columns.values(), strict=True))
    return table(
        list(columns),
        cells,
        right="size offset mean std min max zeros",
        indent=0,
        spare="offset zeros mean std shape min max",
    )


def _tensor_note(row: ListedTensor) -> str:
    if row.error is not None:
        return f"not decoded: {row.error}"
    counts = (("nan_count", "NaN"), ("inf_count", "inf"))
    found = ((row.stats[key], word) for key, word in counts) if row.stats else ()
    return ", ".join(f"{n:,} {word}" for n, word in found if n)


def validate(
    file: ModelArgument,
    *,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Treat warnings as failures; restore an .apr's source files and compare their hashes."
        ),
    ] = False,
    min_score: Annotated[int, typer.Option(metavar="N", min=0, max=100, help="Fail below this score.")] = 0,
    base: BaseOption = None,
    sha256: Annotated[
        str | None,
        typer.Option(
            metavar="HEX|FILE", help="The expected SHA-256 (such as the hub's X-Linked-ETag), or a file with it."
        ),
    ] = None,
    manifest: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare all files with a list in sha256sum's format.")
    ] = None,
    junit: JunitOption = None,
    sarif: SarifOption = None,
) -> int:
    """Check checksums, offsets, values, names, shapes and tokenizer; list the file's checksums.

    Exit status: 0 passed, 5 failed.

    \b
    apr validate model.apr
    apr validate model.gguf --strict --min-score 95 --json
    apr validate model.gguf --junit validate.xml
    """
    with progress_bar("validating") as progress, ci_reports("validate", file, junit, sarif) as write:
        found = aprfmt.validate(
            file, strict=strict, min_score=min_score, base=base, sha256=sha256, manifest=manifest, progress=progress
        )
        if junit or sarif:
            from aprfmt.inspection.ci_reports import cases_of_validation

            write(cases_of_validation(found))
    out.result(found.to_json(), _validation(found, min_score))
    return 0 if found.passed else 5


def _validation(found: Validation, min_score: int) -> Iterator[str]:
    from aprfmt.inspection.validate import DIGEST_RULE

    yield f"{out.style(printable(found.file), 'bold')}  {found.format}"
    shown: dict[str, int] = {}
    for check in found.checks:
        n = shown[check.id] = shown.get(check.id, 0) + 1
        if n <= _MAX_OF_RULE:
            tensor = f" ({check.tensor})" if check.tensor is not None else ""
            yield _check_line(check.status, check.id, check.message + tensor)
    for name, n in shown.items():
        if n > _MAX_OF_RULE:
            yield f"        {n - _MAX_OF_RULE} more of {name}; --json lists all"
    for skip in found.skipped:
        yield _check_line("skip", skip.id, "not checked: " + skip.message)
    word, style = ("passed", "green") if found.passed else ("FAILED", "red")
    goal = f", below the minimum of {min_score}" if found.score < min_score else ""
    if any(check.id == DIGEST_RULE and check.status == "fail" for check in found.checks):
        yield f"{out.style(word, style)}, no score: not the published file"
    else:
        yield f"{out.style(word, style)}, score {found.score} of 100{goal}"
    if not found.protected:
        yield from wrapped(
            "no checksum covers the weights: a flipped bit goes undetected. Compare with the publisher's digest "
            "(--sha256 HEX), or keep the model as .apr"
        )


def _check_line(status: str, name: str, message: str) -> str:
    mark, style = _MARKS[status]
    text = printable(message)
    if out.data_stream.isatty():  # whole lines where another program reads them
        import textwrap

        text = ("\n" + " " * 30).join(textwrap.wrap(text, max(20, width() - 30)))
    return f"  {out.style(mark, style)}  {name:<20}  {text}"


def architectures(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=complete_architecture,
            help="A name from the list, a Hugging Face class, a model type or a GGUF architecture.",
        ),
    ] = None,
) -> None:
    """List the supported architectures; with NAME, show the tensor and key mappings of one.

    \b
    apr architectures
    apr architectures Qwen3ForCausalLM
    apr architectures gpt_neox --json
    """
    from aprfmt.arch.table import ARCHITECTURES, classes_of
    from aprfmt.arch.verified import verified
    from aprfmt.inspection.architecture_list import find_architecture

    if name is None:
        rows = list(ARCHITECTURES.values())
        cells = [[row.id, row.gguf, str(verified().get(row.id, "-")), ", ".join(classes_of(row))] for row in rows]
        header = ["name", "GGUF", "verified", "Hugging Face classes"]
        out.result(aprfmt.architectures(), table(header, cells, indent=0, spare="verified GGUF", wrap=40))
        return
    out.result(aprfmt.architectures(name), _architecture_text(find_architecture(name)))


def _architecture_text(row: Architecture) -> list[str]:
    from aprfmt.arch.table import classes_of
    from aprfmt.arch.verified import verified
    from aprfmt.inspection.architecture_list import change_text

    known = verified().get(row.id)
    facts = [
        ("GGUF", row.gguf),
        ("verified", known.sentence if known is not None else "not yet"),
        ("classes", ", ".join(classes_of(row))),
        ("model types", ", ".join(row.model_types) or "-"),
    ]
    cells = [
        [" + ".join(t.hf), " + ".join(t.gguf) or "-", ", ".join(filter(None, (t.need, t.layers))), change_text(t)]
        for t in row.tensors
    ]
    return [
        out.style(row.id, "bold"),
        *pairs(facts),
        "",
        *table(["Hugging Face", "GGUF", "need", "change"], cells, indent=0),
    ]
