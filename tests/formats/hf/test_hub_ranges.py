"""Repositories read by ranges from a hub on this machine: what is fetched, what is kept, and each way it can fail."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo_model import build
from hub_server import COMMIT, Answer, Hub, Request, attach, close_stores, forget, serve

import aprfmt
from aprfmt.errors import (
    AprError,
    ChangedError,
    ChecksumError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats import hub, hub_files
from aprfmt.io import chunks, remote, remote_file

constants = pytest.importorskip("huggingface_hub.constants")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards, where the hub's cache would have it."""
    root = tmp_path_factory.mktemp("hub")
    build(root / "tiny.gguf")
    target = root / "models--org--name" / "snapshots" / COMMIT
    target.parent.mkdir(parents=True)
    aprfmt.convert_model(root / "tiny.gguf", target, format="hf", dtype="f32", shard_size="200kB")
    return target


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the folder; nothing of it is on this disk."""
    with serve() as found:
        attach(found, tmp_path, monkeypatch)
        found.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        yield found
        close_stores()


def is_shard(request: Request) -> bool:
    return "/resolve/" in request.path and ".safetensors" in request.path and "index" not in request.path


# --- addresses ---


PAGES = {
    "": ("main", ""),
    "/": ("main", ""),
    "/tree/main": ("main", ""),
    "/tree/v1.0": ("v1.0", ""),
    "/tree/refs%2Fpr%2F3": ("refs/pr/3", ""),
    "/blob/main/x.gguf": ("main", "x.gguf"),
    "/resolve/main/sub/x.gguf?download=true": ("main", "sub/x.gguf"),
    "/tree/main/sub": ("main", "sub"),
}


@pytest.mark.parametrize(("page", "meant"), PAGES.items())
def test_pasted_urls(page: str, meant: tuple[str, str], server: Hub) -> None:
    found = hub.parse(f"{server.address}/org/name{page}")
    assert (found.repo, found.revision, found.file) == ("org/name", *meant)


@pytest.mark.parametrize("page", ["/datasets/org/name", "/org", "/", "/org/name/issues", "/org/na--me"])
def test_pages_that_are_no_models(page: str, server: Hub) -> None:
    with pytest.raises(UsageError):
        hub.parse(server.address + page)


def test_a_url_of_another_host(server: Hub) -> None:
    with pytest.raises(UsageError, match="not a model page of the hub"):
        aprfmt.open("http://example.invalid/org/name")


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Model-7B.Q4_K_M.gguf", "Q4_K_M"),
        ("model-q8_0.gguf", "Q8_0"),
        ("m-IQ2_XXS-00001-of-00003.gguf", "IQ2_XXS"),
        ("BF16/m-BF16-00001-of-00002.gguf", "BF16"),
        ("m.UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("plain.gguf", ""),
    ],
)
def test_the_quant_of_a_name(name: str, quant: str) -> None:
    assert hub.quant_of(name) == quant


def test_a_quant_is_picked(server: Hub, folder: Path) -> None:
    data = (folder.parents[2] / "tiny.gguf").read_bytes()
    server.files = dict.fromkeys(("m.Q4_K_M.gguf", "m.Q8_0.gguf", "mmproj-m.Q8_0.gguf", "m.imatrix.gguf"), data)
    with aprfmt.open("org/name:q8_0") as model:
        assert (model.format, model.path.name) == ("gguf", "m.Q8_0.gguf")
    with aprfmt.open("hf://org/name/m.Q4_K_M.gguf") as model:
        assert model.path.name == "m.Q4_K_M.gguf"
    with pytest.raises(UsageError, match="Q4_K_M, Q8_0") as caught:
        aprfmt.open("hf://org/name")
    assert "hf://org/name:Q4_K_M" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="none of"):
        aprfmt.open("hf://org/name:Q2_K")


def test_a_path_comes_before_a_repository(
    server: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(NotFoundError):
        aprfmt.open("org/name")
    assert server.requests == []
    shutil.copytree(folder, tmp_path / "org" / "name")
    with aprfmt.open("org/name") as model:
        assert model.path == Path("org/name")
    for name in ("nowhere/x.gguf", "./a/b", "/a/b", "a/b/c", "x/y.safetensors"):
        with pytest.raises(NotFoundError):
            aprfmt.open(name)
    assert server.requests == []


def test_a_path_that_is_neither(server: Hub) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder, and as a repository") as caught:
        aprfmt.open("org/none")
    assert caught.value.exit_code == 3


# --- looking ---


def test_headers_alone_are_read(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model-00001-of-00002.safetensors"
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 4 * KIB)
    aprfmt.inspect("hf://org/name")
    spans = [request.span for request in server.of_files() if name in request.path]
    assert spans == [(0, 4 * KIB)]


@pytest.mark.parametrize("function", [aprfmt.inspect, aprfmt.tree])
def test_what_looks_says_the_same_as_of_a_folder(
    function: Callable[[object], object], server: Hub, folder: Path
) -> None:
    here, there = function(folder), function("org/name")
    first, second = (dict(value.to_json()) for value in (here, there))  # type: ignore[attr-defined]
    for value in (first, second):
        value.pop("file")
    assert first == second


def test_other_revisions_are_asked_for(server: Hub) -> None:
    with aprfmt.open(f"hf://org/name@{COMMIT}") as model:
        assert len(model.tensors) == 20
    with pytest.raises(NotFoundError, match="no revision v9"):
        aprfmt.open("hf://org/name@v9")


def test_offline_nothing_is_asked(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE"):
        aprfmt.open("hf://org/name")
    assert server.requests == []


def test_the_token_goes_along(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with aprfmt.open("hf://org/name"):
        pass
    assert {request.headers.get("authorization") for request in server.requests} == {"Bearer hf_secret"}


def test_files_that_another_host_sends(
    server: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub does with large files: its own answer has the ETag, the other host must not see the token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.elsewhere = True
    aprfmt.convert_model(folder, tmp_path / "here.gguf")
    assert convert(tmp_path / "there.gguf") == (tmp_path / "here.gguf").read_bytes()
    others = [request for request in server.requests if request.path.startswith("/cdn/")]
    assert others
    assert not any("authorization" in request.headers for request in others)
    own = [request for request in server.requests if "/resolve/" in request.path]
    assert all(request.headers["authorization"] == "Bearer hf_secret" for request in own)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_comparison_of_metadata_fetches_headers_alone(
    is_same: bool, server: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 4 * KIB)
    data = (folder.parents[2] / "tiny.gguf").read_bytes()
    server.files = {"m.gguf": data if is_same else data[:-1] + bytes([data[-1] ^ 1])}
    found = aprfmt.diff("hf://org/name/m.gguf", folder.parents[2] / "tiny.gguf", metadata_only=True)
    assert found.identical
    assert remote_file.traffic.n_bytes < len(data) // 2
    assert aprfmt.diff("hf://org/name/m.gguf", folder.parents[2] / "tiny.gguf").identical is is_same


@pytest.mark.parametrize("name", ["../odd", "/odd", "a//odd", "a\\odd", "a/../../odd", "\x1bodd", ""])
def test_names_that_lead_elsewhere_are_left_out(name: str, server: Hub, tmp_path: Path) -> None:
    server.files[name] = b"{}"
    with aprfmt.open("hf://org/name") as model:
        assert len(model.tensors) == 20
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert not any("odd" in path for path in made)


def test_a_stand_in_is_no_model_for_others(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.snapshot("hf://org/name") / "model-00001-of-00002.safetensors"
    forget(monkeypatch)
    with pytest.raises(AprError):
        aprfmt.open(path)


# --- converting ---


def convert(target: Path, **options: object) -> bytes:
    aprfmt.convert_model("hf://org/name", target, **options)  # type: ignore[arg-type]
    return target.read_bytes()


@pytest.mark.parametrize("suffix", [".gguf", ".apr"])
def test_the_bytes_are_those_of_a_folder(suffix: str, server: Hub, folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / f"here{suffix}")
    assert convert(tmp_path / f"there{suffix}") == (tmp_path / f"here{suffix}").read_bytes()
    shards = [name for name in server.files if name.endswith(".safetensors")]
    verified = {address.rsplit("/", 1)[1] for address in remote_file.traffic.verified}
    assert set(shards) <= verified


def test_blake3_of_what_is_fetched(server: Hub, folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "here.apr", hash=True)
    aprfmt.import_model("hf://org/name", tmp_path / "there.apr", hash=True)
    assert (tmp_path / "there.apr").read_bytes() == (tmp_path / "here.apr").read_bytes()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 16 KiB, so that each shard has a dozen."""
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", 16 * KIB)
    monkeypatch.setattr(chunks, "LEAST_STORED_BYTES", 64 * KIB)
    monkeypatch.setattr(chunks, "_KEPT_BYTES", 16 * KIB)
    return 16 * KIB


def test_the_disk_is_bounded(
    small_chunks: int, server: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aprfmt.convert_model(folder, tmp_path / "here.gguf")
    most = 5 * small_chunks
    seen = []
    whole = chunks.Store._write

    def watch(store: chunks.Store, chunk: chunks._Chunk) -> None:
        whole(store, chunk)
        seen.append(on_disk(tmp_path))

    monkeypatch.setattr(chunks.Store, "_write", watch)
    assert convert(tmp_path / "there.gguf", max_disk=most) == (tmp_path / "here.gguf").read_bytes()
    shard_bytes = sum(len(data) for name, data in server.files.items() if name.endswith(".safetensors"))
    assert len(seen) >= shard_bytes // small_chunks
    assert max(seen) <= most
    assert on_disk(tmp_path) <= sum(len(data) for name, data in server.files.items() if name.endswith("n"))


def on_disk(tmp_path: Path) -> int:
    found = 0
    for path in (tmp_path / "cache").glob("hub/*/chunks/*/*"):
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def test_each_byte_is_fetched_once(small_chunks: int, server: Hub, tmp_path: Path) -> None:
    convert(tmp_path / "there.gguf", max_disk=200 * KIB)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        spans = [request.span for request in server.of_files() if name in request.path]
        chunks = [span for span in spans if span and span[0] % small_chunks == 0 and span[1] - span[0] <= small_chunks]
        assert len(chunks) == len(set(chunks)) == -(-len(server.files[name]) // small_chunks)


def test_a_connection_that_is_cut_goes_on(server: Hub, folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / "here.gguf")
    cuts: list[tuple[int, int]] = []

    def fault(request: Request) -> Answer | None:
        if is_shard(request) and request.span and request.span[1] > 130 * KIB and len(cuts) < 3:
            cuts.append(request.span)
            return Answer(cut=50_000)
        return None

    server.fault = fault
    assert convert(tmp_path / "there.gguf") == (tmp_path / "here.gguf").read_bytes()
    assert len(cuts) == 3
    later = [request.span for request in server.of_files() if is_shard(request)]
    assert all((start + 50_000, end) in later for start, end in cuts)


def broken(fault: Callable[[Request], Answer | None], server: Hub, tmp_path: Path) -> AprError:
    """The error of a conversion that fails; nothing is left of it."""
    server.fault = fault
    with pytest.raises(AprError) as caught:
        convert(tmp_path / "there.gguf")
    assert not list(tmp_path.glob("there*"))
    assert caught.value.hint
    return caught.value


def on_weights(answer: Answer) -> Callable[[Request], Answer | None]:
    """A fault of the requests for weights, not for their headers."""
    return lambda request: answer if is_shard(request) and request.span and request.span[1] > 130 * KIB else None


FAULTS: dict[str, tuple[Answer, type[AprError], str, int]] = {
    "half a body, always": (Answer(cut=0), StorageError, "closed the connection", 7),
    "500": (Answer(500), StorageError, "returned 500", 7),
    "503": (Answer(503), StorageError, "returned 503", 7),
    "429": (Answer(429, {"Retry-After": "0"}), StorageError, "returned 429", 7),
    "401": (Answer(401), AprError, "", 0),
    "gated": (Answer(403, {"X-Error-Code": "GatedRepo"}), StorageError, "is gated", 7),
    "forbidden": (Answer(403), StorageError, "returned 403", 7),
    "404": (Answer(404, {"X-Error-Code": "EntryNotFound"}), NotFoundError, "not on the hub", 3),
    "no connection": (Answer(0), StorageError, "", 7),
    "another ETag": (Answer(headers={"X-Linked-ETag": f'"{"0" * 64}"'}), ChangedError, "ETag", 4),
    "another size": (Answer(headers={"Content-Range": "bytes 0-9/10"}), ChangedError, "bytes 0-9/10", 4),
    "416": (Answer(416), ChangedError, "shorter", 4),
}


@pytest.mark.parametrize(("answer", "kind", "message", "code"), FAULTS.values(), ids=list(FAULTS))
def test_faults(answer: Answer, kind: type[AprError], message: str, code: int, server: Hub, tmp_path: Path) -> None:
    error = broken(on_weights(answer), server, tmp_path)
    assert isinstance(error, kind), error
    assert message in error.message
    assert not code or error.exit_code == code


def test_a_server_without_ranges(server: Hub, tmp_path: Path) -> None:
    error = broken(lambda request: Answer(whole=True) if is_shard(request) else None, server, tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "hf download" in (error.hint or "")
    assert server.sent < 4 * MIB


def test_a_slow_server(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_files, "RETRIES", 1)
    error = broken(on_weights(Answer(pause=1.0)), server, tmp_path)
    assert isinstance(error, StorageError)
    assert "the hub timed out" in error.message


def test_a_server_that_recovers(server: Hub, folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / "here.gguf")
    asked: dict[str, int] = {}

    def fault(request: Request) -> Answer | None:
        if "/resolve/" not in request.path:
            return None
        asked[request.path] = asked.get(request.path, 0) + 1
        return Answer(503) if asked[request.path] <= 2 else None

    server.fault = fault
    assert convert(tmp_path / "there.gguf") == (tmp_path / "here.gguf").read_bytes()


def test_other_bytes_under_the_same_tag(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model-00002-of-00002.safetensors"
    good = server.files[name]
    server.digest(name)
    server.files[name] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(ChecksumError) as caught:
        convert(tmp_path / "there.gguf")
    assert name in (caught.value.path or "")
    assert not list(tmp_path.glob("*.gguf"))
    server.files[name] = good
    forget(monkeypatch)
    convert(tmp_path / "there.gguf")


def test_a_config_that_is_not_what_the_hub_lists(server: Hub, tmp_path: Path) -> None:
    server.digest("config.json")
    server.files["config.json"] = server.files["config.json"].replace(b"64", b"32", 1)
    with pytest.raises(ChecksumError, match="digest"):
        convert(tmp_path / "there.gguf")


def test_what_came_before_an_error_is_used_again(
    small_chunks: int, server: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aprfmt.convert_model(folder, tmp_path / "here.gguf")
    second = "model-00002-of-00002"
    error = broken(
        lambda r: Answer(403) if second in r.path and r.span and r.span[0] >= 3 * small_chunks else None,
        server,
        tmp_path,
    )
    assert isinstance(error, StorageError)
    kept = on_disk(tmp_path)
    assert kept > 2 * small_chunks
    forget(monkeypatch)
    server.fault = lambda request: None
    del server.requests[:]
    assert convert(tmp_path / "there.gguf") == (tmp_path / "here.gguf").read_bytes()
    assert remote_file.traffic.reused_bytes >= 3 * small_chunks
    spans = [request.span for request in server.of_files() if is_shard(request)]
    assert sum(span is not None and span[1] - span[0] <= small_chunks for span in spans) <= 24 - 3


def test_a_part_of_a_chunk_is_gone_on_with(server: Hub, tmp_path: Path) -> None:
    data = random.Random(3).randbytes(300_000)
    calls: list[tuple[int, int]] = []

    def fetch(start: int, end: int) -> Iterator[bytes]:
        calls.append((start, end))
        yield data[start:end]

    file = remote_file.RemoteFile("x", "hf://org/name/x", len(data), hashlib.sha256(data).hexdigest(), fetch)
    place = tmp_path / "chunks" / file.digest
    place.mkdir(parents=True)
    (place / "00000.part").write_bytes(data[:100_000])
    store = chunks.Store(tmp_path / "chunks", 64 * MIB)
    store.adopt([file])
    out = bytearray(50)
    store.read(file, 200_000, memoryview(out))
    store.verify(file)
    store.close()
    assert (bytes(out), calls) == (data[200_000:200_050], [(100_000, 300_000)])


def test_a_store_removes_chunks_and_nothing_else(tmp_path: Path) -> None:
    digest, place = "ab" * 20, tmp_path / "chunks"
    old = [place / digest / name for name in ("00000", "00012.part")]
    others = [
        place / "notes" / "00000", place / digest / "thesis.txt", place / digest / "0.part", place / "00000",
        tmp_path / "elsewhere" / "00000", place / ("cd" * 20) / "00000" / "deep",
    ]  # fmt: skip
    for path in (*old, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (place / ("ef" * 20)).symlink_to(tmp_path / "elsewhere")
    chunks.Store(place, 64 * MIB).adopt([])
    assert [path.exists() for path in old] == [False, False]
    assert all(path.exists() for path in others)


def test_old_chunks_are_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "models--org--name"
    paths = [root / "chunks" / ("ab" * 20), root / "chunks" / "notes", root / "chunks-of-mine" / ("ab" * 20)]
    for path in paths:
        path.mkdir(parents=True)
    remote.remove_old(tmp_path, time.time() + 60)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_store_belongs_to_one_user(tmp_path: Path) -> None:
    place = tmp_path / "chunks"
    place.mkdir()
    place.chmod(0o777)
    chunks.Store(place, 64 * MIB).close()
    assert place.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_process_fetched_for_itself_is_removed(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from aprfmt.io.chunks import Store
        first, second = (Store(Path(sys.argv[1]), 64 << 20) for _ in range(2))
        (second.folder / "00000").write_bytes(b"x")
        print(second.folder, flush=True)
        os.kill(os.getpid(), 9)
    """
    words = [sys.executable, "-c", code, str(tmp_path / "chunks")]
    left = Path(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
    assert left.exists()
    chunks.Store(tmp_path / "chunks", 64 * MIB).close()
    assert not left.exists()


def test_two_processes_do_not_share_a_store(tmp_path: Path) -> None:
    first, second = (chunks.Store(tmp_path / "chunks", 64 * MIB) for _ in range(2))
    assert first.folder != second.folder
    for store in (first, second):
        store.close()
    assert not second.folder.exists()


def test_many_readers_in_any_order(small_chunks: int, tmp_path: Path) -> None:
    """Threads read pieces at random of several files in a store that holds a fraction of them."""
    rng = random.Random(11)
    blobs = [rng.randbytes(40 * small_chunks + 77) for _ in range(3)]

    def file_of(number: int, data: bytes) -> remote_file.RemoteFile:
        def fetch(start: int, end: int) -> Iterator[bytes]:
            time.sleep(0.0005)
            yield data[start:end]

        return remote_file.RemoteFile(f"f{number}", f"f{number}", len(data), hashlib.sha256(data).hexdigest(), fetch)

    files = [file_of(number, data) for number, data in enumerate(blobs)]
    store = chunks.Store(tmp_path / "chunks", 4 * small_chunks)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                number = rng.randrange(3)
                start = rng.randrange(len(blobs[number]))
                out = bytearray(min(rng.randrange(1, 3 * small_chunks), len(blobs[number]) - start))
                store.read(files[number], start, memoryview(out))
                if bytes(out) != blobs[number][start : start + len(out)]:
                    wrong.append((number, start))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert store.peak_bytes <= 4 * small_chunks
    for file in files:
        store.verify(file)
    store.close()


def test_what_is_still_to_be_read_stays(small_chunks: int, tmp_path: Path) -> None:
    """Half of a chunk of one file, then all of another that fills the store twice, then the other half."""
    calls: list[str] = []

    def file_of(name: str, n_chunks: int) -> remote_file.RemoteFile:
        data = random.Random(name).randbytes(n_chunks * small_chunks)

        def fetch(start: int, end: int) -> Iterator[bytes]:
            calls.append(name)
            yield data[start:end]

        return remote_file.RemoteFile(name, name, len(data), hashlib.sha256(data).hexdigest(), fetch)

    one, other = file_of("one", 2), file_of("other", 8)
    store = chunks.Store(tmp_path / "chunks", 4 * small_chunks)
    half = memoryview(bytearray(small_chunks // 2))
    store.read(one, 0, half)
    for start in range(0, other.size, small_chunks // 2):
        store.read(other, start, half)
        while other.hashed * small_chunks < start:
            time.sleep(0.001)
    store.read(one, small_chunks // 2, half)
    store.close()
    assert (calls.count("one"), calls.count("other")) == (1, 8)


@pytest.mark.parametrize("when", [0.3, 0.6])
def test_a_kill_and_another_run(when: float, server: Hub, folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / "here.gguf")
    server.fault = on_weights(Answer(pause=0.3))
    environment = {**os.environ, "HF_ENDPOINT": server.address}
    words = [sys.executable, "-m", "aprfmt", "convert", "hf://org/name", "-o", str(tmp_path / "there.gguf"), "--json"]
    child = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(is_shard(request) for request in server.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(when)
    child.send_signal(signal.SIGKILL)
    child.wait()
    server.fault = lambda request: None
    subprocess.run([*words, "--force"], env=environment, check=True, capture_output=True)
    assert (tmp_path / "there.gguf").read_bytes() == (tmp_path / "here.gguf").read_bytes()


def test_an_interrupt_does_not_wait_for_the_server(server: Hub, tmp_path: Path) -> None:
    server.fault = on_weights(Answer(pause=30.0))
    environment = {**os.environ, "HF_ENDPOINT": server.address, "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    words = [sys.executable, "-m", "aprfmt", "convert", "hf://org/name", "-o", str(tmp_path / "there.gguf")]
    child = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(map(server.fault, server.requests)) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=20)
    assert (child.returncode, "no partial output" in said) == (130, True)
    assert not (tmp_path / "there.gguf").exists()


def test_a_gguf_for_programs_that_read_by_themselves(server: Hub, folder: Path) -> None:
    from aprfmt.running.prepared import prepare

    data = (folder.parents[2] / "tiny.gguf").read_bytes()
    server.files = {"m.Q4_K_M.gguf": data, "m.Q8_0.gguf": b"x" * 70_000}
    found = prepare("org/name:Q4_K_M")
    assert Path(found.path).read_bytes() == data
    with aprfmt.open("org/name:Q4_K_M") as model:
        assert model.path.parts[-4:-2] == ("models--org--name", "snapshots")
    server.requests.clear()
    assert prepare("org/name:Q4_K_M").path == found.path


def test_too_little_room_is_refused(server: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max-disk"):
        convert(tmp_path / "x.gguf", max_disk="1MB")
