"""Processes of ours: what they may import, and what becomes of one that dies, hangs or says too much."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from aprfmt.errors import StorageError
from aprfmt.io import child
from aprfmt.io.child import Child, ChildDiedError, Service

OWN = str(Path(child.__file__).parents[2])
ECHO = """
import os, sys, time
from aprfmt.io.serving import serve
def answer(request):
    if request == "hang":
        time.sleep(60)
    if request == "spin":
        while True: pass
    if str(request).strip() == "work":
        end = time.process_time() + 0.5
        while time.process_time() < end: pass
    if request == "fill":
        return bytes(1 << 40)
    if request == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if request == "long":
        return {"ok": "x" * 5000}
    return {"ok": [request, os.getpid()]}
serve(answer)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    return "echo_child"


def test_the_current_folder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    places = ["", ".", "other", str(tmp_path), str(link), str(tmp_path / "other"), OWN]
    monkeypatch.setattr(sys, "path", places)
    assert child.search_path() == [str(tmp_path / "other"), OWN]
    monkeypatch.chdir(OWN)
    assert child.search_path()[-1] == OWN


def test_a_child_and_its_own_children_search_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}:.")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    show = "import json, os, sys; print(json.dumps([sys.path, os.getcwd()]))"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}], check=True)"
    for code in (show, inner):
        text = child.run(["-c", code], 60)
        assert text is not None
        assert str(tmp_path) not in text
        assert '""' not in text
    assert child.run(["-c", "raise SystemExit(1)"], 60) is None


def test_a_service_answers_and_starts_again(module: str) -> None:
    service = Service(module, seconds=1, memory=1 << 28, most_bytes=4096)
    first = service.ask("a")["ok"]
    assert service.ask("b")["ok"] == ["b", first[1]]  # type: ignore[index]
    for request, how in {"spin": "late", "fill": "full", "long": "full", "die": ""}.items():
        with pytest.raises(ChildDiedError) as caught:
            service.ask(request)
        assert [name for name in ("late", "full") if getattr(caught.value, name)] == ([how] if how else [])
        assert service.ask("again")["ok"][0] == "again"  # type: ignore[index]
    assert "last words" in child.last_line(caught.value.log)
    service.close()
    assert service.child is None


def test_processor_time_grows_with_the_request(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_SLACK", 300)  # the clock ends nothing
    service = Service(module, seconds=0.25, memory=1 << 28, most_bytes=4096, byte_seconds=0.005)
    with pytest.raises(ChildDiedError) as caught:
        service.ask("work")
    assert caught.value.late
    assert service.ask("work" + " " * 200)["ok"]
    service.close()


def test_the_clock_ends_what_only_waits(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_SLACK", 1)
    service = Service(module, seconds=1, memory=1 << 28, most_bytes=4096)
    service.ask("a")
    begin = time.monotonic()
    with pytest.raises(ChildDiedError, match="without a response") as caught:
        service.ask("hang")
    assert caught.value.late
    assert time.monotonic() - begin < 30


def test_an_interrupt_ends_the_child(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(module, seconds=10, memory=1 << 28, most_bytes=4096)
    number = service.ask("a")["ok"][1]  # type: ignore[index]

    def interrupted(self: Child, seconds: float) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Child, "_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            service.ask("b")
    assert service.ask("c")["ok"] != ["c", number]
    service.close()


def test_no_thread_keeps_the_process(module: str) -> None:
    before = {*threading.enumerate()}
    service = Service(module, seconds=10, memory=1 << 28, most_bytes=4096)
    service.ask("a")
    assert all(thread.daemon for thread in threading.enumerate() if thread not in before)
    service.close()


def test_a_python_that_is_gone(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", os.devnull)
    with pytest.raises(StorageError, match="cannot start"):
        Service(module, seconds=1, memory=1 << 28, most_bytes=4096).ask("a")
