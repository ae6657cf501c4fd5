"""`python hostile.py SECONDS`: handles what stdin names, a JSON line each, and prints what it came to.

A request is ["template", source] or ["pickle", path], for which the child has SECONDS. Its row has error (the class;
None: it was handled), message, hint, and seconds (of the processor, with those of children that ended). The answer to
["end"] is the largest resident sizes in bytes: of this process and of any of its children.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import aprfmt
from aprfmt.errors import AprError
from aprfmt.formats import pickles
from aprfmt.io.child import Service
from aprfmt.limits import CHAT_MEMORY_BYTES, PICKLE_MEMORY_BYTES
from aprfmt.tokenizer import chat

_UNIT = 1 if sys.platform == "darwin" else 1024
_BOTH = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _peak() -> int:
    """The largest memory of this process, in bytes; ru_maxrss would count what its parent had before the fork."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def _handle(kind: str, what: str) -> None:
    if kind == "template":
        chat.ChatTemplate(what, path="m.gguf").render([{"role": "user", "content": "Hi"}])
    else:
        aprfmt.open(what).close()


def _seconds() -> float:
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, _BOTH))


def main() -> None:
    """Prints the rows."""
    seconds = float(sys.argv[1])
    chat._service = Service(
        "aprfmt.tokenizer.rendering", seconds=seconds, memory=CHAT_MEMORY_BYTES, most_bytes=chat._MOST_BYTES
    )
    pickles._service = Service(
        "aprfmt.formats.pickle_index", seconds=seconds, memory=PICKLE_MEMORY_BYTES, most_bytes=pickles._MOST_BYTES
    )
    for line in sys.stdin:
        request, row = json.loads(line), dict[str, Any](error=None, message="")
        if request == ["end"]:
            children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _UNIT
            print(json.dumps([_peak(), children]), flush=True)
            return
        before = _seconds()
        try:
            _handle(*request)
        except AprError as error:
            row |= {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        print(json.dumps(row | {"seconds": _seconds() - before}), flush=True)


if __name__ == "__main__":
    main()
