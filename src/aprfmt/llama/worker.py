"""The process that llama.cpp runs in: `python -m aprfmt.llama.worker` answers one JSON line for each of stdin's.

A request is [name, arguments]: "load" first, then CALLS. An answer is {"ok": value}, {"error": message}, or
{"missing": message} where no engine can be imported. What llama.cpp prints goes to stderr, the client's log.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
from importlib.metadata import version
from queue import SimpleQueue

from aprfmt.llama.engine import ENGINES, EngineError, LoadRequest, Model
from aprfmt.types import JsonObject

CALLS = ("generate", "embed")
"""Methods of a Model that can be asked for, with their arguments by name."""


def _load(engines: list[str], request: dict[str, object]) -> tuple[Model, JsonObject]:
    """The model, loaded by the first engine that can be imported. Raises EngineError, ImportError."""
    reasons = []
    for package in engines:
        name, module = ENGINES[package]
        try:
            engine = importlib.import_module(module)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
        else:
            model: Model = engine.LoadedModel(LoadRequest(**request))  # type: ignore[arg-type]  # JSON of our own client
            return model, {"engine": f"{name} {version(name)}", "n_vocab": model.n_vocab}
    raise ImportError("; ".join(reasons))


def main() -> None:
    """Answers until a model is refused or stdin ends, as it also does when the client dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the client ends this one
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout now and then
    requests: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        # Not sys.stdin: Python aborts where a thread still reads it at the end.
        with open(os.dup(0)) as stdin:
            for line in stdin:
                requests.put(line)
        os._exit(0)  # llama.cpp may be deep in a computation that nobody waits for

    threading.Thread(target=read, daemon=True).start()
    model: Model | None = None
    while True:
        call, arguments = json.loads(requests.get())
        try:
            if model is None:
                model, answer = _load(**arguments)
            else:
                answer = getattr(model, CALLS[CALLS.index(call)])(**arguments)
            reply: JsonObject = {"ok": answer}
        except EngineError as error:
            reply = {"error": str(error)}
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
        if model is None:
            return  # a thread of llama.cpp writes its log; a proper end makes it write all


if __name__ == "__main__":
    main()
