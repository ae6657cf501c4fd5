"""Files at http(s) addresses: read by ranges, by every command that only reads them."""

from __future__ import annotations

import http.server
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from demo_model import build
from hub_server import attach, serve
from local_server import LocalServer

import aprfmt
from aprfmt.errors import (
    AprError,
    ChangedError,
    NotFoundError,
    StorageError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats import hub, hub_files, url_files
from aprfmt.io import remote_file


@dataclass
class Server:
    """A server of one file, with faults on request.

    Attributes:
        ranges: whether it serves ranges.
        cuts: how many of the next responses end after half of their body.
        changes: whether the tag changes with every response.
        status: of every response, 0: as it should be.
        seen: the headers of each request.
        sent: bytes of bodies.
    """

    data: bytes
    ranges: bool = True
    cuts: int = 0
    changes: bool = False
    tag: str = '"v1"'
    status: int = 0
    address: str = ""
    seen: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.seen.append({name.lower(): value for name, value in handler.headers.items()})
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", "")) if self.ranges else None
        start, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(self.data))
        body = self.data[start:end] if not self.status else b""
        handler.send_response(self.status or (206 if found else 200))
        if found:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.data)}")
        handler.send_header("Content-Length", str(len(body)))
        if self.tag:
            handler.send_header("ETag", f'"{len(self.seen)}"' if self.changes else self.tag)
        handler.end_headers()
        if self.cuts and len(body) > 1:
            self.cuts -= 1
            body = body[: len(body) // 2]
            handler.close_connection = True
        self.sent += len(body)  # before the client can see the end
        handler.wfile.write(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("url") / "m.gguf"
    build(path)
    return path


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("huggingface_hub")
    found = Server(model.read_bytes())

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.answer(self)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    http_server = LocalServer(Handler)
    found.address = f"http://{http_server.host}/some/m.gguf"
    with serve() as of_hub:
        attach(of_hub, tmp_path, monkeypatch)
        monkeypatch.setattr(url_files, "_opened", {})
        monkeypatch.setattr(hub_files, "URL_FOLDERS", {})
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield found
        assert not of_hub.requests
    http_server.close()


def test_a_file_is_inspected_by_its_beginning(server: Server, model: Path) -> None:
    address = f"{server.address}?signature=secret"
    there, here = aprfmt.inspect(address), aprfmt.inspect(model)
    assert (there.tensor_count, there.metadata, there.dtypes) == (here.tensor_count, here.metadata, here.dtypes)
    assert [row.tensor.name for row in aprfmt.tensors(address).tensors] == [
        row.tensor.name for row in aprfmt.tensors(model).tensors
    ]
    traffic = remote_file.traffic
    assert traffic.origins == [server.address], "without the signature"
    assert not traffic.unverified
    assert traffic.to_json()["files_without_digest"] == 1
    assert "not verified" in traffic.sentence()
    assert server.seen
    assert not any("authorization" in headers for headers in server.seen), "the token is the hub's"


def test_a_file_is_converted_and_its_chunks_are_reused(server: Server, model: Path, tmp_path: Path) -> None:
    report = aprfmt.convert_model(server.address, tmp_path / "out.apr")
    assert report.lossless
    assert aprfmt.diff(tmp_path / "out.apr", model, values=True).identical
    aprfmt.import_model(server.address, tmp_path / "again.apr")
    assert (tmp_path / "again.apr").read_bytes() == (tmp_path / "out.apr").read_bytes()


def test_a_cut_connection_is_resumed(server: Server, model: Path, tmp_path: Path) -> None:
    server.cuts = 3
    aprfmt.convert_model(server.address, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == model.read_bytes()


def test_a_file_that_changes_is_noticed(server: Server, tmp_path: Path) -> None:
    server.changes = True
    with pytest.raises(ChangedError, match="ETag or date changed"):
        aprfmt.inspect(server.address)
    server.changes = False
    url_files._opened.clear()
    aprfmt.inspect(server.address)
    server.data = server.data[:-1]
    with pytest.raises(ChangedError, match="instead of"):
        aprfmt.convert_model(server.address, tmp_path / "never.gguf")
    assert not (tmp_path / "never.gguf").exists()


def test_without_a_tag_nothing_is_kept(server: Server) -> None:
    server.tag = ""
    aprfmt.tensors(server.address, hash=True)
    before = server.sent
    url_files._opened.clear()
    aprfmt.tensors(server.address, hash=True)
    assert server.sent >= 2 * before - 1


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ({"ranges": False}, UnsupportedError, "range requests"),
        ({"status": 404}, NotFoundError, "404"),
        ({"status": 403}, StorageError, "403"),
    ],
)
def test_what_a_server_refuses_is_said_of_the_server(
    server: Server, fault: dict[str, Any], error: type[AprError], words: str
) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    with pytest.raises(error, match=words) as caught:
        aprfmt.inspect(server.address)
    assert "hub" not in str(caught.value)
    if "404" not in words:
        assert caught.value.hint == f"curl -fL -O '{server.address}'"


def test_llama_cpp_gets_the_line_that_downloads(server: Server) -> None:
    with pytest.raises(UsageError) as caught:
        aprfmt.run(server.address, "hi")
    assert caught.value.hint == f"apr convert {server.address} -o m.gguf"


def test_nothing_is_asked_offline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE"):
        aprfmt.inspect(server.address)
    assert not server.seen


def test_only_this_machine_is_read_without_encryption() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UnsupportedError, match="unencrypted http") as caught:
        aprfmt.inspect("http://user:secret@models.example/m.gguf")
    assert caught.value.hint == "https://user:secret@models.example/m.gguf"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("s3://bucket/m.gguf", "aws s3 cp s3://bucket/m.gguf m.gguf\nthen pass m.gguf"),
        ("s3://bucket/model", "aws s3 cp --recursive s3://bucket/model FOLDER"),
        ("gs://bucket/a/m.gguf", "gcloud storage cp gs://bucket/a/m.gguf m.gguf\nthen pass m.gguf"),
        ("localhost:8000", "did you mean http://localhost:8000?"),
        ("127.0.0.1:8000/v1", "did you mean http://127.0.0.1:8000/v1?"),
        ("[::1]:8000", "did you mean http://[::1]:8000?"),
        ("gpu-3.example:8000/", "did you mean http://gpu-3.example:8000/?"),
        ("localhost:80000", None),
        ("runs/a:8000", None),
        ("m.gguf:8000", None),
        ("model:Q4_K_M", None),
    ],
)
def test_other_stores_get_the_line_to_type(address: str, hint: str | None) -> None:
    assert hub.hint_at_address(address) == hint


def test_a_server_without_a_scheme_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        aprfmt.teacher("127.0.0.1:8000/v1", tmp_path / "text.jsonl", tmp_path / "out")
    assert caught.value.hint == "did you mean http://127.0.0.1:8000/v1?"
    (tmp_path / "localhost:8000").touch()
    with pytest.raises(UnknownFormatError, match="the file is empty"):
        aprfmt.inspect("localhost:8000")


def test_a_page_of_the_hub_is_still_one() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UsageError, match="not a model page"):
        aprfmt.inspect("https://models.example/page")
