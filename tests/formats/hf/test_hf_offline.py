"""What a failed download says, with huggingface_hub's own errors: from a server on this machine, or from none."""

from __future__ import annotations

import errno
import http.server
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer

from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, StorageError
from aprfmt.formats import hub, hub_files

pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")


class Hub:
    """A hub that gives every request one answer: a status with headers, or none for `pause` seconds."""

    def __init__(self) -> None:
        self.status, self.headers, self.pause = 404, dict[str, str](), 0.0
        this = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(this.pause)
                self.send_response(this.status)
                for name, value in {**this.headers, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = LocalServer(Handler)
        self.address = f"http://{self.server.host}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this test; the cache is empty."""
    found = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.server.close()


def failure(address: str = "hf://org/name") -> AprError:
    with pytest.raises(AprError) as caught:
        hub.snapshot(address)
    assert caught.value.hint
    return caught.value


ANSWERS: dict[str, tuple[int, dict[str, str], type[AprError], str, str]] = {
    "absent": (404, {"X-Error-Code": "RepoNotFound"}, NotFoundError, "not on the hub", "private repository"),
    "gated": (403, {"X-Error-Code": "GatedRepo"}, StorageError, "is gated", "/org/name, then hf auth login"),
    "gated, unknown": (401, {"X-Error-Code": "GatedRepo"}, StorageError, "is gated", "HF_TOKEN"),
    "revision": (404, {"X-Error-Code": "RevisionNotFound"}, NotFoundError, "no revision v7", "@"),
    "entry": (404, {"X-Error-Code": "EntryNotFound"}, NotFoundError, "not on the hub", "file's name"),
    "token": (401, {}, StorageError, "returned 401", "valid token"),
    "forbidden": (403, {}, StorageError, "returned 403", "read access"),
    "too many": (429, {}, StorageError, "returned 429", "wait"),
    "down": (500, {}, StorageError, "returned 500", "later"),
}


@pytest.mark.parametrize(("status", "headers", "kind", "message", "hint"), ANSWERS.values(), ids=list(ANSWERS))
def test_answers_of_the_hub(
    status: int, headers: dict[str, str], kind: type[AprError], message: str, hint: str, server: Hub
) -> None:
    server.status, server.headers = status, headers
    error = failure("hf://org/name@v7")
    assert type(error) is kind
    assert message in error.message
    assert hint in (error.hint or "")


def test_without_a_network_it_says_so(server: Hub) -> None:
    server.server.server_close()
    server.server.socket.close()
    error = failure()
    assert type(error) is StorageError
    assert (error.exit_code, "cannot be reached" in error.message) == (7, True)
    assert "not on the hub" not in error.message
    assert "HF_TOKEN" not in (error.hint or "")
    assert "need no network" in (error.hint or "")


def test_without_a_name_server_it_says_so(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    assert "cannot be reached" in failure().message


def test_a_hub_that_is_slow(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    server.pause = 0.5
    error = failure()
    assert (type(error), "the hub timed out" in error.message) == (StorageError, True)


def test_the_library_was_told_to_stay_offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = failure()
    assert type(error) is StorageError
    assert "not on the hub" not in error.message


@pytest.mark.parametrize(("code", "hint"), [(errno.ENOSPC, "HF_HOME"), (errno.EACCES, "permissions")])
def test_a_disk_that_refuses(code: int, hint: str, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    monkeypatch.setenv("HF_HOME", "unused")

    def fails(*_: object, **__: object) -> str:
        try:
            raise OSError(code, os.strerror(code), "/cache/blob.incomplete")
        except OSError as error:
            raise errors.LocalEntryNotFoundError("no snapshot in the cache") from error

    monkeypatch.setattr(hub_files, "ask", fails)
    error = failure()
    assert (type(error), error.exit_code, error.path) == (StorageError, 7, "/cache/blob.incomplete")
    assert hint in (error.hint or "")


def test_a_package_that_the_library_needs(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: Any) -> str:
        raise ImportError("No module named 'socksio'", name="socksio")

    monkeypatch.setattr(hub_files, "ask", fails)
    error = failure()
    assert (type(error), error.exit_code, error.hint) == (MissingDependencyError, 6, "pip install socksio")
