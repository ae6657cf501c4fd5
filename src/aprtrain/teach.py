"""`apr teacher`: saves a teacher's log-probabilities, computed by torch or llama.cpp, or read from vLLM responses."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import aprfmt
from aprfmt.errors import ExistsError, RefusedError, RunError, UsageError, storage_errors
from aprfmt.formats.completions import CompletionServer
from aprfmt.formats.hub_datasets import split_sources
from aprfmt.formats.teacher_files import (
    Answer,
    TeacherHeader,
    TeacherShard,
    answer_of,
    fault_of,
    hashes_of,
    shard_path,
    write_shard,
)
from aprfmt.formats.vllm import Responses
from aprfmt.io.pipe import StartProgress
from aprfmt.io.server_url import is_server
from aprfmt.io.sink import AtomicFile, check_no_inputs_inside, check_target
from aprfmt.io.temporary import scratch_folder
from aprfmt.model import Model
from aprfmt.running.decoders import open_decoder
from aprfmt.running.evaluation import sequence_length
from aprfmt.running.evaluation_llama import architecture_of, parameters_of, positions_of
from aprfmt.running.scoring import LogitsReader
from aprfmt.running.teacher import TeacherReport
from aprfmt.texts.corpus import OtherDataError, prepare
from aprfmt.texts.encoding import Encoder, Int64
from aprfmt.texts.records import Log
from aprfmt.texts.sequences import WindowRows, Windows, pieces_of
from aprfmt.texts.shards import PARTS, read_header
from aprfmt.texts.sources import HEADER, list_files
from aprfmt.tokenizer.alignment import OTHERWISE, SharedVocabulary, align
from aprtrain.config import Config
from aprtrain.data.batches import batch_of
from aprtrain.loss.topk import top_k_of
from aprtrain.network.decoder import soft_cap
from aprtrain.network.weights import edge_fingerprint, open_network
from aprtrain.teacher.teacher import Teacher, check_residency, residency_of, teacher_dtype
from aprtrain.world import device_of

_SHARD_BYTES = 64 << 20
_MAX_REST = 0.1  # residual mass above which the saved distribution is a poor teacher
_POSITIONS = {"cpu": 256, "cuda": 1024}  # per chunk of logits
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}  # of a batch in torch
_TOKENS = "tokens"
_OPTIONS = {"seq_len": "--seq-len", "k": "--top-k", "temperatures": "--temperature"}
"""Options of `apr teacher` that set fields of a file's header."""

SERVER_TOP_K = 20
"""Log-probabilities of a position that vLLM gives without further options."""

_CHARS = 4  # bytes of text per token, to estimate tokens before tokenizing


@dataclass(frozen=True, kw_only=True)
class TeacherRequest:
    """Arguments of `apr teacher`; see `aprfmt.teacher`."""

    file: str | None
    data: list[Path]
    weights: list[Fraction]
    text_field: str
    strict: bool
    output: Path
    top_k: int
    temperatures: tuple[float, ...]
    student: str | None
    seq_len: int | None
    held_out: float
    engine: str
    device: str
    threads: int
    gpu_layers: int
    from_vllm: Path | None
    prompts: Path | None


_Answers = Callable[[Windows, range], Iterator[Answer]]
"""Yields the log-probabilities to save of these sequences, in order."""


def write(wanted: TeacherRequest, *, plan: bool, progress: StartProgress | None, log: Log) -> TeacherReport:
    """What `aprfmt.teacher` does."""
    begin = time.perf_counter()
    with ExitStack() as stack:
        server = CompletionServer(wanted.file) if wanted.file is not None and is_server(wanted.file) else None
        has_model = wanted.file is not None and server is None
        model = stack.enter_context(aprfmt.open(wanted.file)) if has_model and wanted.file is not None else None
        reader = stack.enter_context(aprfmt.open(wanted.student)) if wanted.student is not None else model
        if reader is None:
            raise UsageError("no model given", hint="use apr teacher F ..., or --from-vllm FILE --student S")
        encoder = Encoder(reader.tokenizer)
        made_for = {} if model is None else {"teacher": positions_of(model)}
        if server is not None:
            server.check_tokenizer(encoder.plain)
            for note in server.notes:
                log(note)
            made_for = {"teacher": server.max_tokens and server.max_tokens - 2}  # the last label, and a token to write
        length = sequence_length(wanted.seq_len, None, {who: n for who, n in made_for.items() if n})
        report = TeacherReport(
            output=str(wanted.output), teacher=wanted.file or str(wanted.from_vllm or ""), engine=wanted.engine,
            top_k=wanted.top_k, temperatures=list(wanted.temperatures), seq_len=length,
        )  # fmt: skip
        _check_k(wanted.top_k, encoder.n_ids)
        if plan:
            return _planned(wanted, encoder.n_ids, report)
        inputs = [*_inputs(wanted, model, reader)]
        if wanted.prompts is not None:
            check_target(wanted.prompts, inputs, force=True)
        if wanted.output.exists():
            check_target(wanted.output, inputs, force=True, folder=True)
            check_no_inputs_inside(wanted.output, inputs)
        old = _check_output(wanted.output)
        header = read_header(wanted.output / _TOKENS) if old else None
        try:
            corpus = prepare(
                wanted.data, reader.tokenizer, wanted.output / _TOKENS, held_out=wanted.held_out, log=log,
                wanted=header["key"] if header is not None else None, own=wanted.output, weights=wanted.weights,
                text_field=wanted.text_field, strict=wanted.strict,
            )  # fmt: skip
        except OtherDataError as error:
            raise RefusedError(
                "the folder contains teacher files of other data", path=wanted.output,
                hint="resume with their --data, or choose another -o",
            ) from error  # fmt: skip
        held = zip(PARTS, (corpus.train, corpus.held_out), strict=True)
        parts = {part: Windows(tokens, length, corpus.separator) for part, tokens in held}
        report.windows = {part: len(windows) for part, windows in parts.items()}
        if wanted.prompts is not None:
            report.prompts = _write_prompts(wanted.prompts, parts, wanted.top_k)
        else:
            facts, answer = _engine(wanted, server or model, reader, encoder, length, stack, log)
            report.engine = facts.engine
            todo = _todo(wanted.output, old, parts, facts, report)
            _compute(todo, facts, answer, report, progress, served=server is not None)
            if far := [f"{mass:.0%} at temperature {t}" for t, mass in report.rest.items() if mass > _MAX_REST]:
                log(
                    f"residual mass outside the top {wanted.top_k} tokens: {', '.join(far)}; raise "
                    "--top-k, or lower --temperature"
                )
    report.seconds = time.perf_counter() - begin
    return report


def save_answers(config: Config, folder: Path, log: Log) -> None:
    """Saves what the server of --teacher says of a run's data; continues where it was stopped."""
    paths, weights = split_sources(config.data)
    wanted = TeacherRequest(
        file=config.teacher, data=paths, weights=weights, text_field=config.text_field, strict=config.strict,
        output=folder, top_k=config.top_k or SERVER_TOP_K, temperatures=(1.0,), student=config.student,
        seq_len=config.seq_len, held_out=config.held_out, engine="server", device="cpu", threads=0, gpu_layers=0,
        from_vllm=None, prompts=None,
    )  # fmt: skip
    report = write(wanted, plan=False, progress=None, log=log)
    log(f"teacher: top {report.top_k} log-probabilities of {report.tokens:,} positions from {report.teacher}")


def _inputs(wanted: TeacherRequest, *models: Model | None) -> Iterator[str]:
    """The files and folders that are read."""
    yield from (str(path) for path in wanted.data)
    yield from (str(file.path) for file in list_files(wanted.data, Counter(), wanted.output))
    for model in models:
        if model is not None:
            yield from (str(model.path), *(source.path for source in model.sources))
    if wanted.from_vllm is not None:
        yield str(wanted.from_vllm)


def _check_output(folder: Path) -> set[Path]:
    """Creates the folder; returns the teacher files in it. Raises ExistsError if it contains other files."""
    with storage_errors(folder):
        os.makedirs(folder, exist_ok=True)
        old = {path for path in folder.iterdir() if path.name != _TOKENS and not path.name.startswith(".")}
    if others := sorted(path.name for path in old if "-of-" not in path.name):
        raise ExistsError(f"the folder contains {others[0]}, which is not a teacher file", path=folder)
    return old


def _planned(wanted: TeacherRequest, n_ids: int, report: TeacherReport) -> TeacherReport:
    header = read_header(wanted.data[0]) if len(wanted.data) == 1 and (wanted.data[0] / HEADER).is_file() else None
    if header is not None:
        counts = {part: header["parts"][part]["tokens"] for part in PARTS}
    else:
        n_bytes = sum(file.size for file in list_files(wanted.data, Counter()))
        counts = {"train": n_bytes // _CHARS}
    report.windows = {part: -(-n // report.seq_len) for part, n in counts.items()}
    report.tokens = sum(counts.values())
    facts = TeacherHeader("", "", "", 0, "", "", report.seq_len, n_ids, wanted.top_k, wanted.temperatures)
    report.bytes = report.tokens * facts.row_bytes
    return report


_File = tuple[Path, Windows, range]
"""A file to write, and its sequences."""


def _todo(
    folder: Path, old: set[Path], parts: dict[str, Windows], facts: TeacherHeader, report: TeacherReport
) -> list[_File]:
    """The files still to write. Raises RefusedError if existing files have other options or other text."""
    for path in sorted(old):
        was, now = TeacherShard(path).facts.to_metadata(), facts.to_metadata()
        if different := [
            f"{_OPTIONS.get(name, name)} was {was[name]}, is {now[name]}" for name in now if was[name] != now[name]
        ]:
            raise RefusedError(
                f"the folder contains files of a different run: {'; '.join(different)}", path=path,
                hint="use the same options to resume, or choose another -o",
            )  # fmt: skip
    each = max(1, _SHARD_BYTES // (facts.seq_len * facts.row_bytes))
    todo, files = [], dict[Path, list[bytes]]()
    for part, windows in parts.items():
        count = -(-len(windows) // each)
        for number in range(count):
            path = shard_path(folder, part, number, count)
            some = range(number * each, min((number + 1) * each, len(windows)))
            files[path] = hashes_of(windows, some) if path in old else []
            todo += [] if path in old else [(path, windows, some)]
    if odd := sorted(path for path in old if TeacherShard(path).hashes != files.get(path)):
        raise RefusedError(
            "the folder contains teacher files of a different text", path=odd[0], hint="choose another -o"
        )
    report.files, report.resumed = len(files), len(old)
    report.bytes = sum(path.stat().st_size for path in old)
    return todo


def _compute(
    todo: list[_File],
    facts: TeacherHeader,
    answer: _Answers,
    report: TeacherReport,
    progress: StartProgress | None,
    *,
    served: bool,
) -> None:
    """Computes and writes each file; adds the totals to `report`."""
    advance = progress(sum(facts.seq_len * len(some) for _, _, some in todo)) if progress is not None else None
    loss, rest = 0.0, np.zeros(len(facts.temperatures))
    broken = (
        "check the server, and that --student has its model's tokenizer"
        if served
        else "the teacher's weights may be damaged"
    )
    for path, windows, some in todo:
        answers = []
        for i, found in zip(some, answer(windows, some), strict=True):
            answers.append(found)
            if fault := fault_of(found, facts):
                raise RunError(f"sequence {i}: {fault}", path=path, hint=broken)
            report.tokens += len(found.label_P)
            loss -= float(found.label_P.sum(dtype=np.float64))
            rest += found.residual_PR.sum(0, dtype=np.float64)
            if advance is not None:
                advance(facts.seq_len, path.name)
        write_shard(path, facts, hashes_of(windows, some), answers)
        report.bytes += path.stat().st_size
    if report.tokens:
        report.teacher_ce = loss / report.tokens
        report.rest = {f"{t:g}": float(mass) for t, mass in zip(facts.temperatures, rest / report.tokens, strict=True)}


def _write_prompts(path: Path, parts: dict[str, Windows], k: int) -> int:
    """Writes one vLLM request per line as JSON; returns their number."""
    count = 0
    with AtomicFile(str(path)) as sink:
        for windows in parts.values():
            for i in range(len(windows)):
                for piece in pieces_of(windows.rows([i]), 0):
                    how = {"prompt_logprobs": k, "max_tokens": 1, "return_token_ids": True}
                    sink.write(json.dumps({"prompt": piece.prompt, **how}).encode() + b"\n")
                    count += 1
    return count


# --- engines ---


def _engine(
    wanted: TeacherRequest,
    model: Model | CompletionServer | None,
    reader: Model,
    encoder: Encoder,
    length: int,
    stack: ExitStack,
    log: Log,
) -> tuple[TeacherHeader, _Answers]:
    temperatures, k = wanted.temperatures, wanted.top_k
    if isinstance(model, CompletionServer):
        name, engine, sizes = model.model, f"{model.kind} server", (length, encoder.n_ids, k, temperatures)
        facts = TeacherHeader(name, model.digest, "", 0, engine, encoder.digest, *sizes)
        return facts, lambda windows, some: model.answers(windows, some, facts)
    if wanted.from_vllm is not None:
        responses = Responses(wanted.from_vllm)
        with storage_errors(wanted.from_vllm), wanted.from_vllm.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = responses.model or wanted.from_vllm.name
        facts = TeacherHeader(name, digest, "", 0, "vllm", encoder.digest, length, encoder.n_ids, k, temperatures)
        return facts, lambda windows, some: (responses.answer(windows, i, facts) for i in some)
    assert model is not None
    assert wanted.file is not None
    if wanted.engine == "torch":
        where = device_of(wanted.device)
        network = stack.enter_context(open_network(wanted.file))
        vocabulary = _shared(model, reader, network.shape.vocab_rows)
        residency = residency_of(network) if where.type == "cuda" else "bf16"
        check_residency(residency, where)
        decoder = Teacher(
            network, vocabulary, residency, where, dtype=teacher_dtype(residency, where), compiled=where.type == "cuda"
        )
        logits: _Logits = _of_torch(decoder, where)
        engine = f"torch {where.type}"
    else:
        llama = stack.enter_context(
            open_decoder(wanted.file, n_ctx=length + 8, n_threads=wanted.threads, gpu_layers=wanted.gpu_layers, say=log)
        )
        vocabulary = _shared(model, reader, llama.n_vocab)
        folder = stack.enter_context(scratch_folder("teacher"))
        logits = _of_llama(LogitsReader(folder, llama))
        engine = f"llama.cpp ({llama.engine})"
    _check_k(k, vocabulary.n_real)
    name, architecture, size = Path(wanted.file).name, architecture_of(model), parameters_of(model)
    facts = TeacherHeader(
        name, edge_fingerprint(model), architecture, size, engine, encoder.digest, length, vocabulary.n_real, k,
        temperatures,
    )  # fmt: skip
    return facts, lambda windows, some: (_told(each, vocabulary.n_real, facts) for each in logits(windows, some))


def _check_k(k: int, n_tokens: int) -> None:
    if k > n_tokens:
        raise UsageError(
            f"--top-k {k} is more than the {n_tokens} tokens of the vocabulary", hint=f"--top-k {n_tokens} or less"
        )


def _shared(model: Model, reader: Model, rows: int) -> SharedVocabulary:
    own = len(reader.tokenizer.tokens) if reader.tokenizer is not None else 0
    n_own = max(own, rows) if reader is model else own
    return align(model.tokenizer, reader.tokenizer, rows, n_own, surplus_hint=OTHERWISE)


_Chunks = Iterator[tuple[Int64, Int64, Tensor]]
"""Yields (positions [P], labels [P], logits [P, V]) for chunks of the labelled positions of a sequence, in order."""

_Logits = Callable[[Windows, range], Iterator[_Chunks]]
"""Yields the chunks of each of some sequences, in order."""


def _of_torch(teacher: Teacher, device: torch.device) -> _Logits:
    head_VD = teacher.decoder.head_rows(teacher.vocabulary.n_real).float()

    def chunks(labels_T: Int64, hidden_TD: Tensor) -> _Chunks:
        places = np.flatnonzero(labels_T >= 0)
        for start in range(0, len(places), _POSITIONS[device.type]):
            some = places[start : start + _POSITIONS[device.type]]
            product = hidden_TD[torch.from_numpy(some).to(device)].float() @ head_VD.t()
            yield some, labels_T[some], soft_cap(product, teacher.shape.logit_softcap)

    def logits(windows: Windows, numbers: range) -> Iterator[_Chunks]:
        each = max(1, _TOKENS_AT_ONCE[device.type] // windows.seq_len)
        for start in range(0, len(numbers), each):
            ids = [*numbers[start : start + each]]
            n = len(ids)
            if device.type == "cuda":  # compiled for one size of batch
                ids += [-1] * (each - n)
            batch = batch_of(windows, ids)
            labels_NT = batch.labels_NT[:n].numpy()
            batch = batch.to(device)
            yield from map(chunks, labels_NT, teacher.hidden(batch.tokens_NT, batch.documents))

    return logits


def _of_llama(reader: LogitsReader) -> _Logits:
    def chunks(rows: WindowRows) -> _Chunks:
        for piece in pieces_of(rows, 0):
            for begin, (found,) in reader.logits(piece.ids):
                at = piece.places_P - piece.start - begin
                inside = (at >= 0) & (at < len(found))
                yield piece.places_P[inside], piece.labels_P[inside], torch.from_numpy(found[at[inside]])

    return lambda windows, numbers: (chunks(windows.rows([number])) for number in numbers)


def _told(found: _Chunks, n_real: int, facts: TeacherHeader) -> Answer:
    answers = []
    for places, labels, logits_PV in found:
        t_PR = logits_PV[:, :n_real]
        if not bool(t_PR.isfinite().all()):
            raise RunError("the teacher's logits are not finite", hint="its weights may be damaged")
        ids, logprobs, rest = top_k_of(t_PR, facts.k, facts.temperatures)
        own = t_PR.gather(1, torch.from_numpy(labels).to(t_PR.device)[:, None])[:, 0] - t_PR.logsumexp(1)
        answers.append((places, *(value.cpu().numpy() for value in (ids, logprobs, rest, own))))
    return answer_of(answers, facts)
