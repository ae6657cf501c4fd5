"""llama.cpp in a process of its own, since it aborts on bad files: one model after the other, all positions.

python llama_peer.py    reads {"gguf", "ids", "kind", "out"} a line, writes {"error"} a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_F32 = 0


class LlamaError(Exception):
    """llama.cpp does not load or compute a file; the message is one line."""


class LlamaPeer:
    """A running llama.cpp, started on the first question and again after a crash. Use in `with`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop()

    def logits(self, gguf: Path, ids: Sequence[int], kind: str = "causal") -> Any:
        """(tokens, vocabulary) float32, or (tokens, hidden) of an encoder. Raises LlamaError."""
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "logits.npy")
            answer = self._ask({"gguf": str(gguf), "ids": list(ids), "kind": kind, "out": str(out)})
            if answer["error"]:
                raise LlamaError(answer["error"])
            return np.load(out)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                # An abort would start a debugger, whose words come where the answers do.
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._log is not None
        mark = self._log.seek(0, 2)
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self._log.seek(mark)
        said = self._log.read()
        if not line:
            code = self._process.wait()
            self._stop()
            return {"error": _reason(said, f"llama.cpp died with code {code}")}
        answer: dict[str, Any] = json.loads(line)
        if answer["error"]:
            answer["error"] = _reason(said, answer["error"])
        return answer

    def _stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


def _reason(log: str, otherwise: str) -> str:
    """The line in which llama.cpp says what was wrong."""
    for line in log.splitlines():
        for word in ("error loading model", "GGML_ASSERT", "failed to load", "unknown model architecture"):
            if word in line:
                return line[line.index(word) :].strip()
    return otherwise


def _serve() -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints now and then
    for line in sys.stdin:
        question = json.loads(line)
        try:
            _compute(question)
            error = ""
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"error": error}), file=reply, flush=True)


def _compute(question: dict[str, Any]) -> None:
    import llama_cpp
    import numpy as np

    ids, encoder = question["ids"], question["kind"] == "encoder"
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(question["gguf"].encode(), options)
    if not model:
        raise ValueError("llama.cpp does not load the file")
    context = llama_cpp.llama_init_from_model(model, _context_options(llama_cpp, len(ids), encoder))
    if not context:
        llama_cpp.llama_model_free(model)
        raise ValueError("llama.cpp makes no context for the file")
    width = (
        llama_cpp.llama_model_n_embd(model)
        if encoder
        else llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    )
    get = llama_cpp.llama_get_embeddings_ith if encoder else llama_cpp.llama_get_logits_ith
    try:
        _decode(llama_cpp, context, ids, encoder)
        rows = [np.ctypeslib.as_array(get(context, i), shape=(width,)) for i in range(len(ids))]
        np.save(question["out"], np.stack(rows))
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def _context_options(llama_cpp: Any, n: int, encoder: bool) -> Any:
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = max(64, n)
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = _F32
    options.flash_attn_type = 0
    options.embeddings = encoder
    if encoder:
        options.pooling_type = 0
    return options


def _decode(llama_cpp: Any, context: Any, ids: Sequence[int], encoder: bool) -> None:
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i] = token
        batch.pos[i] = i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1
    run = llama_cpp.llama_encode if encoder else llama_cpp.llama_decode
    code = run(context, batch)
    llama_cpp.llama_batch_free(batch)
    if code:
        raise ValueError(f"llama.cpp does not compute the file (code {code})")


if __name__ == "__main__":
    _serve()
