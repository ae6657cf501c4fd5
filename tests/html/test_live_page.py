"""`apr report RUN --live`: a page that follows a run, for this machine alone, until the run ends."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import browser
import pytest
import sample_pages
from pages import Page

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.errors import RefusedError, StorageError, UsageError
from aprfmt.inspection import live
from aprfmt.inspection.run_report import FILE, METADATA

SOON = 30.0


class RunningRun:
    """A run's folder, locked as the trainer locks it; `write` adds steps, `end` ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, 0
        folder.mkdir()
        self._lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.write(3)

    def write(self, steps: int) -> None:
        """Logs `steps` more steps."""
        with (self.folder / FILE).open("a") as file:
            for _ in range(steps):
                self.steps += 1
                event = {
                    "event": "step",
                    "step": self.steps,
                    "tokens": 10 * self.steps,
                    "loss": 1 / self.steps,
                    "ce": 2.0,
                }
                file.write(json.dumps(event) + "\n")

    def end(self, status: str = "done") -> None:
        """Ends the run, as its process does."""
        (self.folder / METADATA).write_text(json.dumps({"status": status}))
        os.close(self._lock)


@pytest.fixture
def running(tmp_path: Path) -> RunningRun:
    return RunningRun(tmp_path / "run")


def serve(running: RunningRun, **options: Any) -> tuple[str, Future[dict[str, object]]]:
    """The address of the live page, and the report that follows."""
    said: Future[str] = Future()
    done: Future[dict[str, object]] = Future()

    def work() -> None:
        try:
            done.set_result(aprfmt.report(running.folder, live=True, log=said.set_result, **options))
        except BaseException as error:
            said.cancel()
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return said.result(SOON).split()[0], done


def get(address: str, path: str = "/", **headers: str) -> tuple[int, str, dict[str, str]]:
    host = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=SOON)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.headers)


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_page_is_for_this_machine_and_ends_with_the_run(running: RunningRun) -> None:
    address, done = serve(running)
    assert address.startswith("http://127.0.0.1:")
    status, text, headers = get(address)
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "Cross entropy" in Page(text).titles
    status, _, headers = get(address, "/parts")
    assert (status, headers["X-Run-State"], headers["Cache-Control"]) == (200, "running", "no-store")
    assert get(address, "/parts", **{"If-None-Match": headers["ETag"]})[0] == 304
    running.write(4)
    wait_for(lambda: get(address, "/parts")[2]["ETag"] != headers["ETag"])
    assert get(address, "/../../etc/passwd")[:2] == (404, "")
    for host in ("evil.example", "127.0.0.1", "evil.example:80"):
        assert get(address, Host=host)[0] == 403, "a name that was made to point here"
    running.end()
    wait_for(lambda: get(address, "/parts")[2]["X-Run-State"] == "ended")
    report = done.result(SOON)
    assert (report["steps"], report["status"]) == (7, "done")
    with pytest.raises(OSError, match="refused"):
        get(address)


def test_a_killed_run_ends_the_page_without_a_browser(running: RunningRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LAST_S", 0.1)
    _, done = serve(running)
    os.close(running._lock)
    assert done.result(SOON)["steps"] == 3


def test_ctrl_c_ends_it_and_what_cannot_be_served_is_refused(
    running: RunningRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(UsageError, match="live serves"):
        aprfmt.report(running.folder, tmp_path / "p.html", live=True)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupted)
        assert apr(["report", str(running.folder), "--live"]) == 0
    said = capsys.readouterr()
    assert "http://127.0.0.1:" in said.err
    assert "steps" in said.out
    address, done = serve(running)
    with pytest.raises(StorageError, match="cannot listen on port"):
        aprfmt.report(running.folder, live=True, port=int(address.rstrip("/").rpartition(":")[2]))
    running.end()
    get(address, "/parts")
    done.result(SOON)
    with pytest.raises(RefusedError, match="is not active"):
        aprfmt.report(running.folder, live=True)
    assert apr(["report", str(running.folder), "--port", "80"]) == 2


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    if browser.PROGRAM is None:
        pytest.skip("needs Chromium, as Debian's chromium-headless-shell")
    with browser.browser() as found:
        yield found


def test_a_browser_follows_the_run(chromium: browser.Browser, running: RunningRun) -> None:
    address, done = serve(running)
    chromium.open(address, width=900)
    tile = "$all('.tile').find(e => e.textContent.startsWith('steps')).querySelector('b').textContent"
    notice = "document.querySelector('.live').textContent"
    wait_for(lambda: chromium.run(notice).startswith("Live"))
    assert chromium.run(tile) == "3"
    chromium.run("window.kept = true")
    running.write(20)
    wait_for(lambda: chromium.run(tile) == "23")
    assert chromium.run("window.kept"), "the page was not loaded again"
    chromium.run("document.querySelector('figure[data-chart] svg').focus()")
    chromium.press("End")
    assert chromium.run("document.querySelector('figure[data-chart] output').textContent") != ""
    running.end()
    wait_for(lambda: "final" in chromium.run(notice))
    assert done.result(SOON)["steps"] == 23
    assert {url.partition("/parts")[0].rstrip("/") for url in chromium.asked} == {address.rstrip("/")}
    assert chromium.complaints == []


def test_several_runs_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sample_pages.write_run(tmp_path / name / "run")
    log = tmp_path / "b" / "run" / FILE
    log.write_text(log.read_text().replace('"lr": 0.0003, "steps"', '"lr": 0.001, "steps"'))
    runs = [str(tmp_path / name / "run") for name in ("a", "b")]
    assert apr(["report", *runs, "-o", str(tmp_path / "both.html")]) == 0
    assert f"wrote            {tmp_path / 'both.html'}" in capsys.readouterr().out
    page = Page((tmp_path / "both.html").read_text())
    assert [s["n"] for s in page.charts["Held-out KL to the teacher"]["s"]] == ["a/run", "b/run"]
    assert page.text.rpartition("Options that differ")[2].split()[:6] == [
        "option",
        "a/run",
        "b/run",
        "lr",
        "0.0003",
        "0.001",
    ]
    assert apr(["report", *runs, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    with pytest.raises(UsageError, match="9 runs"):
        aprfmt.report([runs[0]] * 9)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert apr(["report", runs[0], str(tmp_path / "m.gguf"), "-o", str(tmp_path / "no.html")]) == 2
    assert "only runs can be compared" in capsys.readouterr().err


def test_samples_are_shown_as_text(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    events = [
        {
            "event": "samples",
            "step": n,
            "samples": [{"prompt": "p<b>", "text": f"said {n} " + "x" * 5000}, 7, {"text": 1}],
        }
        for n in range(50)
    ]
    (folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    aprfmt.report(folder, tmp_path / "p.html")
    text = Page((tmp_path / "p.html").read_text()).text
    assert "p<b>" in text
    assert text.index("said 49") < text.index("39 earlier") < text.index("said 48")
    assert "said 9 " not in text
    assert len(text) < 60_000
