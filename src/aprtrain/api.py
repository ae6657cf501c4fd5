"""The public functions that compute with torch: `aprfmt.evaluate`, `teacher`, `distill`, `pretrain`, `resume`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from aprfmt import formats
from aprfmt.errors import MissingDependencyError, UnsupportedError, UsageError
from aprfmt.io.pipe import StartProgress
from aprfmt.io.server_url import is_server
from aprfmt.schema import check_numbers, flag_of
from aprfmt.types import PathLike, paths_of

if TYPE_CHECKING:
    from aprfmt.running.evaluation import Evaluation
    from aprfmt.running.teacher import TeacherReport
    from aprtrain.config import Config
    from aprtrain.finish import Summary


def evaluate(
    file: PathLike,
    data: PathLike,
    *,
    teacher: PathLike | None = None,
    engine: str | None = None,
    device: str | None = None,
    seq_len: int | None = None,
    limit: int | None = None,
    text_field: str = "text",
    vocab_policy: str = "shared",
    threads: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Computes loss and perplexity of the model `file` on the text of `data`.

    Both engines score the same sequences; attention stays inside each document.

    Args:
        file: the model.
        data: a text, jsonl or Parquet file, or a folder of them; of a run's token shards, the held-out part.
        teacher: a model to compute the KL divergence from.
        engine: "torch", for the families that `aprtrain` supports, or "llama", for every decoder of llama.cpp; None:
            torch on a GPU if available and supported, else llama.cpp.
        device: torch device: "cuda", "cuda:N" or "cpu", without fallback. Implies the engine "torch".
        seq_len: sequence length; None: 2048, or a model's context if shorter.
        limit: number of tokens to score, spread evenly over the data; None: all.
        text_field: field of a record's text.
        vocab_policy: if the teacher has tokens that the model lacks: refuse ("shared"), or compare over the shared
            tokens ("renormalise"); `dropped_mass` is the probability of the others.
        threads: llama.cpp threads; 0: half of the CPUs.
        log: called with progress lines.

    Raises:
        MissingDependencyError: torch is not installed.
        RunError: the evaluation failed, without a score.
    """
    for name, value in (("seq_len", seq_len), ("limit", limit)):
        if value is not None and (type(value) is not int or value < 2):
            raise UsageError(f"{flag_of(name)} must be at least 2 tokens, not {value!r}")
    model, text = formats.path_text(file, "file"), Path(formats.path_text(data, "data"))
    other = formats.path_text(teacher, "teacher") if teacher is not None else None
    if vocab_policy not in ("shared", "renormalise"):
        raise UsageError(f"unknown --vocab-policy {vocab_policy!r:.40}", hint="use shared or renormalise")
    if vocab_policy != "shared" and teacher is None:
        raise UsageError("--vocab-policy needs a teacher to compare with", hint="add --teacher FILE, or leave it out")
    check_numbers(threads=(threads, 0))
    _check_engine(engine, device)
    if (engine or _engine_for([model, *([other] if other is not None else [])], device)) == "llama":
        from aprfmt.running import evaluation_llama

        return evaluation_llama.score(
            model, text, teacher=other, seq_len=seq_len, limit=limit, text_field=text_field, vocab_policy=vocab_policy,
            threads=threads, log=log,
        )  # fmt: skip
    if threads:
        raise UsageError("--threads applies to llama.cpp, but the engine is torch", hint="leave out --threads")
    _require_torch("this evaluation")
    from aprtrain.evaluate import score

    return score(
        model,
        text,
        teacher=other,
        device=device or "cuda",
        seq_len=seq_len,
        limit=limit,
        text_field=text_field,
        vocab_policy=vocab_policy,
        log=log,
    )


def teacher(
    file: PathLike | None,
    data: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    top_k: int = 64,
    temperature: Sequence[float] = (),
    student: PathLike | None = None,
    seq_len: int | None = None,
    held_out: float = 0.01,
    text_field: str = "text",
    strict: bool = False,
    engine: str | None = None,
    device: str | None = None,
    threads: int = 0,
    gpu_layers: int = 0,
    from_vllm: PathLike | None = None,
    prompts: PathLike | None = None,
    plan: bool = False,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> TeacherReport:
    """Saves the top-k log-probabilities of the model `file` on text for `apr distill --teacher-logprobs`.

    The same call resumes an interrupted one.

    Args:
        file: the teacher, in any format, or the URL of a vLLM, SGLang or llama-server (temperature 1 only, needs
            `student`); None with `from_vllm` or `prompts`.
        data: text, jsonl or Parquet files, folders of them, or token shards, each as `PATH` or `PATH:WEIGHT`.
        output: the folder to write, including the token shards of the text.
        top_k: most likely tokens to save per position.
        temperature: temperatures at which to save the residual mass, in addition to 1; (): 2, 3 and 4.
        student: the model whose tokenizer is used; None: `file`.
        seq_len: sequence length; None: 2048, or the teacher's context if shorter.
        held_out: fraction of the documents to hold out.
        text_field: field of a record's text.
        strict: fail on invalid records; otherwise they are counted and skipped.
        engine: "torch" or "llama", see `evaluate`.
        device: torch device: "cuda", "cuda:N" or "cpu". Implies the engine "torch".
        threads: llama.cpp threads; 0: half of the CPUs.
        gpu_layers: layers to offload to a GPU, if llama.cpp supports it.
        from_vllm: JSON lines of vLLM responses with the log-probabilities, at temperature 1 only.
        prompts: only write the prompts for vLLM, as JSON lines.
        plan: report the amount of output without writing.
        progress: called with the number of tokens to compute; returns a function to call as they are computed.
        log: called with progress lines.

    Raises:
        MissingDependencyError: torch is not installed.
        RefusedError: the folder contains files of a different run; the tokenizers differ; the vLLM responses lack a
            sequence.
        RunError: the teacher's logits are not finite.
    """
    check_numbers(top_k=(top_k, 1), seq_len=(seq_len, 2), threads=(threads, 0), gpu_layers=(gpu_layers, 0))
    if not (isinstance(held_out, (int, float)) and 0 < held_out <= 0.9):
        raise UsageError(f"--held-out must be above 0 and at most 0.9, not {held_out!r:.40}")
    for t in temperature:
        if not (isinstance(t, (int, float)) and 0.05 <= t <= 100):
            raise UsageError(f"--temperature must be between 0.05 and 100, not {t!r:.40}")
    if from_vllm is not None and (file is not None or set(temperature) - {1}):
        raise UsageError(
            "--from-vllm replaces the teacher and only has temperature 1",
            hint="leave out the model and --temperature; --student sets the model whose tokenizer is used",
        )
    if from_vllm is not None and prompts is not None:
        raise UsageError(
            "--prompts and --from-vllm are mutually exclusive: write the prompts first", hint="leave out one of the two"
        )
    served = is_server(file)
    if served and (student is None or set(temperature) - {1} or prompts is not None):
        raise UsageError(
            "a server gives log-probabilities at temperature 1, for the tokenizer of a student"
            if prompts is None else "--prompts and a server are mutually exclusive: the server is asked directly",
            hint="add --student FILE, and leave out --temperature and --prompts",
        )  # fmt: skip
    machine = {"engine": engine, "device": device, "threads": threads, "gpu_layers": gpu_layers}
    others = [name for name, value in machine.items() if value]
    if others and (served or from_vllm is not None or prompts is not None):
        raise UsageError(
            f"{flag_of(others[0])} has no effect without a teacher to run", hint=f"leave out {flag_of(others[0])}"
        )
    _check_engine(engine, device)
    if (engine == "torch" or device is not None) and (threads or gpu_layers):
        raise UsageError(
            "--threads and --gpu-layers apply to llama.cpp, but the engine is torch",
            hint="leave out --threads and --gpu-layers",
        )
    _require_torch("writing teacher files")
    if file is None and from_vllm is None and prompts is None:
        raise UsageError("the teacher is missing", hint="apr teacher FILE --data D -o DIR")
    from aprfmt.formats.hub_datasets import split_sources
    from aprtrain.teach import TeacherRequest, write

    def path(value: PathLike | None, name: str) -> Path | None:
        return None if value is None else Path(formats.path_text(value, name))

    model = str(file) if served else None if file is None else formats.path_text(file, "file")
    other = None if student is None else formats.path_text(student, "student")
    chosen = "vllm" if from_vllm is not None else "server" if served else engine
    if chosen is None and not (plan or prompts):
        chosen = _engine_for([model] if model is not None else [], device)
    heats = () if from_vllm is not None or served else (temperature or (2.0, 3.0, 4.0))
    places, weights = split_sources([formats.path_text(each, "data") for each in paths_of(data)])
    wanted = TeacherRequest(
        file=model,
        data=places,
        weights=weights,
        text_field=text_field,
        strict=strict,
        output=Path(formats.path_text(output, "output")),
        top_k=top_k,
        temperatures=(1.0, *sorted({float(t) for t in heats} - {1.0})),
        student=other,
        seq_len=seq_len,
        held_out=held_out,
        engine=chosen or "",
        device=device or "cuda",
        threads=threads,
        gpu_layers=gpu_layers,
        from_vllm=path(from_vllm, "from_vllm"),
        prompts=path(prompts, "prompts"),
    )
    return write(wanted, plan=plan, progress=progress, log=log)


def distill(
    teacher: PathLike | None = None, *, config: PathLike | None = None, stream: TextIO | None = None, **options: object
) -> Summary:
    """Trains a student on text and on the predictions of its teacher, as `apr distill`.

    Args:
        teacher: the teacher model, in any format.
        config: a .toml, .yaml or .json file of options; `options` override it.
        stream: where progress is written, such as sys.stderr.
        options: the options of `apr distill`, with underscores: student="s.apr", data=["c.jsonl"], output="run".

    Raises:
        UsageError: unknown option or bad value.
        MissingDependencyError: torch is not installed.
        RunError: the training failed.
    """
    return _train("distill", options | ({} if teacher is None else {"teacher": teacher}), config, stream)


def pretrain(*, config: PathLike | None = None, stream: TextIO | None = None, **options: object) -> Summary:
    """Trains a model on text, as `apr pretrain`; parameters and errors as of `distill`."""
    return _train("pretrain", options, config, stream)


def resume(run: PathLike, *, steps: int | None = None, stream: TextIO | None = None) -> Summary:
    """Continues the training run in the folder `run` from its latest checkpoint with its recorded options.

    `steps` sets another last step, which may lie beyond the learning rate schedule; `stream` as of `distill`.
    Raises UnknownFormatError if `run` is not the folder of a run, RefusedError without a checkpoint, and as `distill`.
    """
    _require_torch("training")
    from aprtrain import recorded
    from aprtrain.run import run as train

    def on(command: str, settings: Config, lines: list[str]) -> Summary:
        return train(command, settings, stream=stream, lines=lines)

    return recorded.resume(Path(formats.path_text(run, "run")), steps, None, on)


def _train(command: str, options: Mapping[str, object], config: PathLike | None, stream: TextIO | None) -> Summary:
    _require_torch("training")
    from aprtrain.config import command_fields
    from aprtrain.config_sources import build
    from aprtrain.run import run as train

    known = [row.name for row in command_fields(command)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise UsageError(f"unknown option {name!r}", hint=f"did you mean {near[0]}?" if near else None)
    given = {name: _plain(value) for name, value in options.items()}
    settings, lines = build(command, given, config)
    return train(command, settings, stream=stream, lines=lines)


def _plain(value: object) -> object:
    """A value as the command line gives it: paths as text, several as a tuple."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _require_torch(what: str) -> None:
    if find_spec("torch") is None:
        raise MissingDependencyError(f"{what} needs torch", hint="pip install torch")


_ENGINES = ("torch", "llama")


def _check_engine(engine: str | None, device: str | None) -> None:
    if engine not in (None, *_ENGINES):
        raise UsageError(f"unknown engine {engine!r:.40}", hint=f"one of: {', '.join(_ENGINES)}")
    if engine == "llama" and device is not None:
        raise UsageError("--device applies to torch, but the engine is llama", hint="leave out one of the two")


def _engine_for(models: Sequence[str], device: str | None) -> str:
    """The engine for models that no engine was named for."""
    from aprfmt.llama.engine import ENGINES

    if device is not None:
        return "torch"
    if not any(find_spec(package) for package in ENGINES):
        return "torch"
    if find_spec("torch") is None:
        return "llama"
    import torch

    if not torch.cuda.is_available():
        return "llama"
    from aprtrain.network.weights import open_network

    try:
        for path in models:
            with open_network(path):
                pass
    except UnsupportedError:
        return "llama"
    return "torch"
