"""`imatrix`, `merge_imatrix`, and the matrix that a quantization computes for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt import formats
from aprfmt.errors import UsageError
from aprfmt.io.pipe import StartProgress
from aprfmt.schema import check_numbers
from aprfmt.types import PathLike, paths_of

if TYPE_CHECKING:
    from aprfmt.running.importance import ImatrixReport


AUTO = "auto"
"""In the place of an importance matrix: it is computed."""


def imatrix(
    file: PathLike,
    data: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    chunks: int | None = None,
    chunk_size: int = 512,
    process_output: bool = False,
    parse_special: bool = False,
    text_field: str = "text",
    resume: bool = False,
    second_moments: PathLike | None = None,
    threads: int = 0,
    gpu_layers: int = 0,
    plan: bool = False,
    force: bool = False,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ImatrixReport:
    """Computes the importance matrix of the model `file` on text with llama.cpp.

    Plain text files are joined into one text; records of other files are joined with blank lines. The text is split
    into chunks that are evaluated separately, each with a BOS token.

    Args:
        file: the model, in any format.
        data: text, jsonl or Parquet files, or folders of them.
        output: the file to write; .dat: the legacy format, else GGUF.
        chunks: maximum number of chunks.
        chunk_size: tokens per chunk.
        process_output: include the output head.
        parse_special: parse special tokens in the text.
        text_field: field of a record's text.
        resume: resume an interrupted run with the same output.
        second_moments: also write the second moments of the inputs to this file, for error feedback.
        threads: llama.cpp threads; 0: half of the CPUs.
        gpu_layers: layers to offload to a GPU, if llama.cpp supports it.
        plan: report the amount of text without computing.
        force: replace an existing output.
        progress: called with the number of tokens to compute; returns a function to call as they are computed.
        log: called with a line when a model is exported to GGUF first.

    Raises:
        RefusedError: the output is an input, the text is shorter than a chunk, or the run to resume is of another
            model or text.
        RunError: llama.cpp cannot run the model.
    """
    from aprfmt.running.importance import ImatrixRequest, compute
    from aprfmt.running.prepared import prepare
    from aprfmt.texts.sources import check_text_field, list_files

    check_numbers(chunks=(chunks, 1), chunk_size=(chunk_size, 32), threads=(threads, 0))
    if resume and second_moments is not None:
        raise UsageError("--resume cannot be combined with --second-moments", hint="run without --resume")
    paths = paths_of(data)
    texts = [Path(formats.path_text(path, "data")) for path in paths]
    files = list_files(texts, Counter())
    if text_field != "text":
        check_text_field(files, text_field)
    prepared = prepare(file, say=log)
    name = formats.path_text(file, "file")
    wanted = ImatrixRequest(
        prepared.path,
        name,
        prepared.key,
        chunk_size=chunk_size,
        chunks=chunks,
        output=process_output,
        parse_special=parse_special,
        n_threads=threads,
        gpu_layers=gpu_layers,
        second_moments=formats.path_text(second_moments, "second_moments") if second_moments is not None else None,
    )
    target = formats.path_text(output, "output")
    names = [path.name for path in texts]
    return compute(
        wanted,
        text_of(texts, text_field),
        names,
        target,
        inputs=[*prepared.sources, *(str(file.path) for file in files)],
        resume=resume,
        plan=plan,
        force=force,
        progress=progress,
    )


def text_of(paths: Sequence[Path], text_field: str = "text") -> Iterator[str]:
    """Plain text as it is; a blank line between files, between records and between messages."""
    from aprfmt.texts.records import Marked, RecordReader, as_text
    from aprfmt.texts.sources import list_files

    hint = "correct or remove the record, or set the field of the text with --text-field NAME"
    between = ""
    reader = RecordReader(separator=0, render=as_text, text_field=text_field, strict=True, strict_hint=hint)
    for file in list_files(paths, Counter()):
        if file.kind == "tokens":
            raise UsageError("token shards are not text", path=file.path, hint="use the original text")
        plain = file.kind in ("text", "source")
        for document in reader.documents(file):
            yield between
            yield document.text if isinstance(document, Marked) else str(document)
            between = "" if plain else "\n\n"
        between = "\n\n"


def cached_imatrix(
    file: PathLike,
    data: Sequence[PathLike],
    *,
    chunks: int | None = None,
    text_field: str = "text",
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[str, list[str]]:
    """Returns (path of the importance matrix of the model `file` on the text `data`, warnings about it).

    The file is cached by model, text, field and number of chunks; an interrupted computation is resumed. Raises the
    same errors as `imatrix`.
    """
    from aprfmt.formats.imatrix import DEFAULT_CHUNK, read_sums
    from aprfmt.io.cache import CacheFolder
    from aprfmt.running.importance import remarks
    from aprfmt.running.prepared import key, prepare
    from aprfmt.texts.sources import list_files

    if not data:
        raise UsageError(f"--imatrix {AUTO} needs text", hint="set it with --data")
    texts = [formats.path_text(path, "data") for path in data]
    list_files([Path(text) for text in texts], Counter())  # before the model is exported
    model = prepare(file, say=log)
    own = key(texts, {"model": model.key, "chunks": chunks, "text_field": text_field})
    name = f"{Path(formats.path_text(file, 'file')).stem[:40]}-{own}.imatrix.gguf"

    def make(target: Path) -> None:
        log(f"computing an importance matrix of {', '.join(texts)}, once")
        imatrix(
            file,
            texts,
            target,
            chunks=chunks,
            chunk_size=DEFAULT_CHUNK,
            text_field=text_field,
            resume=True,
            progress=progress,
        )

    entry = CacheFolder("imatrix").entry(name, make)
    entry.confirm()
    return str(entry.path), remarks(read_sums(entry.path), str(entry.path))


def merge_imatrix(
    files: Sequence[PathLike], output: PathLike, *, plan: bool = False, force: bool = False
) -> ImatrixReport:
    """Merges importance matrices of one model, in either format. Raises RefusedError if the models differ."""
    from aprfmt.running.importance import merge

    return merge(files, formats.path_text(output, "output"), plan=plan, force=force)
