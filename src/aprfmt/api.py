"""The functions of the package that need several rooms: `validate`, `bench`, `qa`, `run` and others."""

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
    text_field: str = "text",
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> DataReport:
    """What the data of a training run hold, read as `apr distill` and `apr pretrain` read them.

    Args:
        paths: text, jsonl, csv or Parquet files, folders of them, or token shards; `PATH:WEIGHT` too.
        model: whose tokenizer and chat template they are read with.
        text_field: where a record's text is.
        strict: whether a bad record is an error; otherwise it is counted and left out.
        log: called with a line for the first bad record of each kind, and now and then.

    Raises:
        RefusedError: the model has no tokenizer, or no chat template for conversations.
        CorruptError: a damaged file.
    """
    from aprfmt.texts.encoding import Encoder
    from aprfmt.texts.sources import split_weights
    from aprfmt.texts.summary import summarise

    given = paths_of(paths)
    places, weights = split_weights([formats.path_text(path, "paths") for path in given])
    with formats.open(formats.path_text(model, "model")) as opened:
        encoder = Encoder(opened.tokenizer)
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
    """Measures the speed of models in llama.cpp; several are loaded together and computed in turns.

    Args:
        files: a model in any form, or several.
        prompt_tokens: length of the prompt.
        tokens: length of the text.
        runs: runs that count, after one to warm up.
        threads: threads of llama.cpp; 0: half of the processors.
        gpu_layers: layers to compute on a GPU, if this llama.cpp can.
        gates: limits by name (running.bench.GATES), or NAME=VALUE each.
        output: a page to write, a .html.
        force: replace an existing output.
        progress: called with the tokens to compute; gives the function to call as they are.
        log: called with a line where a model is exported first.

    Raises:
        UsageError: unknown gate.
        UnsupportedError: for an encoder.
        RunError: llama.cpp does not compute a model.
    """
    from aprfmt.running.bench import measure, parse_gates

    check_numbers(prompt_tokens=(prompt_tokens, 1), tokens=(tokens, 1), runs=(runs, 1), threads=(threads, 0))
    paths = paths_of(files)
    if not paths:
        raise UsageError("no model to measure")
    names = [formats.path_text(path, "files") for path in paths]
    target = _page_target(output, names, force=force)
    found = measure(
        names,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        runs=runs,
        threads=threads,
        gpu_layers=gpu_layers,
        gates=parse_gates(gates),
        say=log,
        progress=progress,
    )
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
    """Examines a model that generates text by gates that it can fail; docs/qa.md says what each shows.

    Args:
        file: the model, in any form.
        against: what it was made from, to compare with.
        allow_skip: gates that may be skipped.
        threads: threads of llama.cpp; 0: half of the processors.
        output: a page to write, a .html, whether the model passes or not.
        force: replace an existing output.
        log: called with a line where a model is exported first.
        on_gate: called with each gate as soon as it has looked.

    Raises:
        UsageError: unknown gate.
        UnsupportedError: for an encoder.
        MissingDependencyError: without llama.cpp.
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

    Of source folders it may replace pages alone.
    """
    if output is None:
        return None
    from aprfmt.html.file import check_page
    from aprfmt.io.sink import check_target
    from aprfmt.io.source import is_folder

    target = formats.path_text(output, "output")
    check_page(target, also=also)
    inside = (path for source in sources if is_folder(source) for path in Path(source).iterdir())
    check_target(
        target, [*sources, *(str(path) for path in inside if not path.name.endswith((".html", ".htm")))], force
    )
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
    """What the model `file`, in any form, answers to `prompt`, through llama.cpp.

    Args:
        file: the model. What is not a GGUF is exported into a cache first, once.
        prompt: what the user says, or with `raw` a text to continue.
        system: the system message.
        raw: continue `prompt` as it is, without a chat template; None: where the model has no template.
        template: file of a chat template, or the name of one of the model's or of llama.cpp's.
        max_tokens: at most so many; None: until the model ends or the context is full, 256 with `raw`.
        temperature: 0 takes the most likely token each time; the next four count where it is more.
        top_k: draw from the k most likely tokens; 0: from all.
        top_p: draw from the most likely tokens that have this probability together.
        min_p: draw from tokens with at least this share of the most likely one's probability.
        seed: the same seed draws the same tokens.
        stop: words that end the answer and do not belong to it.
        lora: adapters of any form, each with its scale where that is not 1.
        image, audio: files that the prompt is about; "<__media__>" in the prompt says where they belong.
        mmproj: GGUF of the towers that see and hear; None: the model's own.
        ctx: tokens of the context; 0: those that the model was trained with; None: these, at most 4096.
        threads: threads of llama.cpp; 0: half of the processors.
        gpu_layers: layers to compute on a GPU, if this llama.cpp can.
        dtype: what the weights become in the export, such as "q8_0".
        on_text: called with each piece of the answer as it comes.
        log: called with a line before something is exported.

    Raises:
        MissingDependencyError: without llama.cpp.
        RunError: llama.cpp refuses the model, dies, or computes NaN.
    """
    from aprfmt.running.generate import Loading, Prompt, Runner, sampling_of

    asked = Prompt(prompt, system, raw, [*paths_of(image), *paths_of(audio)])
    asked.check()
    sampling = sampling_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    words = [stop] if isinstance(stop, str) else [*stop]
    loading = Loading(
        ctx=ctx,
        threads=threads,
        gpu_layers=gpu_layers,
        lora=_adapters(lora),
        mmproj=mmproj,
        media=bool(asked.media),
        template=template,
        dtype=dtype,
        raw=bool(raw),
    )
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
    """The vectors that the model `file`, in any form, makes of texts, through llama.cpp, pooled as the file says.

    A reranker compares the first text with each of the others. The other options are those of `run`.

    Raises:
        RunError: a text is longer than the context; llama.cpp refuses the model.
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
    progress: StartProgress | None = None,
) -> Validation:
    """Applies every rule to the model at `path`; every value is decoded.

    `strict` counts warnings as failures and compares the source files that an `.apr` would give back with the digests
    that it was imported with. A score under `min_score` fails. A warning costs its rule's weight, too. `base` is the
    model that an adapter is compared with. `progress` is called with the bytes to decode, its result with
    (bytes, tensor) as they are.
    """
    from aprfmt.convert.integrity import altered_files
    from aprfmt.inspection import validate as rules
    from aprfmt.io.digest import altered

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
        "source.restored", 0, "every source file comes out with the digest of its import", look
    )
    return rules.validate(
        path, strict=strict, min_score=min_score, base=base, progress=progress, more=[restored] if strict else []
    )


def report(
    file: PathLike,
    output: PathLike | None = None,
    *,
    force: bool = False,
    follow_links: bool = False,
    progress: StartProgress | None = None,
) -> dict[str, object]:
    """What there is to say of a model, or of a training run by its folder, and a page of it where `output` is named.

    Args:
        file: the model or the folder.
        output: a .html; of a run also a .png of the curves, which needs matplotlib.
        force: replace an existing output.
        follow_links: show files that links bring from outside the model's folder.
        progress: called with the bytes of a model that are read; gives the function to call with each piece.

    Returns:
        The object of `apr report --json`.

    Raises:
        AprError: with code "usage" for another suffix.
        ChecksumError: the model is damaged.
        RefusedError: links lead out of the model's folder.
    """
    from aprfmt.html.file import write_page
    from aprfmt.inspection.run_report import is_run, summarise, write_report

    path = Path(formats.path_text(file, "file"))
    page = _page_target(output, [str(path)], force=force, also=(".png",) if is_run(path) else ())
    target = Path(page) if page is not None else None
    names = {"file": os.fspath(file), "output": page}
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


def lint_rules() -> tuple[ValidationRule, ...]:
    """The rules of `apr lint`: id, level, what holds where it passes, why, and where that is written."""
    from aprfmt.convert.mixes import MIXES, OTHER_FILE_TYPES, find_mix
    from aprfmt.inspection.lint.table import rules

    def dtype_of(name: str) -> str | None:
        mix = find_mix(name)
        return mix.dtype if mix is not None else None

    file_types = {number: dtype for dtype, number in OTHER_FILE_TYPES.items()}
    return rules({mix.file_type: mix.dtype for mix in MIXES.values()} | file_types, dtype_of)


def lint(file: PathLike, *, fail_at: str = "warn", select: Sequence[str] = (), ignore: Sequence[str] = ()) -> Lint:
    """What the model `file` could do better; no value of a tensor is decoded.

    Args:
        file: the model.
        fail_at: "error", "warn" or "info": findings from this level on make `passed` false.
        select: ids of the rules to apply, globs too; none: all.
        ignore: ids of rules not to apply.

    Raises:
        UsageError: unknown level or rule.
    """
    from aprfmt.inspection.lint.run import lint as look

    return look(file, rules=lint_rules(), fail_at=fail_at, select=select, ignore=ignore)
