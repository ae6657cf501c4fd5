"""A hub on this machine: repositories of files by name, answered as the real one does, with faults on request."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from local_server import LocalServer

from aprfmt.formats import hub_files
from aprfmt.io import hub_cache, remote_file, source

if TYPE_CHECKING:
    import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 1 << 16
"""From this size on a file is one of LFS."""


@dataclass
class Request:
    """What was asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def span(self) -> tuple[int, int] | None:
        """The range [start, end) that was asked for."""
        text = self.headers.get("range")
        if text is None:
            return None
        first, _, last = text.removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1


Fault = Callable[[Request], "Answer | None"]


@dataclass
class Answer:
    """What a fault says in place of the file.

    Attributes:
        status: 0 cuts the connection.
        cut: bytes of the body after which the connection is cut, None for none.
        pause: seconds before the answer.
        headers: over the usual ones.
        whole: send the whole file with 200.
        data: bytes of a file of the same length, to send in place of its own.
        write: writes the whole answer to the connection.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    pause: float = 0.0
    whole: bool = False
    data: bytes | None = None
    write: Callable[[Any], None] | None = None


class Hub:
    """The server; `files` is the main branch of `repo` ("models" or "datasets"), `fault` looks at each request first.

    Attributes:
        sent: bytes of bodies of files that were sent.
        rate: bytes a second that all answers take together, None: as fast as can be.
        requests: what was asked so far.
        elsewhere: files of LFS are sent by another host, to which the hub leads.
        lfs: what was uploaded, by its digest.
        commits, created: what was asked of the hub to write.
        extra_rows: further rows of the list of files.
        sha: what it says that the commit is.
    """

    def __init__(self, repo: str = "org/name", kind: str = "models") -> None:
        self.repo, self.kind = repo, kind
        self.files: dict[str, bytes | Any] = {}
        self.fault: Fault = lambda request: None
        self.requests: list[Request] = []
        self.sent = 0
        self.rate: float | None = None
        self.exists = True
        self.elsewhere = False
        self.extra_rows: list[Any] = []
        self.sha: object = COMMIT
        self.lfs: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self._digests: dict[str, str] = {}
        self._lock = threading.Lock()
        this = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                this.answer(self, Request(self.command, self.path, headers, body))

            do_GET = do_HEAD = do_POST = do_PUT = _do

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = LocalServer(Handler)
        self.address = f"http://{self.server.host}"

    def close(self) -> None:
        """Ends it."""
        self.server.close()

    def digest(self, name: str) -> str:
        """What the list of files says of one; it stays when the bytes are changed later."""
        if name not in self._digests:
            data = self.files[name]
            if len(data) >= LARGE_BYTES:
                found = hashlib.sha256()
                for start in range(0, len(data), 1 << 20):
                    found.update(data[start : start + (1 << 20)])
            else:
                found = hashlib.sha1(b"blob %d\0" % len(data) + bytes(data))
            self._digests[name] = found.hexdigest()
        return self._digests[name]

    def set_digest(self, name: str, digest: str) -> None:
        """Lists another digest for a file."""
        self._digests[name] = digest

    def of_files(self) -> list[Request]:
        """The requests for files."""
        return [request for request in self.requests if "/resolve/" in request.path]

    # --- answers ---

    def answer(self, handler: Any, request: Request) -> None:
        """Answers one request."""
        with self._lock:
            self.requests.append(request)
        fault = self.fault(request)
        if fault is not None:
            time.sleep(fault.pause)
            if fault.write is not None:
                handler.close_connection = True
                fault.write(handler.wfile)
                return
            if fault.status == 0:
                handler.close_connection = True
                handler.connection.close()
                return
            if fault.status >= 400:
                send(handler, fault.status, fault.headers, b"")
                return
        path = unquote(urlsplit(request.path).path)
        prefix = f"/api/{self.kind}/{self.repo}"
        if self.kind != "models":
            path = path.removeprefix(f"/{self.kind}")
        if path.startswith("/cdn/"):
            self._file(handler, request, path.removeprefix("/cdn/"), fault)
        elif path.startswith(f"/{self.repo}/resolve/") and self.exists:
            self._file(handler, request, path.split("/", 5)[5], fault)
        elif request.method == "GET" and path in (prefix, *(f"{prefix}/revision/{rev}" for rev in ("main", COMMIT))):
            self._info(handler)
        elif request.method == "GET" and path.startswith(f"{prefix}/tree/"):
            self._tree(handler)
        elif request.method == "POST":
            self._post(handler, request, path, prefix)
        elif request.method == "PUT" and path.startswith("/upload/"):
            self.lfs[path.removeprefix("/upload/")] = request.body
            send(handler, 200, {}, b"")
        else:
            code = "RevisionNotFound" if path.startswith(f"{prefix}/revision/") else "RepoNotFound"
            send(handler, 404, {"X-Error-Code": code}, b"")

    def _info(self, handler: Any) -> None:
        if not self.exists:
            send(handler, 404, {"X-Error-Code": "RepoNotFound"}, b"")
            return
        siblings: list[dict[str, Any]] = []
        for name, data in self.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": self.digest(name)}
            if len(data) >= LARGE_BYTES:
                row |= {"blobId": "0" * 40}
                row |= {"lfs": {"sha256": self.digest(name), "size": len(data), "pointerSize": 130}}
            siblings.append(row)
        body = {
            "id": self.repo,
            "modelId": self.repo,
            "sha": self.sha,
            "siblings": siblings + self.extra_rows,
            "tags": [],
            "private": False,
        }
        send(handler, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _tree(self, handler: Any) -> None:
        rows: list[dict[str, Any]] = []
        for name, data in self.files.items():
            row: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": self.digest(name)}
            if len(data) >= LARGE_BYTES:
                row |= {"oid": "0" * 40}
                row |= {"lfs": {"oid": self.digest(name), "size": len(data), "pointerSize": 130}}
            rows.append(row)
        _json(handler, rows)

    def _file(self, handler: Any, request: Request, name: str, fault: Answer | None) -> None:
        if name not in self.files:
            send(handler, 404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        data = self.files[name] if fault is None or fault.data is None else fault.data
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.digest(name)}"', "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{self.digest(name)}"'}
        if request.path.startswith("/cdn/"):
            headers = {"ETag": '"of-another-kind"', "Accept-Ranges": "bytes"}
        elif self.elsewhere and len(data) >= LARGE_BYTES:
            place = self.address.replace("127.0.0.1", "localhost")
            send(handler, 302, headers | {"Location": f"{place}/cdn/{quote(name)}"}, b"")
            return
        span = request.span
        start, end = (0, len(data)) if span is None or (fault and fault.whole) else span
        if start >= len(data) and len(data):
            send(handler, 416, headers | {"Content-Range": f"bytes */{len(data)}"}, b"")
            return
        end = min(end, len(data))
        status = 200
        if span is not None and not (fault and fault.whole):
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        headers |= fault.headers if fault is not None else {}
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(end - start)}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if request.method == "HEAD":
            return
        stop = end if fault is None or fault.cut is None else min(end, start + fault.cut)
        for at in range(start, stop, 1 << 20):
            piece = data[at : min(at + (1 << 20), stop)]
            handler.wfile.write(piece)
            with self._lock:
                self.sent += len(piece)
                if self.rate is not None:
                    time.sleep(len(piece) / self.rate)
        if stop < end:
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()

    def _post(self, handler: Any, request: Request, path: str, prefix: str) -> None:
        body = request.body
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.created.append(asked)
            if self.exists:
                answer = json.dumps(
                    {"error": "You already created this model repo", "url": f"{self.address}/{self.repo}"}
                )
                send(handler, 409, {"Content-Type": "application/json"}, answer.encode())
                return
            self.exists = True
            _json(handler, {"url": f"{self.address}/{self.repo}", "name": self.repo})
        elif path.startswith(f"{prefix}/preupload/"):
            files = json.loads(body)["files"]
            rows = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] >= LARGE_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            _json(handler, {"files": rows})
        elif path == f"/{self.repo}.git/info/lfs/objects/batch":
            objects = []
            for row in json.loads(body)["objects"]:
                upload = {"href": f"{self.address}/upload/{row['oid']}", "header": {}}
                objects.append({**row, "actions": {"upload": upload}})
            _json(handler, {"transfer": "basic", "objects": objects})
        elif path.startswith(f"{prefix}/commit/"):
            self._commit(path, body, parse_qs(urlsplit(request.path).query))
            _json(
                handler,
                {"commitOid": COMMIT, "commitUrl": f"{self.address}/{self.repo}/commit/{COMMIT}", "success": True},
            )
        elif path == "/api/validate-yaml":
            _json(handler, {"errors": [], "warnings": []})
        else:
            send(handler, 404, {}, b"")

    def _commit(self, path: str, body: bytes, query: dict[str, list[str]]) -> None:
        rows = [json.loads(line) for line in body.decode().splitlines()]
        commit = {"revision": path.rsplit("/", 1)[1], "query": query, **rows[0]["value"], "files": {}}
        for row in rows[1:]:
            value = row["value"]
            if row["key"] == "file":
                commit["files"][value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                commit["files"][value["path"]] = self.lfs[value["oid"]]
        self.files |= commit["files"]
        for name in commit["files"]:
            self._digests.pop(name, None)
        self.commits.append(commit)


def send(handler: Any, status: int, headers: dict[str, str], body: bytes) -> None:
    """A short answer."""
    handler.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(key, value)
    handler.end_headers()
    handler.wfile.write(body)


def _json(handler: Any, body: object) -> None:
    send(handler, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())


def attach(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it the hub of this process, with caches of its own and nothing in them."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hfcache"))
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_files, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(remote_file, "traffic", remote_file.Traffic())
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process: what was opened is forgotten, the disk stays as it is."""
    close_stores()
    monkeypatch.setattr(hub_files, "_opened", {})
    monkeypatch.setattr(hub_files, "_by_folder", {})
    monkeypatch.setattr(hub_cache, "_stated", {})
    monkeypatch.setattr(source, "_STAND_INS", {})


def close_stores() -> None:
    """Leaves the stores to the next process."""
    for repository in hub_files._opened.values():
        repository.store.close()


@contextmanager
def serve(repo: str = "org/name", kind: str = "models") -> Iterator[Hub]:
    """A hub for a block."""
    hub = Hub(repo, kind)
    try:
        yield hub
    finally:
        hub.close()
