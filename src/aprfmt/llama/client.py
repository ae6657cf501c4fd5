"""Runs a model in llama.cpp from outside: starts the worker, sets it a time limit and survives its death."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import IO, Any, NotRequired, TypedDict

from aprfmt import formats
from aprfmt.errors import MissingDependencyError, RunError, UsageError
from aprfmt.llama.engine import ENGINES, POOLINGS, LoadRequest
from aprfmt.types import Json, JsonObject, PathLike

TIMEOUT_VARIABLE = "APR_LLAMA_TIMEOUT"
"""Environment variable: seconds that one request to llama.cpp may take."""

_LEAST_SECONDS = 120.0
_BYTES_PER_SECOND = 20e6
"""What a slow disk and a slow processor get through: 16 tokens of a 70B model in an hour."""

_LOG_PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ")
_REASON = re.compile(r"(?:error loading model(?: \w+)?: )+(.+)|(GGML_ASSERT.+)")
_LAST_LINES, _LONGEST_LINE = 3, 300
_INSTALL = "pip install 'aprfmt[llama]'"
_SECONDS_TO_END = 5.0


class LlamaDiedError(RunError):
    """llama.cpp ended its process, twice, or did not answer in time."""


class WorkerDiedError(Exception):
    """A worker ended before it answered; the message says how.

    Attributes:
        log: what it wrote before.
        late: whether it was ended because it took too long.
    """

    def __init__(self, how: str, log: str, *, late: bool) -> None:
        super().__init__(how)
        self.log, self.late = log, late


class Worker:
    """A child process that answers one JSON line with one JSON line; what it writes on stderr is kept as its log."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # An abort in ggml would start a debugger for a backtrace.
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )

    def ask(self, request: object, seconds: float) -> JsonObject:
        """The answer. Raises WorkerDiedError, also when it takes more than `seconds` and was killed for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        line = ""
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(request), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith("\n"):
            answer: JsonObject = json.loads(line)
            return answer
        code = self._process.wait()
        how = f"was ended after {seconds:g} s without an answer" if late.is_set() else f"died ({_death(code)})"
        raise WorkerDiedError(how, self.log(), late=late.is_set())

    def log(self) -> str:
        """All that it wrote on stderr; if it is about to end by itself, all that it will have written."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._log.seek(0)
        text = self._log.read()
        self._log.seek(0, os.SEEK_END)
        return text

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that it did not take
                pipe.close()
        self._process.wait()
        self._log.close()


def _death(code: int) -> str:
    try:
        return str(signal.Signals(-code).name)
    except ValueError:
        return f"exit status {code}"


def reason_in(log: str) -> str:
    """What llama.cpp says is wrong; else its last lines, on one line; empty where it is silent."""
    lines = [_LOG_PREFIX.sub("", line).strip()[:_LONGEST_LINE] for line in log.splitlines()]
    for line in reversed(lines):
        if found := _REASON.search(line):
            return str(next(filter(None, found.groups())))
    return "; ".join([line for line in lines if line][-_LAST_LINES:])


def require_llama() -> None:
    """Raises MissingDependencyError where no engine is installed."""
    if not any(find_spec(package) for package in ENGINES):
        raise MissingDependencyError(
            f"this needs llama.cpp: none of {', '.join(name for name, _ in ENGINES.values())} is installed",
            hint=_INSTALL,
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens that a model continued a prompt with, and their text."""

    ids: list[int]
    text: str


class Llama:
    """A model loaded in llama.cpp. Use in `with`.

    A worker that dies is started once more, without the weights repacked for special instructions: on machines whose
    processor reports AMX and whose kernel does not grant it, llama.cpp dies in its first computation.

    Args:
        path: a GGUF, or the first of its parts.
        n_ctx: tokens of the context.
        pooling: one of engine.POOLINGS, to ask for embeddings.
        name: what errors call the file: the output that a temporary file becomes.
        n_bytes: size of all parts, for the time limit.
        engines: packages to try, in this order.

    Attributes:
        engine: the Python binding in use, with its version.
        n_vocab: tokens in the vocabulary.

    Raises:
        MissingDependencyError: no engine is installed, or none works.
        RunError: llama.cpp refuses the file.
        LlamaDiedError: it died twice, or took too long.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        n_ctx: int = 128,
        pooling: str | None = None,
        name: PathLike | None = None,
        n_bytes: int | None = None,
        engines: Sequence[str] = tuple(ENGINES),
    ) -> None:
        require_llama()
        self._name = os.fspath(name if name is not None else path)
        self._request = LoadRequest(os.path.abspath(path), n_ctx, pooling, extra_buffers=True)
        self._engines = engines
        self._seconds = _time_limit(n_bytes or os.path.getsize(path))
        self._worker: Worker | None = None
        self._ask()

    def generate(self, prompt: str, n_tokens: int = 16) -> Generated:
        """The most likely continuation of `prompt`. Raises RunError, also for NaN or infinite logits."""
        return Generated(*self._ask("generate", prompt=prompt, n_tokens=n_tokens))

    def embed(self, text: str) -> list[float]:
        """The vector of a text, of a model loaded with `pooling`. Raises RunError, also for values that are NaN."""
        vector: list[float] = self._ask("embed", text=text)
        return vector

    def _ask(self, call: str | None = None, **arguments: Json) -> Any:
        """What a call of worker.CALLS gives, or nothing but a loaded model."""
        while True:
            try:
                if self._worker is None:
                    self._load()
                return self._reply(call, arguments) if call else None
            except WorkerDiedError as death:
                self.close()
                if death.late or not self._request.extra_buffers:
                    reason = reason_in(death.log)
                    raise LlamaDiedError(
                        self._named(f"llama.cpp {death}: {reason}" if reason else f"llama.cpp {death}"),
                        path=self._name,
                        hint=f"{TIMEOUT_VARIABLE}=SECONDS allows more time" if death.late else None,
                    ) from None
                self._request = replace(self._request, extra_buffers=False)

    def _load(self) -> None:
        # -P: modules are not looked for in the folder that the user happens to be in.
        self._worker = Worker([sys.executable, "-P", "-m", "aprfmt.llama.worker"])
        try:
            answer = self._reply("load", {"engines": [*self._engines], "request": asdict(self._request)})
        except BaseException:
            self.close()
            raise
        self.n_vocab: int = answer["n_vocab"]
        self.engine = answer["engine"] + ("" if self._request.extra_buffers else ", extra buffers off")

    def _reply(self, call: str, arguments: JsonObject) -> Any:
        assert self._worker is not None
        reply = self._worker.ask([call, arguments], self._seconds)
        if "ok" in reply:
            return reply["ok"]
        if "missing" in reply:
            raise MissingDependencyError(f"llama.cpp cannot be used: {reply['missing']}", hint=_INSTALL)
        message = str(reply["error"])
        if call == "load":
            message = f"llama.cpp does not load the file: {reason_in(self._worker.log()) or message}"
        raise RunError(
            self._named(message),
            path=self._name,
            hint="apr validate FILE may show what is wrong with it; without --verify the file is written",
        )

    def _named(self, message: str) -> str:
        return message.replace(self._request.path, self._name)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _time_limit(n_bytes: int) -> float:
    """Seconds for a request to a model of this size. Raises UsageError for a variable that is not a number."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return _LEAST_SECONDS + n_bytes / _BYTES_PER_SECOND
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise UsageError(f"{TIMEOUT_VARIABLE} is {text!r}", hint="give a number of seconds")
    return seconds


# --- verifying a GGUF: it loads, has the vocabulary that the embedding asks for, and computes numbers ---

PROMPT = "The capital of France is"

_ENCODERS = ("gemma-embedding",)
"""Architectures whose attention llama.cpp knows to look both ways without a key that says so."""


class Verification(TypedDict):
    """What llama.cpp made of a file; decoders have `tokens` and `text`, encoders the vector of the prompt."""

    loaded: bool
    engine: str
    vocab_size: int
    embedding_rows: int | None
    tokens: NotRequired[list[int]]
    text: NotRequired[str]
    embedding_size: NotRequired[int]
    embedding_norm: NotRequired[float]


def encoder_pooling(path: PathLike) -> tuple[str | None, int]:
    """(how the model of a GGUF pools its embeddings, None for one that generates text; bytes of all its parts)."""
    with formats.open(path) as model:
        architecture = model.metadata.get("general.architecture")
        causal = model.metadata.get(f"{architecture}.attention.causal", True)
        pooling = model.metadata.get(f"{architecture}.pooling_type", 0)
        size = model.size_bytes
    if causal and architecture not in _ENCODERS:
        return None, size
    name = POOLINGS[pooling] if isinstance(pooling, int) and 0 <= pooling < len(POOLINGS) else "none"
    # Without pooling there is a vector for each token, with "rank" a score: both are asked for their mean.
    return (name if name in ("mean", "cls", "last") else "mean"), size


def verify_gguf(path: PathLike, embedding_rows: int | None, name: PathLike | None = None) -> Verification:
    """Loads `path`, which errors call `name`, and runs it: 16 tokens of text, or of an encoder one embedding.

    Raises MissingDependencyError without llama.cpp; RunError where it refuses the file, dies, has another number of
    tokens than `embedding_rows`, or computes what is not a number.
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
                raise RunError("the model computes an embedding of zeros", path=name or path)
            found |= {"embedding_size": len(vector), "embedding_norm": norm}
        found["engine"] = llama.engine  # a worker that died was replaced meanwhile
        return found
