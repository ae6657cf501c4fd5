"""The process that llama.cpp runs in: `python -m aprfmt.llama.worker` answers one JSON line for each of stdin's.

A request is [name, arguments]: "load" first, then CALLS. An answer is {"ok": value}, {"error": message, "room":
whether a longer context would do}, or {"missing": message} where no engine can be used; before it come the parts of a
call that has some, {"part": value}. The line "stop" ends a generation after the next token. What llama.cpp prints goes
to stderr, the client's log.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Generator
from importlib.metadata import version
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING

from aprfmt.llama.engine import ENGINES, EngineError, LayoutError, LoadRequest, RoomError
from aprfmt.types import Json, JsonObject

if TYPE_CHECKING:
    from aprfmt.llama.session import Session

CALLS = (
    *("facts", "system", "tokenize", "detokenize", "generate", "embed", "vectors", "logits", "last_logits"),
    *(
        "measure", "collect", "save_collected", "load_collected", "moments", "compute", "outputs", "pair", "chat",
        "effects", "states", "reorder",
        "replace",
    ),
)  # fmt: skip
"""Methods of a Session that can be asked for, with their arguments by name."""

STOP = "stop"


def _load(engines: list[str], request: dict[str, object], stopped: threading.Event) -> tuple[Session, Json]:
    """The model, loaded by the first engine that can be used. Raises EngineError, ImportError."""
    from aprfmt.llama.capi import LlamaLibrary
    from aprfmt.llama.session import Session

    reasons = []
    for package in engines:
        name = ENGINES[package]
        try:
            library = LlamaLibrary(package)
        except (ImportError, OSError, LayoutError) as error:
            reasons.append(f"{name}: {error}")
        else:
            session = Session(library, LoadRequest(**request), stopped.is_set)  # type: ignore[arg-type]  # JSON of our client
            return session, {"engine": f"{name} {version(name)}", **session.facts()}
    raise ImportError("; ".join(reasons))


def _result(answer: Json | Generator[Json, None, Json], replies: IO[str]) -> Json:
    """The result of a call; what a generator gives before it is sent as it comes."""
    while isinstance(answer, Generator):
        try:
            print(json.dumps({"part": next(answer)}), file=replies, flush=True)
        except StopIteration as end:
            answer = end.value
    return answer


def main() -> None:
    """Answers until a model is refused or stdin ends, as it also does when the client dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the client ends this one
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout now and then
    requests: SimpleQueue[str] = SimpleQueue()
    stopped = threading.Event()

    def read() -> None:
        # Not sys.stdin: Python aborts where a thread still reads it at the end.
        with open(os.dup(0)) as stdin:
            for line in stdin:
                if line.strip() == STOP:
                    stopped.set()
                else:
                    requests.put(line)
        os._exit(0)  # llama.cpp may be deep in a computation that nobody waits for

    threading.Thread(target=read, daemon=True).start()
    model: Session | None = None
    while True:
        answer: Json
        call, arguments = json.loads(requests.get())
        stopped.clear()
        try:
            if model is None:
                model, answer = _load(**arguments, stopped=stopped)
            else:
                answer = _result(getattr(model, CALLS[CALLS.index(call)])(**arguments), replies)
            reply: JsonObject = {"ok": answer}
        except EngineError as error:
            reply = {"error": str(error), "room": isinstance(error, RoomError)}
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
        if model is None:
            return  # a thread of llama.cpp writes its log; a proper end makes it write all


if __name__ == "__main__":
    main()
