"""Runs a model in llama.cpp: starts the worker, limits its time and survives its crashes."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NotRequired, TypedDict

from aprfmt import formats
from aprfmt.errors import MissingDependencyError, OutOfMemoryError, RunError, UsageError, memory_limit
from aprfmt.io.cache import in_use
from aprfmt.io.child import Child, ChildDiedError
from aprfmt.llama.engine import ENGINES, POOLINGS, LayerEffects, LoadRequest, Sampling
from aprfmt.llama.worker import STOP
from aprfmt.types import Json, JsonObject, PathLike

TIMEOUT_VARIABLE = "APR_LLAMA_TIMEOUT"
"""Environment variable: time limit of one request to llama.cpp, in seconds."""

_LEAST_SECONDS = 120.0
_BYTES_PER_SECOND = 20e6
"""Lower bounds for slow disks and processors: 16 tokens of a 70B model in an hour."""

_LOG_PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ")
_REASON = re.compile(r"(?:error loading model(?: \w+)?: )+(.+)|(GGML_ASSERT.+)")
_BUFFER = re.compile(r"(?:KV|RS|compute|output) buffer size = +([\d.]+) MiB")
_LAST_LINES, _LONGEST_LINE = 3, 300
_INSTALL = "pip install xllamacpp, or where it has no wheel: pip install llama-cpp-python"
_MAY_BE_WRONG = "apr validate FILE may show the cause"
_NO_MEMORY = re.compile(
    r"failed to allocate|unable to allocate|out of memory|bad_alloc|mem_buffer != NULL|Memory allocation|MemoryError"
)
_MOST_THREADS = 512
MOST_CONTEXT = 2**31 - 1


class LlamaDiedError(RunError):
    """llama.cpp crashed twice, or did not answer in time."""


def reason_in(log: str) -> str:
    """The error in llama.cpp's log; else its last lines, joined; empty if it logged nothing."""
    lines = [_LOG_PREFIX.sub("", line).strip()[:_LONGEST_LINE] for line in log.splitlines()]
    for line in reversed(lines):
        if found := _REASON.search(line):
            return str(next(filter(None, found.groups())))
    return "; ".join([line for line in lines if line][-_LAST_LINES:])


def require_llama() -> None:
    """Raises MissingDependencyError unless an engine is installed."""
    if not any(find_spec(package) for package in ENGINES):
        raise MissingDependencyError(
            f"this needs llama.cpp: none of {', '.join(ENGINES.values())} is installed", hint=_INSTALL
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Properties of a loaded model.

    Attributes:
        engine: the package that provides llama.cpp, with its version.
        n_vocab: tokens in the vocabulary.
        n_ctx: context length in tokens.
        n_ctx_train: context length the model was trained with.
        n_threads: compute threads.
        load_seconds: load time.
        weight_bytes: size of all tensors.
        bos, eos: ids of the begin and end tokens; -1 if absent.
        adds_bos: whether BOS is prepended to a text.
        has_encoder: whether it is an encoder-decoder.
    """

    engine: str
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_threads: int
    load_seconds: float
    weight_bytes: int
    bos: int
    eos: int
    adds_bos: bool
    has_encoder: bool


@dataclass(frozen=True, slots=True)
class Generated:
    """A continuation of a prompt.

    Attributes:
        ids: the tokens, an end token included.
        text: their text, without the stop string.
        ended: why generation stopped: "end" (an end token), "stop" (a string), "length", "context" (full), "interrupt".
        prompt_tokens: tokens of the prompt.
        prompt_seconds: time to the first token.
        seconds: time after that.
    """

    ids: list[int]
    text: str
    ended: str = field(compare=False)
    prompt_tokens: int = field(compare=False)
    prompt_seconds: float = field(compare=False)
    seconds: float = field(compare=False)


class Llama:
    """A model loaded in llama.cpp. Use in `with`.

    A worker that crashes is restarted once, without weights repacked for special instructions: if the processor reports
    AMX but the kernel does not grant it, llama.cpp crashes in its first computation. The context is lost then, so a
    call that depends on it fails.

    Args:
        path: a GGUF, or the first of its parts.
        n_ctx: context length in tokens; 0: the training context length.
        pooling: one of engine.POOLINGS, for embeddings.
        name: what errors call the file, if `path` is temporary.
        n_bytes: size of all parts, for the time limit.
        adapters: LoRA GGUFs to apply, each with its scale.
        n_threads: compute threads; 0: half of the processors.
        gpu_layers: layers to offload to a GPU, if the build of llama.cpp supports it.
        watched: required by `effects` and `reorder`.
        importance: "layers" or "output", required by `collect`.
        moments: as in LoadRequest.
        exact, n_seq: as in LoadRequest.
        tower: GGUF of the vision or audio tower, for `media`.
        engines: packages to try, in this order.

    Attributes:
        facts: properties of the loaded model.

    Raises:
        UsageError: a number is out of range.
        MissingDependencyError: no engine is installed, or none works.
        RunError: llama.cpp refuses the file.
        LlamaDiedError: it crashed twice, or took too long.
    """

    facts: LoadedModel

    def __init__(
        self,
        path: PathLike,
        *,
        n_ctx: int = 128,
        pooling: str | None = None,
        name: PathLike | None = None,
        n_bytes: int | None = None,
        adapters: Sequence[tuple[PathLike, float]] = (),
        n_threads: int = 0,
        gpu_layers: int = 0,
        importance: str | None = None,
        moments: PathLike | None = None,
        tower: PathLike | None = None,
        watched: bool = False,
        exact: bool = False,
        n_seq: int = 1,
        engines: Sequence[str] = tuple(ENGINES),
    ) -> None:
        require_llama()
        for what, value, most in (
            ("the context length", n_ctx, MOST_CONTEXT),
            ("--threads", n_threads, _MOST_THREADS),
            ("--gpu-layers", gpu_layers, 2**31 - 1),
        ):
            if type(value) is not int or not 0 <= value <= most:
                raise UsageError(f"{what} must be a number from 0 to {most}, not {value!r:.40}")
        self._name = os.fspath(name if name is not None else path)
        self._request = LoadRequest(
            os.path.abspath(path), n_ctx, pooling, extra_buffers=True, n_threads=n_threads, gpu_layers=gpu_layers,
            adapters=[(os.path.abspath(path), scale) for path, scale in adapters], importance=importance,
            moments=os.path.abspath(moments) if moments is not None else None,
            tower=os.path.abspath(tower) if tower is not None else None, watched=watched, exact=exact, n_seq=n_seq,
        )  # fmt: skip
        self._entries = in_use([self._request.path, *(path for path, _ in self._request.adapters), tower or path])
        self._engines = engines
        self._seconds = time_limit(n_bytes or os.path.getsize(path))
        self._worker: Child | None = None
        self._is_changed = False
        self._ask()

    @property
    def engine(self) -> str:
        """The package in use, with its version."""
        return self.facts.engine

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self.facts.n_vocab

    def system(self) -> str:
        """llama.cpp's list of the processor features it was built for."""
        text: str = self._ask("system")
        return text

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Encodes a text; `add_special` adds BOS and EOS as the model expects."""
        ids: list[int] = self._ask("tokenize", text=text, add_special=add_special, parse_special=parse_special)
        return ids

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decodes ids; includes the text of special tokens on request."""
        text: str = self._ask("detokenize", ids=[*ids], special=special)
        return text

    def generate(
        self,
        prompt: str | Sequence[int],
        n_tokens: int = 16,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        reuse: bool = False,
        parse_special: bool = True,
        media: Sequence[PathLike] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Generated:
        """Continues `prompt`, a text or ids, by at most `n_tokens`. Raises RunError, also for NaN or infinite logits.

        Args:
            prompt: a text, to which BOS is added, or ids, used unchanged.
            n_tokens: maximum number of new tokens.
            sampling: sampling parameters; None: greedy.
            stop: stop strings, which are not part of the text.
            reuse: keep the common prefix that the context already has.
            parse_special: whether names of special tokens in a text are parsed as those.
            media: image and audio files; engine.MEDIA_MARKER in the prompt, a text that gets no further tokens then,
                marks where each belongs.
            on_text: called with each piece of text as it is generated.
        """

        def give(part: Json) -> None:
            if on_text is not None and isinstance(part, dict):
                on_text(str(part["text"]))

        answer = self._ask(
            "generate", on_part=None if on_text is None else give,
            prompt=prompt if isinstance(prompt, str) else [*prompt], n_tokens=n_tokens,
            sampling=asdict(sampling) if sampling is not None else None, stop=[*stop], reuse=reuse,
            parse_special=parse_special, media=[os.path.abspath(path) for path in media],
        )  # fmt: skip
        return Generated(**answer)

    def interrupt(self) -> None:
        """Stops the running `generate` after its next token; for other threads and signal handlers."""
        if self._worker is not None:
            # A signal handler may run while the lock of the worker's stdin is held.
            threading.Thread(target=self._worker.say, args=[STOP]).start()

    def embed(self, text: str | Sequence[int]) -> list[float]:
        """The embedding of a text or of ids, for a model loaded with `pooling`. Raises RunError, also for NaN."""
        vector: list[float] = self._ask("embed", text=text if isinstance(text, str) else [*text])
        return vector

    def vectors(self, texts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Embeds the texts in one batch: one vector each, or with pooling "none" one per token."""
        found: list[list[list[float]]] = self._ask("vectors", texts=[[*ids] for ids in texts])
        return found

    def pair(self, query: str, document: str) -> list[int]:
        """The ids of a text pair for a reranker, with the special tokens of its vocabulary."""
        ids: list[int] = self._ask("pair", query=query, document=document)
        return ids

    def chat(self, name: str, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders a conversation with one of llama.cpp's own templates, including the start of an answer. Raises
        RunError.
        """
        text: str = self._ask("chat", name=name, messages=[dict(message) for message in messages])
        return text

    def logits(
        self, ids: Sequence[int], path: PathLike, *, follow: bool = False, encoded: Sequence[int] | None = None
    ) -> None:
        """Writes the logits after each of `ids` into `path`: float32, tokens x n_vocab. Raises RunError.

        Args:
            ids: the tokens.
            path: an existing file of the right size; in a memory file system nothing is written to a disk.
            follow: continue after the tokens of the previous call.
            encoded: input of the encoder in an encoder-decoder.
        """
        read: Json = [*encoded] if encoded is not None else None
        self._ask("logits", ids=[*ids], path=os.path.abspath(path), follow=follow, encoded=read)

    def compute(self, ids: Sequence[int], *, first: int = 0, follow: bool = False) -> None:
        """Computes at most BATCH ids at once, for `outputs` from index `first` on: see Session.compute."""
        self._ask("compute", ids=[*ids], first=first, follow=follow)

    def outputs(self, first: int, count: int, path: PathLike) -> None:
        """Writes the logits after `count` of the last computed ids into `path`, as `logits` does. Raises RunError."""
        self._ask("outputs", first=first, count=count, path=os.path.abspath(path))

    def last_logits(self, ids: Sequence[int], path: PathLike) -> None:
        """Writes the logits after the last of `ids` into `path`: float32, n_vocab. Raises RunError.

        Reuses the common prefix with the previous call.
        """
        self._ask("last_logits", ids=[*ids], path=os.path.abspath(path))

    def measure(self, prompt_tokens: int, tokens: int) -> dict[str, float]:
        """Measures the time of a prompt and of generation: see Session.measure."""
        found: dict[str, float] = self._ask("measure", prompt_tokens=prompt_tokens, tokens=tokens)
        return found

    def context_bytes(self) -> int | None:
        """Memory of the context and compute buffers, from llama.cpp's log; None if not stated."""
        assert self._worker is not None
        sizes = _BUFFER.findall(self._worker.written())
        return round(sum(map(float, sizes)) * 2**20) if sizes else None

    def effects(self, ids: Sequence[int]) -> tuple[list[float | None], list[str]]:
        """How far each layer moves a text's hidden states, relative to their size, and the names of the weights."""
        found: LayerEffects = self._ask("effects", ids=[*ids])
        return found["effects"], found["weights"]

    def states(self, ids: Sequence[int]) -> dict[str, dict[str, object]]:
        """Sketches (`watch.sketch`) of a text's hidden states, by layer; "-1": the embeddings."""
        found: dict[str, dict[str, object]] = self._ask("states", ids=[*ids])
        return found

    def reorder(self, heads: Sequence[tuple[str, int, int, int]], *, halves: bool) -> None:
        """Reorders weights in the memory of the worker: see Session.reorder."""
        self._is_changed = True
        self._ask("reorder", heads=[[*entry] for entry in heads], halves=halves)

    def replace(self, name: str, path: PathLike) -> None:
        """Overwrites a weight in the memory of the worker with the bytes of a file: see Session.replace."""
        self._is_changed = True
        self._ask("replace", name=name, path=os.path.abspath(path))

    def collect(self, ids: Sequence[int]) -> dict[str, int]:
        """See Session.collect. A crash loses the collected sums, so the worker is not restarted."""
        found: dict[str, int] = self._ask("collect", ids=[*ids], follow=True)
        return found

    def save_collected(self, path: PathLike) -> None:
        """See Session.save_collected."""
        self._ask("save_collected", path=os.path.abspath(path))

    def moments(self) -> dict[str, list[int]]:
        """See Session.moments."""
        found: dict[str, list[int]] = self._ask("moments")
        return found

    def load_collected(self, path: PathLike) -> None:
        """See Session.load_collected."""
        self._ask("load_collected", path=os.path.abspath(path))

    def _ask(self, call: str | None = None, *, on_part: Callable[[Json], None] | None = None, **arguments: Json) -> Any:
        """Calls a method of worker.CALLS, or only loads the model."""
        given: list[Json] = []

        def give(part: Json) -> None:
            if on_part is not None:
                given.append(part)
                on_part(part)

        while True:
            try:
                if self._worker is None:
                    self._start_worker()
                return self._reply(call, arguments, give) if call else None
            except ChildDiedError as death:
                self.close()
                # Text that was passed on cannot be taken back, and modified weights are lost.
                is_lost = self._is_changed or arguments.get("follow")
                if death.late or given or is_lost or not self._request.extra_buffers:
                    reason = reason_in(death.log)
                    self._check_memory(death.log)
                    raise LlamaDiedError(
                        self._named(f"llama.cpp {death}: {reason}" if reason else f"llama.cpp {death}"),
                        path=self._name,
                        hint=f"set {TIMEOUT_VARIABLE}=SECONDS to allow more time" if death.late else None,
                    ) from None
                self._request = replace(self._request, extra_buffers=False)

    def _start_worker(self) -> None:
        """Starts a worker that loads the model and sets `facts`."""
        # An abort in ggml would start a debugger for a backtrace.
        self._worker = Child(["-m", "aprfmt.llama.worker"], {"GGML_NO_BACKTRACE": "1"})
        try:
            answer = self._reply("load", {"engines": [*self._engines], "request": asdict(self._request)})
            for entry in self._entries:
                entry.confirm()
        except BaseException:
            self.close()
            raise
        answer["engine"] += "" if self._request.extra_buffers else ", extra buffers off"
        self.facts = LoadedModel(**answer)

    def _reply(self, call: str, arguments: JsonObject, on_part: Callable[[Json], None] | None = None) -> Any:
        assert self._worker is not None
        try:
            reply = self._worker.ask([call, arguments], self._seconds, on_part)
        except BaseException:  # what it still sends belongs to no other request
            self.close()
            raise
        if "ok" in reply:
            return reply["ok"]
        if "missing" in reply:
            raise MissingDependencyError(f"llama.cpp cannot be used: {reply['missing']}", hint=_INSTALL)
        message = str(reply["error"])
        if call == "load":
            reason = reason_in(self._worker.log())
            message = f"{message}: {reason}" if reason else message
        self._check_memory(message)
        hint = "use a longer context (--ctx)" if reply.get("room") else _MAY_BE_WRONG
        if _NO_MEMORY.search(message):
            hint = "use a shorter context (--ctx) or fewer bits per weight (apr quantize)"
        raise RunError(self._named(message), path=self._name, hint=hint)

    def _check_memory(self, text: str) -> None:
        """Raises OutOfMemoryError if the worker ran into a memory limit of this process."""
        limit = memory_limit()
        if limit is not None and _NO_MEMORY.search(text):
            raise OutOfMemoryError(
                f"llama.cpp is out of memory: this process is limited to {limit >> 20} MiB",
                path=self._name,
                hint="raise its limit: ulimit -v unlimited",
            ) from None

    def _named(self, message: str) -> str:
        return message.replace(self._request.path, self._name)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def time_limit(n_bytes: int) -> float:
    """Time limit of a request to a model of this size, in seconds. Raises UsageError for an invalid environment
    variable.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return _LEAST_SECONDS + n_bytes / _BYTES_PER_SECOND
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise UsageError(f"{TIMEOUT_VARIABLE} is {text!r}", hint="set it to a number of seconds")
    return seconds


# --- verifying a GGUF: it loads, has the vocabulary that the embedding asks for, and computes numbers ---

PROMPT = "The capital of France is"

_ENCODERS = ("gemma-embedding",)
"""Architectures with bidirectional attention that needs no key in llama.cpp."""


class LogitsComparison(TypedDict):
    """The result of `--verify=logits`: `what` is compared, by which engines, and the difference."""

    what: str
    tokens: int
    engine: str
    source_engine: str
    relative_error: float
    limit: float


class Verification(TypedDict):
    """The result of running a file in llama.cpp; decoders have `tokens` and `text`, encoders the embedding of the
    prompt.

    Outputs other than GGUF have `logits` only.
    """

    loaded: NotRequired[bool]
    engine: NotRequired[str]
    vocab_size: NotRequired[int]
    embedding_rows: NotRequired[int | None]
    logits: NotRequired[LogitsComparison]
    tokens: NotRequired[list[int]]
    text: NotRequired[str]
    embedding_size: NotRequired[int]
    embedding_norm: NotRequired[float]


def pooling_of(metadata: Mapping[str, object]) -> tuple[str | None, bool]:
    """(pooling type from the keys of a GGUF, None if absent; whether it is an encoder)."""
    architecture = metadata.get("general.architecture")
    value = metadata.get(f"{architecture}.pooling_type")
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(POOLINGS)
    pooling = POOLINGS[value] if isinstance(value, int) and known else None
    causal = metadata.get(f"{architecture}.attention.causal", True)
    return pooling, not causal or architecture in _ENCODERS


def encoder_pooling(path: PathLike) -> tuple[str | None, int]:
    """(pooling type of a GGUF's model, None for one that generates text; bytes of all its parts)."""
    with formats.open(path) as model:
        name, encodes = pooling_of(model.metadata)
        size = model.size_bytes
    # Without pooling there is one vector per token, with "rank" a score: request the mean for both.
    return (name if name in ("mean", "cls", "last") else "mean") if encodes else None, size


def verify_gguf(path: PathLike, embedding_rows: int | None, name: PathLike | None = None) -> Verification:
    """Loads `path`, which errors call `name`, and runs it: 16 tokens of text, or one embedding of an encoder.

    Raises MissingDependencyError without llama.cpp; RunError if it refuses the file, crashes, has another number of
    tokens than `embedding_rows`, or computes NaN or infinite values.
    """
    pooling, n_bytes = encoder_pooling(path)
    with Llama(path, pooling=pooling, name=name, n_bytes=n_bytes) as llama:
        if embedding_rows is not None and llama.n_vocab != embedding_rows:
            raise RunError(
                f"the vocabulary has {llama.n_vocab} tokens, the embedding {embedding_rows} rows", path=name or path
            )
        found = Verification(loaded=True, engine="", vocab_size=llama.n_vocab, embedding_rows=embedding_rows)
        if pooling is None:
            generated = llama.generate(PROMPT)
            found |= {"tokens": generated.ids, "text": generated.text}
        else:
            vector = llama.embed(PROMPT)
            norm = math.hypot(*vector)
            if not norm:
                raise RunError("the model returns an embedding of all zeros", path=name or path)
            found |= {"embedding_size": len(vector), "embedding_norm": norm}
        found["engine"] = llama.engine  # a worker that crashed was replaced meanwhile
        return found
