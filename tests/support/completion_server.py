"""A server of a model on this machine: vLLM's, SGLang's or llama-server's answers about prompts, with faults."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from local_server import LocalServer

from aprfmt.texts.encoding import Encoder
from aprtrain.network.weights import load_decoder, open_network


@dataclass
class Fault:
    """What is wrong with an answer.

    Attributes:
        status: other than 200.
        cut: bytes of the body that are sent.
        pause: seconds between two bytes.
        change: of the JSON value.
        page: sent instead of JSON.
        times: how many answers; -1: all.
    """

    status: int = 200
    cut: int | None = None
    pause: float = 0.0
    change: Callable[[Any], Any] = lambda body: body
    times: int = -1
    page: str = ""


@dataclass
class ModelServer:
    """What it serves, and what it was asked.

    Attributes:
        kind: vllm, sglang or llamacpp.
        fault: of the answers about prompts; None for none.
        asked: paths of all requests.
        headers: of the last one.
    """

    kind: str
    model: Path
    fault: Fault | None = None
    asked: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        with open_network(self.model) as network:
            self._decoder = load_decoder(network, torch.float32, "cpu")
            self._encoder = Encoder(network.tokenizer)
        self.models = [{"id": "org/big", "owned_by": self.kind, "max_model_len": 512}]
        self._lock = threading.Lock()

    def told(self, ids: list[int], k: int, own: int | None = None) -> list[list[tuple[float, int]]]:
        """For each position the k most likely next ids, then the next one of the prompt, or `own`."""
        with self._lock, torch.no_grad():
            hidden = self._decoder(torch.tensor([ids if own is not None else ids[:-1]]))
            logq = self._decoder.logits(hidden)[0].double().log_softmax(-1)
        values, best = logq.topk(k)
        following = [*ids[1:], *([] if own is None else [own])]
        return [
            [*zip(values[i].tolist(), best[i].tolist(), strict=True), (float(logq[i, label]), label)]
            for i, label in enumerate(following)
        ]

    def answer(self, path: str, body: Any) -> Any:
        """The JSON value for a request; None where there is nothing."""
        if path == "/v1/models":
            return {"object": "list", "data": self.models}
        if path == "/tokenize":
            return {"tokens": self._encoder.plain(body["content" if self.kind == "llamacpp" else "prompt"])}
        if path == "/v1/completions" and self.kind == "vllm":
            rows = self.told(body["prompt"], body["prompt_logprobs"])
            logprobs = [None, *({str(i): {"logprob": value} for value, i in reversed(row)} for row in rows)]
            choice = {"prompt_token_ids": body["prompt"], "prompt_logprobs": logprobs, "text": "?"}
            return {"model": "org/big", "choices": [choice]}
        if path == "/generate" and self.kind == "sglang":
            rows, ids = self.told(body["input_ids"], body["top_logprobs_num"]), body["input_ids"]
            own: list[list[Any]] = [[None, ids[0], None], *([row[-1][0], row[-1][1], None] for row in rows)]
            top: list[Any] = [None, *([[value, i, None] for value, i in row[:-1]] for row in rows)]
            return {"text": "?", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": top}}
        if path == "/completion" and self.kind == "llamacpp":
            forced = body["logit_bias"][0][0]
            row = self.told(body["prompt"], body["n_probs"], forced)[-1]
            top = [{"id": i, "logprob": value} for value, i in row[:-1]]
            return {"completion_probabilities": [{"id": forced, "logprob": row[-1][0], "top_logprobs": top}]}
        return None


@contextmanager
def serve_model(kind: str, model: Path) -> Iterator[ModelServer]:
    """A server for a block."""
    this = ModelServer(kind, model)

    class Handler(http.server.BaseHTTPRequestHandler):
        def _do(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            this.asked.append(self.path)
            this.headers = {name.lower(): value for name, value in self.headers.items()}
            found = this.answer(self.path, json.loads(data) if data else None)
            fault = Fault(404) if found is None else None
            if found is not None and self.path not in ("/v1/models", "/tokenize") and this.fault is not None:
                fault = this.fault if this.fault.times else None
                this.fault.times -= fault is not None
            fault = fault or Fault()
            body = (fault.page or json.dumps(fault.change(found))).encode()
            self.send_response(fault.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not fault.pause:
                self.wfile.write(body[: fault.cut])
                return
            for i in range(len(body)):
                self.wfile.write(body[i : i + 1])
                self.wfile.flush()
                time.sleep(fault.pause)

        do_GET = do_POST = _do

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with closing(LocalServer(Handler)) as server:
        this.url = f"http://{server.host}"
        yield this
