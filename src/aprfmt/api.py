"""Public functions that combine several packages: `validate`, `bench`, `qa`, `run` and others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt import formats
from aprfmt.errors import AprError, UnmappedError, UnsupportedError, UsageError
from aprfmt.io.pipe import StartProgress
from aprfmt.schema import check_numbers
from aprfmt.types import PathLike, paths_of

if TYPE_CHECKING:
    from aprfmt.convert.report import Report
    from aprfmt.inspection.lint.run import Lint
    from aprfmt.inspection.validate import Validation, ValidationRule
    from aprfmt.running.bench import BenchReport
    from aprfmt.running.embeddings import Embeddings
    from aprfmt.running.generate import RunResult
    from aprfmt.running.qa import GateResult, QaReport
    from aprfmt.texts.summary import DataReport


def data(
    paths: PathLike | Sequence[PathLike],
    *,
    model: PathLike,
    output: PathLike | None = None,
    held_out: float = 0.01,
    text_field: str = "text",
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> DataReport:
    """Summarizes training data, as `apr distill` and `apr pretrain` read it, or tokenizes it for them.

    Args:
        paths: text, jsonl, csv or Parquet files, folders of them, or token shards, each as `PATH` or `PATH:WEIGHT`.
        model: the model whose tokenizer and chat template are used.
        output: folder to write token shards to, for the `data` of any number of runs; the summary is then of these
        shards. Existing shards of the same data are reused.
        held_out: fraction of the documents to hold out, with `output`.
        text_field: field of a record's text.
        strict: fail on invalid records; otherwise they are counted and skipped.
        log: called with progress lines, and with a line for the first invalid record of each kind.

    Raises:
        RefusedError: the model has no tokenizer, or no chat template for conversations.
        CorruptError: a damaged file.
        ExistsError: `output` holds something other than token shards.
    """
    from aprfmt.formats.hub_datasets import split_sources
    from aprfmt.texts.corpus import tokenize
    from aprfmt.texts.encoding import Encoder
    from aprfmt.texts.summary import summarise

    if not (isinstance(held_out, (int, float)) and 0 < held_out <= 0.9):
        raise UsageError(f"--held-out must be above 0 and at most 0.9, not {held_out!r:.40}")
    given = paths_of(paths)
    places, weights = split_sources([formats.path_text(path, "paths") for path in given])
    with formats.open(formats.path_text(model, "model")) as opened:
        encoder = Encoder(opened.tokenizer)
        if output is not None:
            shards = Path(formats.path_text(output, "output"))
            tokenize(
                places, opened.tokenizer, shards, held_out=held_out, weights=weights, text_field=text_field,
                strict=strict, log=log,
            )  # fmt: skip
            places, weights = [shards], []
    return summarise(places, weights, encoder, text_field=text_field, strict=strict, log=log)


def bench(
    files: PathLike | Sequence[PathLike],
    *,
    prompt_tokens: int = 512,
    tokens: int = 128,
    runs: int = 5,
    threads: int = 0,
    gpu_layers: int = 0,
    gates: Mapping[str, object] | Sequence[str] = (),
    output: PathLike | None = None,
    force: bool = False,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Benchmarks models in llama.cpp; several models are loaded together and run alternately.

    Args:
        files: one or more models, in any format.
        prompt_tokens: prompt length.
        tokens: number of tokens to generate.
        runs: measured runs, after one warm-up run.
        threads: llama.cpp threads; 0: half of the CPUs.
        gpu_layers: layers to offload to a GPU, if llama.cpp supports it.
        gates: limits by name (running.bench.GATES), or as NAME=VALUE.
        output: an HTML page to write.
        force: replace an existing output.
        progress: called with the number of tokens to compute; returns a function to call as they are computed.
        log: called with a line when a model is exported first.

    Raises:
        UsageError: unknown gate.
        UnsupportedError: the model is an encoder.
        RunError: llama.cpp cannot run a model.
    """
    from aprfmt.running.bench import measure, parse_gates

    check_numbers(prompt_tokens=(prompt_tokens, 1), tokens=(tokens, 1), runs=(runs, 1), threads=(threads, 0))
    paths = paths_of(files)
    if not paths:
        raise UsageError("no model given")
    names = [formats.path_text(path, "files") for path in paths]
    target = _page_target(output, names, force=force)
    found = measure(
        names, prompt_tokens=prompt_tokens, tokens=tokens, runs=runs, threads=threads, gpu_layers=gpu_layers,
        gates=parse_gates(gates), say=log, progress=progress,
    )  # fmt: skip
    if target is not None:
        from aprfmt.html.file import write_page
        from aprfmt.running.pages import bench_html

        write_page(target, bench_html(found), force=force)
    return found


def qa(
    file: PathLike,
    *,
    against: PathLike | None = None,
    allow_skip: Sequence[str] = (),
    threads: int = 0,
    output: PathLike | None = None,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
    on_gate: Callable[[GateResult], None] = lambda gate: None,
) -> QaReport:
    """Sanity-checks a model; docs/qa.md describes each gate.

    Args:
        file: the model, in any format.
        against: the original model to compare with.
        allow_skip: gates that may be skipped without failing.
        threads: llama.cpp threads; 0: half of the CPUs.
        output: an HTML page to write, whether the model passes or not.
        force: replace an existing output.
        log: called with a line when a model is exported first.
        on_gate: called with each gate's result.

    Raises:
        UsageError: unknown gate.
        MissingDependencyError: llama.cpp is not installed.
    """
    from aprfmt.running.qa import examine

    check_numbers(threads=(threads, 0))
    name = formats.path_text(file, "file")
    target = _page_target(output, [name], force=force)
    found = examine(
        name,
        against=formats.path_text(against, "against") if against is not None else None,
        allow_skip=[allow_skip] if isinstance(allow_skip, str) else [*allow_skip],
        threads=threads,
        log=log,
        on_gate=on_gate,
    )
    if target is not None:
        from aprfmt.html.file import write_page
        from aprfmt.running.pages import qa_html

        write_page(target, qa_html(found), force=force)
    return found


def _page_target(
    output: PathLike | None, sources: Sequence[str], *, force: bool, also: tuple[str, ...] = ()
) -> str | None:
    """The page to write, or a file with a suffix in `also`, checked before anything is computed for it.

    In source folders it may replace only pages.
    """
    if output is None:
        return None
    from aprfmt.html.file import check_page
    from aprfmt.io.sink import check_target, inputs_of

    target = formats.path_text(output, "output")
    check_page(target, also=also)
    check_target(target, inputs_of(sources, (".html", ".htm")), force)
    return target


def run(
    file: PathLike,
    prompt: str,
    *,
    system: str | None = None,
    raw: bool | None = None,
    template: str | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    lora: PathLike | Sequence[PathLike | tuple[PathLike, float]] = (),
    image: PathLike | Sequence[PathLike] = (),
    audio: PathLike | Sequence[PathLike] = (),
    mmproj: PathLike | None = None,
    ctx: int | None = None,
    threads: int = 0,
    gpu_layers: int = 0,
    dtype: str = "keep",
    on_text: Callable[[str], None] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Generates text with the model `file` in llama.cpp.

    Args:
        file: the model, in any format; exported to a cached GGUF first if needed.
        prompt: the user message, or with `raw` the text to continue.
        system: the system message.
        raw: continue `prompt` without a chat template; None: if the model has no template.
        template: a chat template file, or the name of a template of the model or of llama.cpp.
        max_tokens: maximum tokens to generate; None: until an end token or a full context, 256 with `raw`.
        temperature: 0: greedy decoding; the next four apply only above 0.
        top_k: sample from the k most likely tokens; 0: from all.
        top_p: sample from the most likely tokens with this cumulative probability.
        min_p: minimum probability relative to the most likely token.
        seed: seed of the sampler.
        stop: strings that end generation; not part of the answer.
        lora: LoRA adapters in any format, each with an optional scale.
        image, audio: files for the prompt; "<__media__>" marks their positions.
        mmproj: GGUF of vision and audio towers; None: the model's own.
        ctx: context size; 0: the model's training context; None: the same, at most 4096.
        threads: llama.cpp threads; 0: half of the CPUs.
        gpu_layers: layers to offload to a GPU, if llama.cpp supports it.
        dtype: dtype of the export, such as "q8_0".
        on_text: called with each part of the answer as it is generated.
        log: called with a line before an export.

    Raises:
        MissingDependencyError: llama.cpp is not installed.
        RunError: llama.cpp refuses the model, dies, or computes NaN.
    """
    from aprfmt.running.generate import Loading, Prompt, Runner, sampling_of

    asked = Prompt(prompt, system, raw, [*paths_of(image), *paths_of(audio)])
    asked.check()
    sampling = sampling_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    words = [stop] if isinstance(stop, str) else [*stop]
    loading = Loading(
        ctx=ctx, threads=threads, gpu_layers=gpu_layers, lora=_adapters(lora), mmproj=mmproj, media=bool(asked.media),
        template=template, dtype=dtype, raw=bool(raw),
    )  # fmt: skip
    with Runner(file, loading, log) as runner:
        return runner.ask(asked, max_tokens=max_tokens, sampling=sampling, stop=words, on_text=on_text)


def embed(
    file: PathLike,
    text: str | Sequence[str],
    *,
    lora: PathLike | Sequence[PathLike | tuple[PathLike, float]] = (),
    ctx: int | None = None,
    threads: int = 0,
    gpu_layers: int = 0,
    dtype: str = "keep",
    log: Callable[[str], None] = lambda line: None,
) -> Embeddings:
    """Computes embeddings of texts with the model `file` in llama.cpp, pooled as the model specifies.

    A reranker scores the first text against each of the others. Other options are those of `run`.

    Raises:
        RunError: a text exceeds the context, or llama.cpp refuses the model.
    """
    from aprfmt.running.embeddings import compute
    from aprfmt.running.generate import Loading

    loading = Loading(ctx=ctx, threads=threads, gpu_layers=gpu_layers, lora=_adapters(lora), dtype=dtype)
    return compute(file, [text] if isinstance(text, str) else [*text], loading, log)


def _adapters(value: PathLike | Sequence[PathLike | tuple[PathLike, float]]) -> list[tuple[PathLike, float]]:
    given = paths_of(value)
    return [one if isinstance(one, tuple) else (one, 1.0) for one in given]


def validate(
    path: PathLike,
    *,
    strict: bool = False,
    min_score: int = 0,
    base: PathLike | None = None,
    sha256: PathLike | None = None,
    manifest: PathLike | None = None,
    progress: StartProgress | None = None,
) -> Validation:
    """Applies every rule to the model at `path`; decodes every value.

    `strict` counts warnings as failures and compares the source files that an `.apr` restores with the digests of
    their import. A score below `min_score` fails; a warning also costs its rule's weight. `base` is the base model to
    compare an adapter with. `sha256` is the file's SHA-256 in hex, or a file with it; `manifest` is a list in
    sha256sum's format: every file in it is compared. `progress` is called with the number of bytes to decode; it
    returns a function to call with (bytes, tensor).
    """
    from aprfmt.convert.integrity import altered_files
    from aprfmt.formats import resolve
    from aprfmt.inspection import validate as rules
    from aprfmt.inspection.checksums import digest_rule
    from aprfmt.io.digest import altered

    digests = digest_rule(resolve(path), sha256, manifest)

    def look(subject: rules.Subject) -> Iterator[rules.Check]:
        try:
            if isinstance(subject.canonical, AprError):
                raise subject.canonical
            names = altered_files(subject.canonical)
        except (UnmappedError, UnsupportedError) as error:
            yield rules.Check("skip", error.message)
            return
        for name, kind in names:
            yield rules.Check("fail", altered(name, kind))

    restored = rules.ValidationRule(
        "source.restored", 0, "every restored source file matches its digest from import", look
    )
    more = [*([restored] if strict else []), *([digests] if digests is not None else [])]
    return rules.validate(path, strict=strict, min_score=min_score, base=base, progress=progress, more=more)


def shard(
    file: PathLike,
    output: PathLike,
    *,
    shard_size: int | str = "5GB",
    force: bool = False,
    plan: bool = False,
    progress: StartProgress | None = None,
) -> Report:
    """Splits the model `file` into .apr shards in the folder `output`, with a manifest of their SHA-256 sums.

    Args:
        file: the model, in any format.
        output: the folder to write.
        shard_size: largest size of a shard, in bytes or as "2GiB".
        force: replace an existing output.
        plan: report what would be written, and write nothing.
        progress: called with the number of bytes to write; returns a function to call with the bytes written.

    Raises:
        UsageError: bad size.
        ExistsError: the output exists.
    """
    from aprfmt.convert.api import convert_model
    from aprfmt.convert.parsing import parse_size

    parse_size(shard_size, name="shard_size")  # conversions accept 0: no limit
    return convert_model(
        file, output, format="apr-shards", shard_size=shard_size, force=force, plan=plan, progress=progress
    )


def report(
    file: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    force: bool = False,
    follow_links: bool = False,
    live: bool = False,
    port: int = 0,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, object]:
    """Reports on a model, or on one or several training runs; writes a page if `output` is given.

    Args:
        file: the model, or the folder of a run; several runs are drawn into the same charts.
        output: an .html page; for a run also a .png of the curves, which needs matplotlib.
        force: replace an existing output.
        follow_links: follow symlinks that point outside the model's folder.
        live: serve the page of runs on 127.0.0.1 until they end, or until Ctrl-C; it follows the runs.
        port: for `live`; 0: a free one.
        progress: called with the number of bytes to read; returns a function to call with the bytes read.
        log: called with the address of a `live` page.

    Returns:
        The object of `apr report --json`; of several runs {"runs": one object each}.

    Raises:
        UsageError: unsupported suffix; several models; more than eight runs.
        ChecksumError: the model is damaged.
        RefusedError: symlinks point outside the model's folder; with `live`, no run goes on.
    """
    from aprfmt.html.file import write_page
    from aprfmt.inspection.run_report import is_run, summarise, write_report

    check_numbers(port=(port, 0))
    paths = [Path(formats.path_text(one, "file")) for one in paths_of(file)]
    if not paths:
        raise UsageError("no model or run given")
    if live or len(paths) > 1:
        return _report_runs(paths, output, force=force, port=port if live else None, log=log)
    path = paths[0]
    page = _page_target(output, [str(path)], force=force, also=(".png",) if is_run(path) else ())
    target = Path(page) if page is not None else None
    names = {"file": os.fspath(path), "output": page}
    if is_run(path):
        return {**(summarise(path) if target is None else write_report(path, target, force=force)), **names}
    from aprfmt.convert.files import parts_of
    from aprfmt.inspection.model_page import html, survey
    from aprfmt.io.links import check_links, check_opened
    from aprfmt.io.source import watch_opened

    with watch_opened() as opened, formats.open_unchanged(path) as model:
        folder, own = parts_of(model)
        if not follow_links:
            check_links(folder, own)
        if model.convention == "apr":
            model.record_reads()
        n_bytes = sum(t.n_bytes for t in model.tensors.entries)
        found = survey(model, progress(n_bytes) if progress is not None else None)
        model.check_intact()
        if not follow_links:
            check_opened(folder, own, opened)
    if target is not None:
        write_page(target, html(found), force=force)
    return found.to_json() | names


def _report_runs(
    paths: Sequence[Path], output: PathLike | None, *, force: bool, port: int | None, log: Callable[[str], None]
) -> dict[str, object]:
    """Compares runs on one page, or with a port serves it while they go on."""
    from aprfmt.html.file import write_page
    from aprfmt.html.page import page
    from aprfmt.inspection.run_report import is_run, summarise
    from aprfmt.inspection.runs_page import runs_parts

    if port is None and (models := [path for path in paths if not is_run(path) and path.exists()]):
        raise UsageError(
            f"{models[0]} is not a training run; only runs can be compared on one page", hint="apr diff A B"
        )
    if port is not None:
        from aprfmt.inspection.live import serve_report

        if output is not None:
            raise UsageError(
                "live and output are mutually exclusive: live serves the page, output writes it to a file",
                hint="leave out one of them",
            )
        bodies, target = serve_report(paths, port=port, log=log), None
    else:
        target = _page_target(output, [str(path) for path in paths], force=force)
        bodies = [summarise(path) for path in paths]
        title, parts = runs_parts(bodies)
        if target is not None:
            write_page(target, page(title, parts), force=force)
    if len(bodies) == 1:
        return {**bodies[0], "file": str(paths[0]), "output": target}
    return {"runs": bodies, "files": [str(path) for path in paths], "output": target}


def lint_rules() -> tuple[ValidationRule, ...]:
    """The rules of `apr lint`: id, level, requirement, reason and source."""
    from aprfmt.convert.presets import OTHER_FILE_TYPES, PRESETS, find_preset
    from aprfmt.inspection.lint.table import rules

    def dtype_of(name: str) -> str | None:
        preset = find_preset(name)
        return preset.dtype if preset is not None else None

    file_types = {number: dtype for dtype, number in OTHER_FILE_TYPES.items()}
    return rules({preset.file_type: preset.dtype for preset in PRESETS.values()} | file_types, dtype_of)


def lint(file: PathLike, *, fail_at: str = "warn", select: Sequence[str] = (), ignore: Sequence[str] = ()) -> Lint:
    """Checks the model `file` against best practices; decodes no tensor values.

    Args:
        file: the model.
        fail_at: "error", "warn" or "info": lowest level of findings that makes `passed` false.
        select: ids or globs of the rules to apply; empty: all.
        ignore: ids or globs of rules to skip.

    Raises:
        UsageError: unknown level or rule.
    """
    from aprfmt.inspection.lint.run import lint as look

    return look(file, rules=lint_rules(), fail_at=fail_at, select=select, ignore=ignore)
