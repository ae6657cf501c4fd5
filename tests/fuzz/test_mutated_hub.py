"""Answers of a hub, mutated: its list of files, and the bytes of files, each time or once only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from demo_model import build
from fuzz_values import edit_json
from hub_server import COMMIT, Hub, attach, close_stores, forget

import aprfmt
from aprfmt.errors import AprError
from aprfmt.formats import hub_files
from aprfmt.io.remote_file import RemoteFile

pytest.importorskip("huggingface_hub")

CASES = int(os.environ.get("APR_HUB_ANSWERS", "60"))
"""Mutated answers of each kind; APR_HUB_ANSWERS=3000 takes some minutes."""


class Answers:
    """What a hub says, with faults: `change` mutates the list, `lie` gives the bytes of a file for a request."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.dice = files, Random()
        self.change_list = False
        self.lies = 0.0

    def ask(self, url: str) -> bytes:
        """The list of files."""
        rows = []
        for name, data in self.files.items():
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            row = {"rfilename": name, "size": len(data), "blobId": digest}
            if name.endswith(".safetensors"):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            rows.append(row)
        answer = json.dumps({"sha": COMMIT, "siblings": rows}).encode()
        for _ in range(self.dice.randrange(1, 4) if self.change_list else 0):
            answer = edit_json(answer, self.dice)
        return answer

    def request(self, repo: str, commit: str, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """A part of a file."""
        data = self.files.get(file.name, b"")[start:end]
        if data and self.dice.random() < self.lies:
            at = self.dice.randrange(len(data))
            data = self.dice.choice((data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at], bytes(len(data))))
        yield data


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """A hub in this process that has a model of one file."""
    hub = Hub()
    hub.close()
    attach(hub, tmp_path, monkeypatch)
    build(tmp_path / "tiny.gguf")
    aprfmt.convert_model(tmp_path / "tiny.gguf", tmp_path / "folder", format="hf", dtype="f32")
    found = Answers({path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()})
    monkeypatch.setattr(hub_files, "RETRIES", 0)
    monkeypatch.setattr(hub_files, "ask", found.ask)
    monkeypatch.setattr(hub_files, "_request", found.request)
    yield found
    close_stores()


@pytest.mark.parametrize("kind", ["list", "bytes", "both"])
def test_mutated_answers(kind: str, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AprError, or the output of the right answers; nothing outside of the cache."""
    target = tmp_path / "out.safetensors"
    aprfmt.convert_model("hf://org/name", target)
    right = target.read_bytes()
    before = {path.name for path in tmp_path.iterdir()}
    refused = 0
    for number in range(CASES):
        forget(monkeypatch)
        target.unlink()
        answers.dice = Random(f"{kind} {number}")
        answers.change_list = kind != "bytes"
        answers.lies = 0.0 if kind == "list" else 0.15
        try:
            aprfmt.convert_model("hf://org/name", target)
            assert target.read_bytes() == right, number
        except AprError:
            refused += 1
            target.write_bytes(b"")
        assert {path.name for path in tmp_path.iterdir()} == before, number
    assert 0 < refused < CASES
