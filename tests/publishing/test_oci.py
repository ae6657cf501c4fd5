"""`apr push oci://...` and `apr pull`, with a registry in this process, and with Debian's where it is installed."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_model import build
from registry_server import USER, OciRegistry, serve

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import (
    AprError,
    ChecksumError,
    CorruptError,
    ExistsError,
    NotFoundError,
    RefusedError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from aprfmt.io import registry as client
from aprfmt.io.registry_path import parse_address
from aprfmt.publishing import oci
from aprfmt.publishing.oci_layout import parse_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, with a file in a subfolder, an empty file and one of a byte."""
    root = tmp_path_factory.mktemp("oci")
    build(root / "tiny.gguf")
    aprfmt.export_model(root / "tiny.gguf", root / "model", format="hf")
    (root / "model/additional_chat_templates").mkdir()
    (root / "model/additional_chat_templates/tools.jinja").write_text("{{ messages }}")
    (root / "model/empty.txt").touch()
    (root / "model/one.txt").write_text("1")
    return root / "model"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OciRegistry]:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(client, "_PAUSES_S", (0.0, 0.0))
    with serve() as found:
        yield found


def files_in(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def push(registry: OciRegistry, source: Path, **options: Any) -> oci.OciPushReport:
    return aprfmt.push_oci(source, f"oci://{registry.host}/team/model:1", no_license=True, **options)


def pull(registry: OciRegistry, output: Path, **options: Any) -> oci.PullReport:
    return aprfmt.pull(f"oci://{registry.host}/team/model:1", output, **options)


def test_a_folder_comes_back(registry: OciRegistry, folder: Path, tmp_path: Path) -> None:
    report = push(registry, folder)
    assert sorted(report.uploaded) == sorted(files_in(folder))
    found = pull(registry, tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(folder)
    assert found.digest == report.digest
    assert not [*(tmp_path / "cache/oci").rglob("*.*")]
    again = push(registry, folder)
    assert (again.uploaded, again.digest) == ([], report.digest)
    with pytest.raises(ExistsError):
        pull(registry, tmp_path / "out")


def test_the_manifest_is_one_of_model_pack_and_of_oras(registry: OciRegistry, folder: Path) -> None:
    push(registry, folder)
    manifest = json.loads(registry.manifests["team/model", "1"])
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    types = {row["annotations"]["org.cncf.model.filepath"]: row["mediaType"] for row in manifest["layers"]}
    assert types["model.safetensors"] == "application/vnd.cncf.model.weight.v1.raw"
    assert types["config.json"] == types["empty.txt"] == "application/vnd.cncf.model.weight.config.v1.raw"
    assert types["README.md"] == "application/vnd.cncf.model.doc.v1.raw"
    for row in manifest["layers"]:
        assert row["annotations"]["org.opencontainers.image.title"] == row["annotations"]["org.cncf.model.filepath"]
        assert row["size"] == len(registry.blobs[row["digest"]])
    config = json.loads(registry.blobs[manifest["config"]["digest"]])
    assert set(config) == {"descriptor", "config", "modelfs"}
    assert config["config"]["format"] == "safetensors"
    assert config["modelfs"] == {"type": "layers", "diffIds": [row["digest"] for row in manifest["layers"]]}


def test_the_docker_layout(registry: OciRegistry, folder: Path, tmp_path: Path) -> None:
    push(registry, folder.parent / "tiny.gguf", layout="docker")
    manifest = json.loads(registry.manifests["team/model", "1"])
    assert manifest["config"]["mediaType"] == "application/vnd.docker.ai.model.config.v0.1+json"
    assert [row["mediaType"] for row in manifest["layers"]] == ["application/vnd.docker.ai.gguf.v3"]
    config = json.loads(registry.blobs[manifest["config"]["digest"]])
    assert config["config"]["format"] == "gguf"
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    with pytest.raises(RefusedError, match="the docker layout has no type for"):
        push(registry, folder, layout="docker")
    for row in manifest["layers"]:
        del row["annotations"]  # as docker model package writes them
    layers = parse_manifest(json.dumps(manifest | {"layers": manifest["layers"] * 2}).encode(), "m", allow_names=False)
    assert [layer.name for layer in layers] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    registry.manifests["team/model", "1"] = json.dumps(manifest).encode()
    pull(registry, tmp_path / "out")
    assert (tmp_path / "out/model.gguf").read_bytes() == (folder.parent / "tiny.gguf").read_bytes()


def test_uploads_and_downloads_continue(
    registry: OciRegistry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CHUNK_BYTES", 1 << 15)
    gguf = folder.parent / "tiny.gguf"
    size = gguf.stat().st_size
    assert size > 3 << 15
    registry.cut = 1000
    push(registry, gguf)
    assert registry.count("PATCH") == 1 + -(-(size - 1000) // (1 << 15))
    assert len(registry.blobs) == 2
    registry.blobs.clear()
    sent: list[int] = []

    def die(n_bytes: int, label: str) -> None:
        sent.append(n_bytes)
        if sum(sent) > 2 << 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push(registry, gguf, progress=lambda total: die if sent or total != size else lambda n, label: sent.append(0))
    before = registry.count("PATCH")
    push(registry, gguf)
    assert 0 < registry.count("PATCH") - before < -(-size // (1 << 15))
    registry.cut = 5000
    assert pull(registry, tmp_path / "out").reused_bytes == 0
    assert (tmp_path / "out/tiny.gguf").read_bytes() == gguf.read_bytes()


def test_a_download_continues_in_another_process(registry: OciRegistry, folder: Path, tmp_path: Path) -> None:
    push(registry, folder)
    gone = max(registry.blobs, key=lambda digest: len(registry.blobs[digest]))
    data = registry.blobs.pop(gone)
    with pytest.raises(NotFoundError):
        pull(registry, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    registry.blobs[gone] = data
    requests = len(registry.requests)
    kept = [path for path in (tmp_path / "cache/oci/blobs").iterdir() if path.stat().st_size]
    kept[0].write_bytes(b"tampered with")
    found = pull(registry, tmp_path / "out")
    assert found.reused_bytes > 0
    assert len(registry.requests) - requests < len(found.files)
    assert files_in(tmp_path / "out") == files_in(folder)


def test_a_disk_that_fills_during_a_download(
    registry: OciRegistry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(registry, folder)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        pull(registry, tmp_path / "out")
    assert str(tmp_path / "cache") in str(caught.value.path)
    assert caught.value.hint == "free some space, or set APR_CACHE to a folder on another disk"


def test_every_digest_is_compared(registry: OciRegistry, folder: Path, tmp_path: Path) -> None:
    report = push(registry, folder)
    registry.lies = True
    with pytest.raises(ChecksumError, match="differs from the file on the registry"):
        pull(registry, tmp_path / "out")
    registry.lies = False
    name = f"oci://{registry.host}/team/model@{report.digest}"
    manifest = registry.manifests["team/model", report.digest]
    registry.manifests["team/model", report.digest] = manifest + b" "
    with pytest.raises(ChecksumError, match="manifest differs from its digest"):
        aprfmt.pull(name, tmp_path / "out")
    registry.manifests["team/model", report.digest] = manifest
    aprfmt.pull(name, tmp_path / "out")


def test_login(registry: OciRegistry, folder: Path, tmp_path: Path) -> None:
    registry.needs_login = True
    with pytest.raises(RefusedError, match="refuses access") as caught:
        push(registry, folder)
    assert f"docker login {registry.host}" in str(caught.value.hint)
    auths = {registry.host: {"auth": base64.b64encode(USER.encode()).decode()}}
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": auths}))
    push(registry, folder)
    pull(registry, tmp_path / "out")


def _manifest(**layer: object) -> bytes:
    row = {"mediaType": "application/octet-stream", "digest": "sha256:" + "0" * 64, "size": 0, **layer}
    return json.dumps({"schemaVersion": 2, "layers": [row]}).encode()


TITLE = "org.opencontainers.image.title"
HOSTILE: dict[str, tuple[bytes, type[AprError], str]] = {
    "no JSON": (b"<html>", CorruptError, "JSON"),
    "no object": (b"[]", CorruptError, "not a manifest"),
    "an index": (b'{"schemaVersion": 2, "manifests": []}', UnsupportedError, "index of several"),
    "no layers": (b'{"schemaVersion": 2, "layers": []}', RefusedError, "contains no files"),
    "a name out of the folder": (_manifest(annotations={TITLE: "../x"}), RefusedError, "would write"),
    "an absolute name": (_manifest(annotations={TITLE: "/etc/x"}), RefusedError, "would write"),
    "a name that git acts on": (_manifest(annotations={TITLE: ".git/config"}), RefusedError, "would write"),
    "a negative size": (_manifest(size=-1, annotations={TITLE: "x"}), CorruptError, "not a manifest"),
    "another digest": (_manifest(digest="md5:0", annotations={TITLE: "x"}), CorruptError, "not a manifest"),
    "a container image": (_manifest(mediaType="application/vnd.oci.image.layer.v1.tar"), UnsupportedError, "no file"),
    "an archive": (
        _manifest(mediaType="application/vnd.cncf.model.weight.v1.tar+gzip", annotations={TITLE: "x"}),
        UnsupportedError,
        "is packed as",
    ),
    "a folder of oras": (
        _manifest(
            mediaType="application/vnd.oci.image.layer.v1.tar",
            annotations={TITLE: "x", "io.deis.oras.content.unpack": "true"},
        ),
        UnsupportedError,
        "is packed as",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(registry: OciRegistry, tmp_path: Path, name: str) -> None:
    data, kind, words = HOSTILE[name]
    registry.manifests["team/model", "1"] = data
    with pytest.raises(kind, match=words):
        pull(registry, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_oras_push_is_one_of_a_model(registry: OciRegistry, tmp_path: Path) -> None:
    registry.blobs[digest := f"sha256:{hashlib.sha256(b'x').hexdigest()}"] = b"x"
    registry.manifests["team/model", "1"] = _manifest(
        mediaType="application/vnd.oci.image.layer.v1.tar", digest=digest, size=1, annotations={TITLE: "a.gguf"}
    )
    pull(registry, tmp_path / "out")
    assert (tmp_path / "out/a.gguf").read_bytes() == b"x"


def test_plan_license_and_addresses(
    registry: OciRegistry, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place = f"oci://{registry.host}/team/model:1"
    assert run(["push", str(folder), place, "--plan", "--no-license", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"].startswith("sha256:")
    assert not registry.requests
    assert run(["push", str(folder), place, "--private"]) == 2
    assert run(["push", str(folder), "org/name", "--layout", "docker"]) == 2
    for text in ("oci://", "oci://host", "oci://host/Name", "oci://host/../x", "hf://a/b", "oci://h/n@sha256:12"):
        with pytest.raises(UsageError):
            parse_address(text)
    assert parse_address("oci://host/a/b@sha256:" + "1" * 64).reference == "sha256:" + "1" * 64
    assert parse_address("oci://host:1/a").url == "https://host:1/v2/a"
    with pytest.raises(NotFoundError, match="not in the registry: MANIFEST_UNKNOWN"):
        pull(registry, tmp_path / "none")
    assert run(["inspect", place]) == 3
    assert f"apr pull {place} -o FOLDER" in capsys.readouterr().err
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        pauses: list[float] = []
        monkeypatch.setattr(client, "_PAUSES_S", (0.1, 60.0))
        monkeypatch.setattr("aprfmt.io.registry.time.sleep", pauses.append)
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            aprfmt.pull(f"oci://127.0.0.1:{closed.getsockname()[1]}/a/b", tmp_path / "none")
    assert (pauses, caught.value.hint) == ([0.1], "check the address and the network")
    assert not (tmp_path / "none").exists()


# --- the registry of Debian, and the package oras, where they are installed ---


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a docker-registry that runs for the test."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "registry.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\nhttp: {{addr: '{host}'}}\n"
    )
    with subprocess.Popen(
        [program, "serve", str(tmp_path / "registry.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            address = host.split(":")
            for _ in range(200):
                with socket.socket() as probe:
                    if not probe.connect_ex((address[0], int(address[1]))):
                        break
                time.sleep(0.05)
            yield host
        finally:
            process.kill()


def test_the_registry_of_debian(debian: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CHUNK_BYTES", 1 << 16)
    report = aprfmt.push_oci(folder, f"oci://{debian}/team/model:1", no_license=True)
    found = aprfmt.pull(f"oci://{debian}/team/model@{report.digest}", tmp_path / "out")
    assert found.digest == report.digest
    assert files_in(tmp_path / "out") == files_in(folder)


def test_oras_pulls_what_we_push_and_we_what_it_pushes(
    debian: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oras = pytest.importorskip("oras.client")
    theirs = oras.OrasClient(hostname=debian, insecure=True)
    aprfmt.push_oci(folder, f"oci://{debian}/team/model:1", no_license=True)
    theirs.pull(target=f"{debian}/team/model:1", outdir=str(tmp_path / "theirs"))
    assert files_in(tmp_path / "theirs") == files_in(folder)
    monkeypatch.chdir(folder)
    theirs.push(target=f"{debian}/oras/model:1", files=[name for name in os.listdir(folder) if Path(name).is_file()])
    aprfmt.pull(f"oci://{debian}/oras/model:1", tmp_path / "ours")
    assert files_in(tmp_path / "ours") == {n: data for n, data in files_in(folder).items() if "/" not in n}
