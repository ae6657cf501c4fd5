"""`apr report RUN --live`: the page of a run, served to this machine and drawn anew while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from aprfmt.errors import RefusedError, StorageError
from aprfmt.html.page import LIVE_POLICY, page
from aprfmt.inspection.run_page import RunReport
from aprfmt.inspection.run_report import FILE, METADATA, summarise
from aprfmt.inspection.runs_page import runs_parts
from aprfmt.io.system import is_locked

_HOST = "127.0.0.1"
_REST = 4  # times as long as a drawing takes nothing is drawn
_LOOK_S = 0.5
_LAST_S = 10.0
"""How long the final page is offered after the run has ended, if no browser asks for it sooner."""


class LivePage:
    """The page of runs as it is now; several threads may ask.

    Attributes:
        bodies: the reports that the page shows.
        is_running: whether one of the runs goes on.
        final_seen: set once a browser has got the page of runs that have all ended.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._marks: list[object] = []
        self._wait_until = 0.0
        self._title, self._parts = "", ""
        self.bodies: list[RunReport] = []
        self.is_running = True
        self.final_seen = threading.Event()
        self.update(always=True)

    def update(self, *, always: bool = False) -> None:
        """Draws the page again if a run has written or ended, unless that takes most of the time; `always`: at once."""
        with self._lock:
            locked = [is_locked(folder) for folder in self._folders]
            marks = [locked, [_mark(folder / name) for folder in self._folders for name in (FILE, METADATA)]]
            ended = self.is_running and not any(lock is not False for lock in locked)
            if marks != self._marks and (always or ended or time.monotonic() >= self._wait_until):
                began = time.monotonic()
                self.bodies = [summarise(folder) for folder in self._folders]
                title, parts = runs_parts(self.bodies)
                self._title, self._parts = title, "\n".join(part for part in parts if part)
                self._marks, now = marks, time.monotonic()
                self._wait_until = now + _REST * (now - began)
                self.is_running = any(body["status"] == "running" for body in self.bodies)

    def answer(self, path: str, tag: str) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers for a request; `tag` is the ETag that the browser has."""
        self.update()
        with self._lock:
            own = f'"{sha256(self._parts.encode()).hexdigest()[:32]}"'
            headers = {"ETag": own, "X-Run-State": "running" if self.is_running else "ended"}
            if path == "/":
                return 200, page(self._title, [self._parts], live=True), headers
            if path != "/parts":
                return 404, "", {}
            if not self.is_running:
                self.final_seen.set()
            return (304, "", headers) if tag == own else (200, self._parts, headers)


def _mark(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


class _LiveServer(ThreadingHTTPServer):
    daemon_threads = True
    content: LivePage


class _LiveHandler(BaseHTTPRequestHandler):
    """Answers GET requests that name this machine as the host: a page elsewhere cannot have its name point here."""

    server: _LiveServer
    timeout = 30

    def do_GET(self) -> None:
        """The page, or its parts."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            self._send(403, "", {})
            return
        self._send(*self.server.content.answer(self.path, self.headers.get("If-None-Match", "")))

    def _send(self, status: int, text: str, headers: dict[str, str]) -> None:
        data = text.encode()
        self.send_response(status)
        more = {
            "Content-Security-Policy": LIVE_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        for name, value in {**more, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing of requests."""


def serve_report(
    folders: Sequence[Path], *, port: int = 0, log: Callable[[str], None] = lambda line: None
) -> list[RunReport]:
    """Serves the page of the runs in `folders` on 127.0.0.1 until they end, or Ctrl-C; returns their reports.

    `port` 0 takes a free one; `log` is called with a line that names the address.

    Raises RefusedError if no run goes on, StorageError if the port is taken, and what `summarise` raises.
    """
    content = LivePage(folders)
    if not content.is_running:
        raise RefusedError(
            "the run is not active, so its page would not change", path=folders[0],
            hint=f"apr report {' '.join(map(str, folders))} -o page.html",
        )  # fmt: skip
    try:
        server = _LiveServer((_HOST, port), _LiveHandler)
    except OSError as error:
        raise StorageError(f"cannot listen on port {port}: {error.strerror}", hint="choose another --port") from error
    server.content = content
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        log(f"http://{_HOST}:{server.server_address[1]}/ shows the run until it ends; Ctrl-C stops")
        while content.is_running:
            time.sleep(_LOOK_S)
            content.update()
        content.final_seen.wait(_LAST_S)
    except KeyboardInterrupt:
        log("stopped")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    content.update(always=True)
    return content.bodies
