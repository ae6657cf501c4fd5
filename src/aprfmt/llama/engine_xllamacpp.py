"""xllamacpp: llama.cpp's own server in this process, asked over a local connection that only we have the key of."""

from __future__ import annotations

import http.client
import json
import os
import secrets
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import xllamacpp

from aprfmt.llama.engine import POOLINGS, EngineError, LoadRequest, require_finite
from aprfmt.types import JsonObject

_HTTP_OK = 200


class LoadedModel:
    """A model behind llama.cpp's server."""

    def __init__(self, request: LoadRequest) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = request.path
        params.n_ctx = params.n_batch = params.n_ubatch = request.n_ctx
        params.n_parallel, params.n_gpu_layers = 1, 0
        params.warmup = params.fit_params = params.ui = params.endpoint_slots = False
        # Threads beyond the free processors wait for each other in busy loops: a second of work takes twenty.
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 1) // 2)
        params.no_extra_bufts = not request.extra_buffers
        if request.pooling is not None:
            params.embedding = True
            params.pooling_type = xllamacpp.llama_pooling_type(POOLINGS.index(request.pooling))
        # The server listens on a free port of this machine, where other users must not use the model.
        self._key = secrets.token_hex(16)
        params.api_keys = [self._key]
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        self._address = urlsplit(self._server.listening_address)
        self.n_vocab: int = self._ask("GET", "/v1/models")["data"][0]["meta"]["n_vocab"]

    def _ask(self, method: str, path: str, body: JsonObject | None = None) -> Any:
        # Not urllib, which would go through the proxies that the environment names.
        connection = http.client.HTTPConnection(self._address.hostname or "127.0.0.1", self._address.port)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        with closing(connection):
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != _HTTP_OK:
            raise EngineError(answer["error"]["message"])
        return answer

    def generate(self, prompt: str, n_tokens: int) -> tuple[list[int], str]:
        """See Model.generate."""
        text: JsonObject = {"content": prompt, "add_special": True, "parse_special": True}
        ids = self._ask("POST", "/tokenize", text)["tokens"]
        task: JsonObject = {
            "prompt": ids or [0],  # a vocabulary that cannot spell the prompt: any token will do
            "n_predict": n_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
            "n_probs": 1,
        }
        answer = self._ask("POST", "/completion", task)
        # The server has no logits. Its log-probabilities come from a softmax over all of them, so one NaN or +inf
        # makes each NaN, which JSON has as null. A single -inf it does not show.
        require_finite((step["logprob"] for step in answer["completion_probabilities"]), "logits")
        return answer["tokens"], answer["content"]

    def embed(self, text: str) -> list[float]:
        """See Model.embed."""
        answer = self._ask("POST", "/embeddings", {"content": text, "embd_normalize": -1})  # as computed
        vector: list[float] = answer[0]["embedding"][0]
        require_finite(vector, "embeddings")
        return vector
