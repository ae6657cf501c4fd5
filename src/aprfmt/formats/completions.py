"""A teacher behind an HTTP server, which returns log-probabilities of prompt tokens.

`FORMS` lists the supported servers by `owned_by` of /v1/models; unknown ones are treated as vLLM:

    vllm       /v1/completions, `prompt_logprobs`
    sglang     /generate, `input_top_logprobs`
    llamacpp   /completion, `n_probs` of one token: a request per position, whose label is forced by a logit bias

Failed requests are repeated; each response has a time limit. APR_TEACHER_API_KEY is sent as a bearer token.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from aprfmt.errors import AprError, CorruptError, NotFoundError, RefusedError, RunError
from aprfmt.formats.teacher_files import Answer, TeacherHeader, answer_of
from aprfmt.formats.vllm import parse_position
from aprfmt.io.jsonx import check_size
from aprfmt.limits import MAX_LIST_BYTES
from aprfmt.text import first_few, one_line
from aprfmt.texts.sequences import DocumentSpan, Windows, pieces_of

API_KEY = "APR_TEACHER_API_KEY"
REQUEST_S = 300.0
"""Time limit of a request including its response."""

_PAUSES_S = (0.5, 2.0, 8.0)  # seconds before each retry
_REQUESTS_AT_ONCE = 8
_READ_BYTES = 4096  # of an error's body
_FORCED = 1e4  # logit bias
_SERVERS = "apr supports vLLM, SGLang and llama-server; pass the URL without a path"
_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.\n",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2, 3]}\n",
    "\u00c9t\u00e9 \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600 \u20ac1,234.56  \t",
)
"""Texts that the student's tokenizer must encode to the same ids."""


class _RepeatableError(Exception):
    """A request that may succeed if it is repeated."""


class CompletionServer:
    """A reachable server.

    Attributes:
        url: without a path.
        model: the model's name on the server.
        kind: a key of FORMS.
        max_tokens: maximum length of a prompt plus one token; None if unknown.
        notes: what could not be checked.
    """

    def __init__(self, url: str) -> None:
        """Requests the list of models. Raises NotFoundError, RefusedError, RunError, CorruptError."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.notes: list[str] = []
        found = self.ask("/v1/models")
        try:
            models = found["data"]
            names = [str(model["id"]) for model in models if not model.get("parent")]
            self.model, owner = names[0], str(models[0].get("owned_by"))
            limit = models[0].get("max_model_len") or (models[0].get("meta") or {}).get("n_ctx_train")
        except (KeyError, TypeError, IndexError, AttributeError):
            raise CorruptError(
                "the server's list of models is empty or malformed", path=f"{self.url}/v1/models", hint=_SERVERS
            ) from None
        if len(names) > 1:
            raise RefusedError(
                f"the server has several models: {', '.join(names)[:200]}", path=self.url,
                hint="start a server that serves only the teacher",
            )  # fmt: skip
        self.kind = owner if owner in FORMS else "vllm"
        self.max_tokens = limit if isinstance(limit, int) and limit > 2 else None

    @property
    def digest(self) -> str:
        """Hash of the server's kind and the model's name."""
        return hashlib.sha256(f"{self.kind} {self.model}".encode()).hexdigest()

    def check_tokenizer(self, encode: Callable[[str], list[int]]) -> None:
        """Compares the server's ids of some texts with those of `encode`. Raises RefusedError."""
        for text in _PROBES:
            body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False}
            try:
                found = self.ask("/tokenize", body)
            except (NotFoundError, RefusedError):
                self.notes.append("the server cannot tokenize, so its tokenizer was not compared")
                return
            theirs = found.get("tokens") if isinstance(found, dict) else None
            if theirs != (ours := encode(text)):
                raise RefusedError(
                    f"the server's tokenizer differs: {text[:20]!r} is {_shown(theirs)}, not "
                    f"{_shown(ours)}",
                    path=self.url, hint="--student must have the tokenizer of the server's model",
                )  # fmt: skip

    def answers(self, windows: Windows, some: Sequence[int], facts: TeacherHeader) -> Iterator[Answer]:
        """Yields the server's answers for these sequences, in order; sends several requests in parallel.

        Raises NotFoundError, RefusedError, RunError, CorruptError.
        """

        def answer(number: int) -> Answer:
            columns = []
            for piece in pieces_of(windows.rows([number]), 0):
                logprobs = FORMS[self.kind](self, piece, facts.k)
                for place, label, entry in zip(piece.places_P, piece.labels_P.tolist(), logprobs, strict=True):
                    known = parse_position(entry, label, facts.k, number, self.url)
                    columns.append(tuple(np.array([value]) for value in (place, *known)))
            return answer_of(columns, facts)

        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            running: deque[Future[Answer]] = deque()
            try:
                for number in some:
                    running.append(pool.submit(answer, number))
                    if len(running) > _REQUESTS_AT_ONCE:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """The JSON value of a response. Raises NotFoundError (404), RefusedError (400 to 499), RunError."""
        for pause in (*_PAUSES_S, None):
            try:
                return self._ask_once(path, body)
            except _RepeatableError as error:
                if pause is None:
                    raise RunError(
                        f"the server gave no answer to {path} in {len(_PAUSES_S) + 1} attempts: {error}", path=self.url,
                        hint="run the same command again: completed sequences are kept" if body is not None else
                        f"check the URL, and that the server runs; {_SERVERS}",
                    ) from error  # fmt: skip
                time.sleep(pause)
        raise AssertionError

    def _ask_once(self, path: str, body: Mapping[str, object] | None) -> object:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        until = time.monotonic() + REQUEST_S
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
                found = _read(response, until)
            check_size(found)
            return json.loads(found)
        except urllib.error.HTTPError as error:
            raise self._refusal(error, path) from error
        except (OSError, http.client.HTTPException) as error:
            raise _RepeatableError(str(getattr(error, "reason", error)) or type(error).__name__) from error
        except AprError as error:
            raise _RepeatableError(error.message) from error
        except (ValueError, RecursionError) as error:
            raise _RepeatableError(f"its answer is not JSON: {error}") from error

    def _refusal(self, error: urllib.error.HTTPError, path: str) -> Exception:
        try:
            with error:
                reason = one_line(error.read(_READ_BYTES).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException):
            reason = ""
        words = f"the server answered {error.code} to {path}" + (f": {reason}" if reason else "")
        if error.code == 404:
            return NotFoundError(words, path=self.url, hint=_SERVERS)
        if error.code in (401, 403):
            return RefusedError(words, path=self.url, hint=f"set {API_KEY} to the server's key")
        if error.code in (408, 429) or error.code >= 500:
            return _RepeatableError(words)
        hint = "vLLM gives at most 20 log-probabilities unless it was started with --max-logprobs K; or lower --top-k"
        return RefusedError(words, path=self.url, hint=hint)


def _read(response: http.client.HTTPResponse, until: float) -> bytes:
    """Reads the whole body. Raises TimeoutError, OSError, HTTPException."""
    found = bytearray()
    while data := response.read1(1 << 16):
        found += data
        if time.monotonic() > until:
            raise TimeoutError(f"the answer was not complete after {REQUEST_S:g} s")
        if len(found) > MAX_LIST_BYTES:
            raise OSError(f"the answer has more than {MAX_LIST_BYTES:,} bytes")
    if response.length:
        raise http.client.IncompleteRead(bytes(found), response.length)
    return bytes(found)


# --- forms of answers ---


def _other_tokens(server: CompletionServer, found: object, sent: Sequence[int]) -> RefusedError:
    return RefusedError(
        f"the server read different tokens than were sent: {_shown(found)}, not {_shown([*sent])}",
        path=server.url,
        hint="the server must accept prompts of token ids unchanged; --student must have its tokenizer",
    )  # fmt: skip


def _shown(ids: object) -> str:
    return f"[{first_few(ids, 12)}]" if isinstance(ids, list) else repr(ids)[:60]


def _malformed(server: CompletionServer, what: str) -> CorruptError:
    return CorruptError(f"the server's answer has no valid {what}", path=server.url)


def _ask_vllm(server: CompletionServer, piece: DocumentSpan, k: int) -> list[object]:
    body = {"model": server.model, "prompt": piece.prompt, "prompt_logprobs": k, "max_tokens": 1, "temperature": 0}
    found = server.ask("/v1/completions", body | {"return_token_ids": True})
    try:
        choice = found["choices"][0]
        logprobs, ids = choice["prompt_logprobs"], choice.get("prompt_token_ids")
    except (KeyError, TypeError, IndexError, AttributeError):
        raise _malformed(server, "prompt_logprobs") from None
    if ids is not None and ids != piece.prompt:
        raise _other_tokens(server, ids, piece.prompt)
    if not isinstance(logprobs, list) or len(logprobs) != len(piece.prompt):
        raise _malformed(server, "prompt_logprobs")
    return [logprobs[place - piece.start + 1] for place in piece.places_P]


def _ask_sglang(server: CompletionServer, piece: DocumentSpan, k: int) -> list[object]:
    body = {"input_ids": piece.prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k}
    found = server.ask("/generate", body | {"sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    try:
        own, top = (found["meta_info"][f"input_{name}logprobs"] for name in ("token_", "top_"))
        ids = [entry[1] for entry in own]
        if ids != piece.prompt:
            raise _other_tokens(server, ids, piece.prompt)
        places = [place - piece.start + 1 for place in piece.places_P]
        return [{entry[1]: {"logprob": entry[0]} for entry in (*top[i], own[i])} for i in places]
    except (KeyError, TypeError, IndexError):
        raise _malformed(server, "input_top_logprobs") from None


def _ask_llama_server(server: CompletionServer, piece: DocumentSpan, k: int) -> list[object]:
    found: list[object] = []
    for place, label in zip(piece.places_P, piece.labels_P.tolist(), strict=True):
        # With the bias the label is the most likely token; the returned log-probabilities exclude the bias.
        body = {"prompt": piece.ids[: place - piece.start + 1], "n_predict": 1, "n_probs": k, "temperature": 0}
        answer = server.ask("/completion", body | {"logit_bias": [[label, _FORCED]], "cache_prompt": True})
        try:
            logprobs = answer["completion_probabilities"][0]
            entries = {entry["id"]: {"logprob": entry["logprob"]} for entry in (*logprobs["top_logprobs"], logprobs)}
        except (KeyError, TypeError, IndexError):
            raise _malformed(server, "completion_probabilities") from None
        if logprobs["id"] != label:
            raise _other_tokens(server, logprobs["id"], [label])
        found.append(entries)
    return found


FORMS: dict[str, Callable[[CompletionServer, DocumentSpan, int], list[object]]] = {
    "vllm": _ask_vllm,
    "sglang": _ask_sglang,
    "llamacpp": _ask_llama_server,
}
"""Requests the log-probabilities of a piece's labelled positions: the k most likely ids of each, and its label."""
