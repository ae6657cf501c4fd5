"""`apr eval` and `apr report`: loss on held-out text; an HTML report about a training run or a model."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import aprfmt
from aprfmt.cli.options import (
    EngineOption,
    FollowLinksOption,
    ForceOption,
    ModelArgument,
    TextFieldOption,
    ThreadsOption,
)
from aprfmt.cli.output import out, pairs, printable, progress_bar, tokens, with_page
from aprfmt.errors import UsageError
from aprfmt.text import MAX_PERPLEXITY, first_few, format_bytes, format_count, format_perplexity, format_seconds, plural

if TYPE_CHECKING:
    from aprfmt.inspection.run_page import RunReport
    from aprfmt.running.divergence_report import Divergence
    from aprfmt.running.evaluation import EvaluatedModel, Evaluation


def evaluate(
    file: ModelArgument,
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="PATH",
            help="Text, jsonl or parquet, or a folder of these; of a run's token shards, the held-out part is used.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Report the KL divergence from this model, or from a logits file, as llama-perplexity does.",
        ),
    ] = None,
    save_logits: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="With --against MODEL: save its logits for later runs and llama-perplexity."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also compute KL and agreement with this model.")
    ] = None,
    engine: EngineOption = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device for torch: cuda, cuda:N or cpu; fails if it is not available."),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Sequence length. [default: 2048, with --against 512; or the context if shorter]"
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Evaluate about N tokens, sampled evenly; the text is still tokenized in full. [default: all]",
        ),
    ] = None,
    vocab_policy: Annotated[
        str,
        typer.Option(
            metavar="shared|renormalise",
            help="If the teacher has tokens that the model lacks: refuse, or compare over the shared tokens.",
        ),
    ] = "shared",
    text_field: TextFieldOption = "text",
    threads: ThreadsOption = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PAGE.html",
            help="With --against: write a page with the KL divergence and the error of each layer.",
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Compute cross entropy and perplexity on text; with --teacher, also KL(teacher || model) and top-1 agreement.

    To measure quantization loss, use the original model as the teacher. Trainable architectures run in torch, any
    other decoder in llama.cpp, on the same sequences. If the evaluation fails, the exit status is 8 and no score is
    printed.

    With --against, print quantiles of the KL divergence and of probability changes, computed as by `llama-perplexity
    --kl-divergence`: the second half of each chunk of 512 tokens is scored.

    \b
    apr eval run/model.apr --data held-out.jsonl --teacher big.gguf
    apr eval run/model.apr --data run/tokens --json
    apr eval q4.gguf --teacher model.apr --data text.txt --engine llama
    apr eval q4.gguf --against f16.gguf --data text.txt --save-logits f16.kld
    apr eval q3.gguf --against f16.kld
    apr eval q4.gguf --against f16.gguf --data text.txt -o page.html
    """
    if against is not None:
        for name, value in (("teacher", teacher), ("engine", engine), ("device", device)):
            if value is not None:
                raise UsageError(f"--{name} does not apply to --against, which runs llama.cpp")
        _diverge(file, against, data, save_logits, seq_len, limit, text_field, threads, output, force)
        return
    if data is None:
        raise UsageError("--data is missing", hint=f"apr eval {file} --data text.txt")
    for name, path in (("save-logits", save_logits), ("output", output)):
        if path is not None:
            raise UsageError(f"--{name} requires --against MODEL")
    with progress_bar("evaluating", tokens):
        found = aprfmt.evaluate(
            file, data, teacher=teacher, engine=engine, device=device, seq_len=seq_len, limit=limit,
            text_field=text_field, vocab_policy=vocab_policy, threads=threads, log=out.progress_line,
        )  # fmt: skip
    out.result(found.to_json(), _evaluation(found))


def _diverge(
    file: str,
    against: str,
    data: Path | None,
    save_logits: Path | None,
    seq_len: int | None,
    limit: int | None,
    text_field: str,
    threads: int,
    output: Path | None,
    force: bool,
) -> None:
    from aprfmt.running.divergence import LEAST_CTX

    if seq_len is not None and seq_len < LEAST_CTX:
        raise UsageError(f"--seq-len must be at least {LEAST_CTX} with --against, not {seq_len}")
    with progress_bar("comparing", tokens) as progress:
        found = aprfmt.kl_divergence(
            file, against, () if data is None else data, n_ctx=seq_len,
            limit=limit, save_logits=save_logits, text_field=text_field,
            threads=threads, output=output, force=force, progress=progress, log=out.progress_line,
        )  # fmt: skip
    out.result(*with_page(found.to_json(), _divergence(found), output))


def _divergence(found: Divergence) -> Iterator[str]:
    yield f"{printable(found.file)} against {printable(found.reference)}"
    kl, change = found.kl_quantiles, found.dp_quantiles
    ratio = found.perplexity / found.reference_perplexity
    own, reference = (
        f"{value:.4f}" if value <= MAX_PERPLEXITY else format_perplexity(value)
        for value in (found.perplexity, found.reference_perplexity)
    )
    yield from pairs(
        [
            ("KL", f"{found.kl:.6f} ± {found.kl_error:.6f} nats per token, KL(reference || model)"),
            ("quantiles", ", ".join(f"{word} {kl[q]:.4g}" for q, word in _QUANTILES.items())),
            ("agreement", f"same top-1 token at {found.agreement:.2%} of positions"),
            ("RMS Δp", f"{found.rms_dp:.3%}, mean {found.mean_dp:+.3%}, from {change['0']:+.2%} to {change['1']:+.2%}"),
            ("perplexity", f"{own}, reference {reference}, ratio {ratio:.4g}"),
            (
                "read",
                f"{plural(found.tokens, 'position')} in {plural(found.chunks, 'chunk')} of {found.n_ctx:,} tokens",
            ),
            (
                "window",
                f"{found.n_ctx:,} tokens, stride {found.n_ctx:,}; the second half of each chunk is scored, as in "
                f"llama-perplexity (apr eval without --against scores whole sequences)",
            ),
            ("time", f"{format_seconds(found.seconds)} on llama.cpp ({found.engine})"),
        ]
    )


_QUANTILES = {"0.5": "median", "0.9": "90%", "0.99": "99%", "0.999": "99.9%", "1": "maximum"}


def _evaluation(found: Evaluation) -> Iterator[str]:
    yield f"{printable(found.file)}: {_model_kind(found)}"
    rows = [
        ("cross entropy", f"{found.ce:.4f} nats per token, perplexity {format_perplexity(found.perplexity)}"),
        ("accuracy", f"{found.accuracy:.2%} of tokens predicted (top-1)"),
    ]
    if (teacher := found.teacher) is not None:
        rows += [
            ("teacher", f"{teacher.file}: {_model_kind(teacher)}, cross entropy {found.teacher_ce:.4f} nats"),
            ("KL", f"{found.kl:.4g} nats per token, KL(teacher || model)"),
            ("agreement", f"same top-1 token at {found.agreement:.2%} of positions"),
        ]
    if found.dropped_mass is not None:
        rows.append(
            ("dropped", f"{found.dropped_mass:.2%} of the teacher's probability is on tokens that the model lacks")
        )
    read = f"{plural(found.tokens, 'token')} in {plural(found.windows, 'sequence')} of {found.seq_len:,}"
    data = f"{plural(found.documents, 'document')} of {plural(found.data_tokens, 'token')}"
    left_out = ", ".join(f"{n} {what}" for what, n in found.left_out.items())
    yield from pairs(
        [
            *rows,
            ("read", f"{read}, from {data}"),
            (
                "window",
                f"{found.seq_len:,} tokens, stride {found.seq_len:,}; whole sequences are scored (--against and "
                f"llama-perplexity: their second half)",
            ),
            ("end tokens", "one follows each document and is scored (llama-perplexity: only with add_eos_token)"),
            *([("skipped", left_out)] if left_out else []),
            ("time", f"{format_seconds(found.seconds)} on {found.device} in {found.dtype}"),
        ]
    )


def _model_kind(model: EvaluatedModel) -> str:
    return f"{model.architecture}, {format_count(model.parameters)} parameters, {model.format}"


def report(
    file: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="A model, or folders of training runs, finished or not.")
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="page.html; for a run also curves.png. [default: print a summary]"
        ),
    ] = None,
    force: ForceOption = False,
    follow_links: FollowLinksOption = False,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine while the run is active; Ctrl-C stops.")
    ] = False,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port of --live; 0: a free one.")] = 0,
) -> None:
    """Write a self-contained HTML report about training runs or a model.

    Training run: result, curves, samples, configuration, provenance; a .png contains only the curves and needs
    matplotlib. Several runs are drawn into the same charts. Model: dimensions, dtypes, the values of every layer,
    metadata, tokenizer, memory by context length, provenance.

    \b
    apr report run
    apr report run -o page.html
    apr report run -o curves.png --force
    apr report run run2 -o both.html
    apr report run --live
    apr report model.gguf -o page.html
    apr report run --json
    """
    from aprfmt.formats import detect
    from aprfmt.inspection.run_report import is_run

    if port and not live:
        raise UsageError("--port needs --live")
    if len(file) == 2 and output is None and file[1].endswith((".html", ".png")):
        output = Path(file.pop())  # as `apr convert A B` takes it
    if len(file) > 1 or live or is_run(Path(file[0])):
        body = aprfmt.report(file, output, force=force, live=live, port=port, log=out.progress_line)
        out.result(body, _run_reports(body, output))
        return
    if output is None and out.mode != "json":
        detect(file[0])  # report an unreadable model first
        output = Path(f"{Path(file[0]).stem}.html")
        line = shlex.join(["apr", "report", file[0], "-o", str(output)])
        if output.exists() and not force:
            raise UsageError("a model's report is an HTML page", hint=f"{line} --force")
        out.note(line)
    with progress_bar("reading") as progress:
        body = aprfmt.report(file[0], output, force=force, follow_links=follow_links, progress=progress)
    count = cast("int", body["tensor_count"])
    name = out.style(printable(str(output)), "bold")
    out.result(body, [f"{out.style('wrote', 'green')} {name}", f"  {body['format']}, {plural(count, 'tensor')}"])


def _run_reports(body: Mapping[str, object], output: Path | None) -> Iterator[str]:
    """The summary of each run, then the page."""
    from aprfmt.inspection.run_report import PAGE

    bodies = cast("Sequence[RunReport]", body.get("runs", [body]))
    for each in bodies:
        yield from _run_report(each)
    if output is not None:
        yield from pairs([("wrote", str(output))])
    elif pages := [str(page) for each in bodies if (page := Path(each["folder"]) / PAGE).is_file()]:
        yield from pairs([("page", first_few(pages))])


def _run_report(body: RunReport) -> Iterator[str]:
    from aprfmt.inspection.run_page import STATUS, damage_text, sentence, title

    words, _ = STATUS[body["status"]]
    yield out.style(printable(f"{title(body)}: {words}"), "bold")
    of = f" of {body['total_steps']:,.0f}" if body["total_steps"] else ""
    rows = [("result", sentence(body)), ("steps", f"{body['steps']:,}{of}, {format_count(int(body['tokens']))} tokens")]
    if body["seconds"] is not None:
        rows.append(("time", format_seconds(body["seconds"])))
    speed = [f"{body['tokens_per_s']:,.0f} tokens/s"] if body["tokens_per_s"] is not None else []
    speed += [f"MFU {body['mfu']:.1%}"] if body["mfu"] is not None else []
    speed += [f"peak {format_bytes(body['memory_bytes'])}"] if body["memory_bytes"] is not None else []
    if speed:
        rows.append(("speed", ", ".join(speed)))
    if body["error"]:
        rows.append(("error", body["error"]))
    if body["failed_save_count"]:
        rows.append(("failed saves", str(body["failed_save_count"])))
    rows += [("damaged", printable(damage_text(row))) for row in body["damaged"]]
    if body["skipped_lines"]:
        rows.append(("damaged lines", f"{body['skipped_lines']}, skipped"))
    yield from pairs(rows)
