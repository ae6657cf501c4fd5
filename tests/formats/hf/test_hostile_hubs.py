"""Servers that lie, never end or hardly send: each conversion is refused within limits, or its output is right."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from demo_model import build
from hub_server import COMMIT, Answer, Fault, Hub, Request, attach, close_stores, forget, serve

import aprfmt
from aprfmt.errors import AprError, ChecksumError, CorruptError, LimitError, StorageError, UnsupportedError, UsageError
from aprfmt.formats import hub, hub_files, hub_requests
from aprfmt.io import chunks, hub_cache, remote, remote_file
from aprfmt.io.source import read_whole
from aprfmt.running.prepared import prepare

constants = pytest.importorskip("huggingface_hub.constants")

KIB, MIB = 1 << 10, 1 << 20
MOST_BYTES, MOST_CPU_S, MOST_S = 512 * MIB, 15.0, 60.0
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Made:
    """A model in two shards, and what a conversion of it gives."""

    files: dict[str, bytes]
    gguf: bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("hostile")
    build(root / "tiny.gguf")
    folder = root / "models--org--name" / "snapshots" / COMMIT
    folder.parent.mkdir(parents=True)
    aprfmt.convert_model(root / "tiny.gguf", folder, format="hf", dtype="f32", shard_size="200kB")
    aprfmt.convert_model(folder, root / "right.gguf")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Made(files, (root / "right.gguf").read_bytes())


@pytest.fixture
def server(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the model; a client that waits for tenths of a second."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(hub_files, "RETRIES", 1)
    monkeypatch.setattr(hub_requests, "_LOOK_S", 0.02)
    with serve() as found:
        attach(found, tmp_path, monkeypatch)
        found.files = dict(made.files)
        yield found
        close_stores()


# --- what the servers send ---


def is_list(request: Request) -> bool:
    return request.path.startswith("/api/")


def is_weights(request: Request) -> bool:
    """A request for weights, not for their header."""
    return any(name in request.path for name in SHARDS) and request.span is not None and request.span[1] > 130 * KIB


def always(where: Callable[[Request], bool], answer: Answer) -> Fault:
    return lambda request: answer if where(request) else None


def written(*parts: bytes, endless: bytes = b"", pause: float = 0.0, most: int = 4096 * MIB) -> Answer:
    """An answer of these bytes, then of `endless` until the client leaves, each after a pause."""

    def write(out: Any) -> None:
        for part in parts:
            out.write(part)
        for _ in range(most // len(endless) if endless else 0):
            time.sleep(pause)
            out.write(endless)
            out.flush()

    return Answer(write=write)


def status(code: int, *lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {code} X", *lines, "")).encode()


CHUNKED = "Transfer-Encoding: chunked"
LARGE = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
CRUMB = b"1\r\n \r\n"
ENDLESS_SPACES = written(status(200, CHUNKED), b"1\r\n[\r\n", endless=b"10000\r\n" + b" " * (1 << 16) + b"\r\n")


def endless(code: int, *lines: str) -> Answer:
    return written(status(code, CHUNKED, *lines), endless=LARGE)


def listed(body: bytes, *lines: str) -> Answer:
    return written(status(200, f"Content-Length: {len(body)}", *lines), body)


def part(request: Request, *lines: str) -> bytes:
    """The status and headers of a right answer for a part of a shard."""
    assert request.span is not None
    start, end = request.span
    size = next(len(data) for name, data in _files.items() if name in request.path)
    return status(206, f"Content-Range: bytes {start}-{end - 1}/{size}", *lines)


_files: dict[str, bytes] = {}


def body_of(write: Callable[[Request], Answer]) -> Fault:
    return lambda request: write(request) if is_weights(request) else None


def once(where: Callable[[Request], bool], change: Callable[[bytes], bytes]) -> Fault:
    """Other bytes of a file for the first request that fits, the right ones from then on."""
    asked: set[str] = set()

    def fault(request: Request) -> Answer | None:
        name = request.path.rsplit("/", 1)[1].partition("?")[0]
        if not where(request) or name not in _files or name in asked:
            return None
        asked.add(name)
        return Answer(data=change(_files[name]))

    return fault


def exchanged(data: bytes) -> bytes:
    """A shard whose header exchanges two tensors of the same shape."""
    a, b, between = b"self_attn.q_proj", b"self_attn.o_proj", b"self_attn.@_proj"
    return data.replace(a, between).replace(b, a).replace(between, b)


# --- servers, and what comes of them: the right output (None) or an error ---


@dataclass(frozen=True)
class Server:
    """A hostile server: its fault, or what it changes of the hub, and the error that it must come to."""

    error: type[AprError] | None
    fault: Fault | None = None
    change: Callable[[Hub], None] = lambda hub: None
    message: str = ""
    address: str = "hf://org/name"


def more_rows(*rows: Any) -> Callable[[Hub], None]:
    return lambda hub: hub.extra_rows.extend(rows)


def row(name: object, size: object = 3, digest: object = "0" * 40) -> dict[str, object]:
    return {"rfilename": name, "size": size, "blobId": digest}


def with_sha(sha: object) -> Callable[[Hub], None]:
    return lambda hub: setattr(hub, "sha", sha)


def rows_of(name: str, **values: object) -> Callable[[Hub], None]:
    """Replaces what is listed of a file: the later row of a name counts."""
    return lambda hub: hub.extra_rows.append({**row(name), **values})


def both_cases(found: Hub) -> None:
    found.files["CONFIG.JSON"] = b'{"model_type": "other"}'


SELF = "Location: /api/models/org/name/revision/main"
LISTS: dict[str, Server] = {
    "a list without end": Server(StorageError, always(is_list, ENDLESS_SPACES), message="more than"),
    "an error without end": Server(StorageError, always(is_list, endless(500)), message="returned 500"),
    "a 404 without end": Server(AprError, always(is_list, endless(404)), message="404"),
    "redirects without end": Server(StorageError, always(is_list, written(status(302, SELF, "Content-Length: 0")))),
    "a redirect's body without end": Server(StorageError, always(is_list, endless(302, SELF)), message="redirected"),
    "a redirect to a file": Server(AprError, always(is_list, written(status(302, "Location: file:///etc/passwd")))),
    "headers without end": Server(
        StorageError, always(is_list, written(status(200)[:-2], endless=b"A: " + b"b" * 997 + b"\r\n"))
    ),
    "a header byte by byte": Server(
        StorageError, always(is_list, written(b"HTTP/1.1 200 X\r\nA: ", endless=b"a", pause=0.05)), message="timed out"
    ),
    "informational answers without end": Server(
        StorageError, always(is_list, written(endless=status(102) * 100)), message="timed out"
    ),
    "a list byte by byte": Server(
        StorageError, always(is_list, written(status(200, CHUNKED), endless=CRUMB, pause=0.05)), message="timed out"
    ),
    "a compressed list": Server(
        UnsupportedError,
        always(is_list, listed(gzip.compress(bytes(64 * MIB), 1), "Content-Encoding: gzip, gzip")),
        message="compressed",
    ),
    "a million lists": Server(LimitError, always(is_list, listed(b"[" + b"[],[{}]," * MIB + b"0]"))),
    "deep lists": Server(LimitError, always(is_list, listed(b"[" * 100_000 + b"]" * 100_000))),
    "no JSON": Server(CorruptError, always(is_list, listed(b"<html>"))),
    "another form of JSON": Server(CorruptError, always(is_list, listed(b'[{"sha": 1}]'))),
    "an empty list": Server(AprError, always(is_list, listed(json.dumps({"sha": COMMIT}).encode()))),
    "no commit": Server(CorruptError, change=with_sha(None), message="did not return the commit"),
    "a commit that leads elsewhere": Server(
        CorruptError, change=with_sha("../../x"), message="did not return the commit"
    ),
    "another commit than the pinned one": Server(
        AprError, change=with_sha("f" * 40), message="returned commit", address=f"hf://org/name@{COMMIT}"
    ),
    "an over-long name": Server(None, change=more_rows(row("n" * 300 + ".json"), row("ü" * 200))),
    "a file that is a folder, too": Server(None, change=more_rows(row("config.json/x"))),
    "names that differ by case": Server(None, change=both_cases),
    "rows of every kind": Server(
        None, change=more_rows(None, 3, [], {}, row(3), row("a", -1), row("b", 1 << 70), row("c", True), row("d", "1"))
    ),
    "a digest that is none": Server(AprError, change=lambda hub: hub.set_digest(SHARDS[0], "Z" * 64)),
    "another digest": Server(ChecksumError, change=rows_of("config.json", size=0, blobId="1" * 40)),
    "a shard of another size": Server(
        AprError, change=rows_of(SHARDS[0], size=1 << 49, lfs={"sha256": "1" * 64, "size": 1 << 49})
    ),
}
BODIES: dict[str, Server] = {
    "another header": Server(ChecksumError, once(lambda r: SHARDS[0] in r.path, exchanged), message="digest"),
    "another template": Server(
        ChecksumError,
        once(lambda r: "tokenizer" in r.path or "template" in r.path, lambda data: data.replace(b"start", b"STOLE")),
        message="digest",
    ),
    "weights without end": Server(
        ChecksumError, body_of(lambda r: written(part(r, CHUNKED), endless=LARGE)), message="digest"
    ),
    "an error of a file without end": Server(StorageError, always(is_weights, endless(503)), message="returned 503"),
    "redirects of a file without end": Server(
        StorageError,
        always(is_weights, written(status(307, "Location: ?x", "Content-Length: 0"))),
        message="redirected",
    ),
    "compressed weights": Server(
        UnsupportedError, body_of(lambda r: written(part(r, "Content-Encoding: gzip", "Content-Length: 9"), b"x" * 9))
    ),
    "weights byte by byte": Server(
        StorageError,
        body_of(lambda r: written(part(r, "Content-Length: 9999999"), endless=b"x", pause=0.05)),
        message="too slowly",
    ),
    "weights in crumbs": Server(
        StorageError, body_of(lambda r: written(part(r, CHUNKED), endless=CRUMB, most=MIB)), message="too slowly"
    ),
    "a connection for each byte": Server(
        StorageError,
        body_of(lambda r: written(part(r, "Content-Length: 99999"), b"x")),
        message="closed the connection",
    ),
    "two lengths": Server(
        StorageError, body_of(lambda r: written(part(r, "Content-Length: 5", "Content-Length: 6"), b"x" * 6))
    ),
    "a longer length": Server(
        StorageError, body_of(lambda r: written(part(r, "Content-Length: 99999999"))), message="closed the connection"
    ),
    "several ranges": Server(
        AprError,
        body_of(
            lambda r: written(
                status(206, "Content-Type: multipart/byteranges; boundary=x", "Content-Length: 3"), b"xxx"
            )
        ),
    ),
    "no content": Server(UnsupportedError, always(is_weights, written(status(204)))),
    "a slow header of a file": Server(
        StorageError,
        always(is_weights, written(b"HTTP/1.1 206 X\r\nA: ", endless=b"a", pause=0.05)),
        message="timed out",
    ),
}


@pytest.mark.parametrize("name", [*LISTS, *BODIES])
def test_hostile_servers(name: str, server: Hub, made: Made, tmp_path: Path) -> None:
    hostile = {**LISTS, **BODIES}[name]
    for each in made.files:
        server.digest(each)
    hostile.change(server)
    _files.update(made.files)
    server.fault = hostile.fault or (lambda request: None)
    target = tmp_path / "there.gguf"
    before, cpu, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), time.monotonic()
    error = None
    try:
        aprfmt.convert_model(hostile.address, target)
    except AprError as caught:
        error = caught
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * KIB < MOST_BYTES
    assert time.process_time() - cpu < MOST_CPU_S
    assert time.monotonic() - start < MOST_S
    if hostile.error is None:
        assert error is None, error
        assert target.read_bytes() == made.gguf
        return
    assert isinstance(error, hostile.error), error
    assert hostile.message in error.message, error
    assert not list(tmp_path.glob("there*"))


def test_weights_that_change_when_they_are_fetched_again(
    server: Hub, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that were used leave a small store before they are hashed; later answers differ from the first."""
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 16 * KIB)
    data = bytes(range(256)) * (16 * KIB // 256 * 8)
    other = data.replace(b"\x07\x08", b"\x08\x07")
    for liar in range(8):
        asked: list[int] = []

        def fetch(start: int, end: int, liar: int = liar, asked: list[int] = asked) -> Iterator[bytes]:
            number = start // (16 * KIB)
            asked.append(number)
            yield (other if number == liar and asked.count(number) == 1 else data)[start:end]

        file = remote_file.RemoteFile("x", "x", len(data), hashlib.sha256(data).hexdigest(), fetch)
        store = chunks.Store(tmp_path / f"chunks{liar}", 48 * KIB)
        out = bytearray(16 * KIB)
        used = b""
        error = None
        try:
            for number in (7, 6, 5, 4, 3, 2, 1, 0):
                store.read(file, number * len(out), memoryview(out))
                used = bytes(out) + used
            store.verify(file)
        except ChecksumError as caught:
            error = caught
        store.close()
        assert error is not None or used == data, liar


@pytest.mark.parametrize("late", [False, True])
def test_a_header_is_that_of_the_hashed_bytes(late: bool, tmp_path: Path) -> None:
    """Whether it is read before the weights are hashed or afterwards."""
    data, lie = bytes(300_000), bytes(1000) + b"x" + bytes(298_999)
    lies = True

    def fetch(start: int, end: int) -> Iterator[bytes]:
        yield (lie if lies else data)[start:end]

    file = remote_file.RemoteFile("x", "x", len(data), hashlib.sha256(data).hexdigest(), fetch)
    store = chunks.Store(tmp_path / "chunks", 64 * MIB)
    if late:
        lies = False
        store.verify(file)
        lies = True
        assert file.head(0, 2000) is None  # it has to come from what was hashed
    else:
        assert file.head(0, 2000) == lie[:2000]
        lies = False
        with pytest.raises(ChecksumError):
            store.verify(file)
    store.close()


def test_a_header_that_is_fetched_again_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "_MOST_KEPT_BYTES", 0)
    answers = iter((b"a" * 5000, b"b" * 5000))

    def fetch(start: int, end: int) -> Iterator[bytes]:
        yield next(answers)[start:end]

    file = remote_file.RemoteFile("x", "x", 5000, "0" * 64, fetch)
    assert file.head(0, 9) == b"a" * 9
    with pytest.raises(ChecksumError):
        file.head(0, 9)


def test_what_looks_says_that_headers_are_not_verified(server: Hub) -> None:
    aprfmt.inspect("hf://org/name")
    found = remote_file.traffic
    assert {address.rsplit("/", 1)[1] for address in found.unverified} == {*SHARDS}
    assert found.to_json()["unverified_files"] == 2
    assert "2 files read in part and not verified" in found.sentence()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_texts_are_verified_before_they_are_used(
    name: str, server: Hub, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 4 * KIB)  # the tokenizer has two
    monkeypatch.setattr(remote, "_SHORT_BYTES", -1)  # nothing is verified ahead
    server.digest(name)
    server.files[name] = made.files[name][:-1] + b" "
    with pytest.raises(ChecksumError):
        read_whole(hub.snapshot("hf://org/name") / name)


def test_what_an_earlier_run_left_is_verified(server: Hub, made: Made, tmp_path: Path) -> None:
    place = tmp_path / "cache" / "hub" / "models--org--name" / "chunks" / server.digest("config.json")
    place.mkdir(parents=True)
    (place / "00000").write_bytes(made.files["config.json"][:-1] + b" ")
    with pytest.raises(ChecksumError):
        read_whole(hub.snapshot("hf://org/name") / "config.json")


def test_skipped_files_are_named(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "MAX_CARRIED_FILES", len(server.files) + 2)
    server.extra_rows += [row("n" * 300), row("config.json/x"), row("one"), row("two")]
    with aprfmt.open("hf://org/name"):
        pass
    skipped = remote_file.traffic.skipped
    assert len(skipped) == 3
    assert any("'nnn" in line for line in skipped)
    assert any("config.json/x" in line for line in skipped)
    assert any(line.startswith("2 files beyond") for line in skipped)


# --- what other programs read ---


@pytest.fixture
def gguf(server: Hub, tmp_path: Path) -> bytes:
    """A GGUF in place of the shards."""
    build(tmp_path / "own.gguf")
    data = (tmp_path / "own.gguf").read_bytes()
    server.files = {"m.gguf": data}
    server.digest("m.gguf")
    return data


def blobs(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.glob("hfcache/*/blobs/*")]


def test_a_file_for_other_programs_is_verified(server: Hub, gguf: bytes, tmp_path: Path) -> None:
    """Nothing else gets the digest's name in the cache."""
    asked = count()
    half = len(gguf) // 2
    bad = gguf[:half] + bytes([gguf[half] ^ 1]) + gguf[half + 1 :]
    server.fault = lambda request: Answer(data=bad) if "m.gguf" in request.path and next(asked) else None
    with pytest.raises(ChecksumError):
        prepare("org/name")
    assert blobs(tmp_path) == []
    server.fault = lambda request: None
    assert Path(prepare("org/name").path).read_bytes() == gguf
    assert blobs(tmp_path) == [server.digest("m.gguf")]


def test_a_fetch_goes_on_where_it_was_ended(
    server: Hub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 64 * KIB)
    server.fault = lambda r: Answer(403) if r.span and r.span[0] >= 128 * KIB else None
    with pytest.raises(StorageError):
        prepare("org/name")
    assert [name.endswith(".incomplete") for name in blobs(tmp_path)] == [True]
    server.fault = lambda request: None
    server.requests.clear()
    assert Path(prepare("org/name").path).read_bytes() == gguf
    assert min(r.span[0] for r in server.of_files() if r.span and r.span[0]) == 128 * KIB


def test_a_cache_that_others_filled_is_verified(
    server: Hub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(prepare(f"hf://org/name@{COMMIT}").path)
    for damage in (False, True):
        forget(monkeypatch)
        if damage:
            blob = path.resolve()
            blob.write_bytes(gguf[:-1] + bytes([gguf[-1] ^ 1]))
        server.requests.clear()
        for use in (prepare, partial(convert_to, tmp_path / f"{damage}.gguf")):
            if damage:
                with pytest.raises(ChecksumError, match="huggingface_hub's cache"):
                    use(f"hf://org/name@{COMMIT}/m.gguf")
            else:
                use(f"hf://org/name@{COMMIT}/m.gguf")
        assert server.requests == []
    assert not (tmp_path / "True.gguf").exists()


def convert_to(target: Path, address: str) -> None:
    aprfmt.convert_model(address, target)


def test_a_verified_file_is_not_hashed_again(
    server: Hub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(f"hf://org/name@{COMMIT}/m.gguf").path
    hashed: list[str] = []

    def new_hash(digest: str, size: int) -> object:
        hashed.append(digest)
        return remote_file.new_hash(digest, size)

    monkeypatch.setattr("aprfmt.io.hub_cache.new_hash", new_hash)
    hub_cache.verify(path)
    assert hashed == []
    record = next((tmp_path / "cache" / "hub" / "verified").iterdir())
    os.utime(record, (1.0, 1.0))
    hub_cache.verify(path)
    assert hashed == [server.digest("m.gguf")]


# --- requests ---


def test_no_redirect_leaves_tls() -> None:
    def request(scheme: str) -> Any:
        return SimpleNamespace(url=SimpleNamespace(scheme=scheme))

    for before, after in (("https", "https"), ("http", "https"), ("http", "http")):
        hub_requests._check_redirect(SimpleNamespace(request=request(before)), request(after), 1)
    with pytest.raises(StorageError, match="unencrypted"):
        hub_requests._check_redirect(SimpleNamespace(request=request("https")), request("http"), 1)


def test_a_thread_that_is_given_up_ends() -> None:
    threads: list[threading.Thread] = []

    def send() -> NoReturn:
        threads.append(threading.current_thread())
        while True:
            time.sleep(0.01)

    with pytest.raises(StorageError, match="timed out"):
        hub_requests._within(0.05, send)
    threads[0].join(10)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("rate", ["0", "fast"])
def test_the_least_rate_is_the_users(
    rate: str, server: Hub, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hub_requests.RATE_VARIABLE, rate)
    if rate == "0":
        aprfmt.convert_model("hf://org/name", tmp_path / "x.gguf")
        return
    with pytest.raises(UsageError, match="APR_HUB_MIN_RATE"):
        aprfmt.convert_model("hf://org/name", tmp_path / "x.gguf")
