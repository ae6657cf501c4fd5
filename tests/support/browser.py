"""A headless Chromium that is driven over a pipe: no package, no port. What a page says, asks for, looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    (
        found
        for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars=false", "--no-first-run", "--mute-audio")
_SECONDS = 60.0

CONTRAST = """(() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return c.startsWith("color(srgb")
    ? [...m.slice(0, 3).map(v => 255 * v), m[3] ?? 1] : [m[0], m[1], m[2], m[3] ?? 1]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, words = walk.currentNode.textContent.trim();
    if (!words || e.closest("script,style,title") || !e.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(e), layers = [];
    let through = 1;
    for (let p = e; p; p = p.parentElement) {
      layers.push(parse(getComputedStyle(p).backgroundColor)); through *= +getComputedStyle(p).opacity; }
    const ground = layers.reverse().reduce((low, high) => over(high, low), [...parse(
      getComputedStyle(document.documentElement).getPropertyValue("--page").trim() ? (() => {
        const probe = document.createElement("i"); probe.style.color = "var(--page)"; document.body.append(probe);
        const c = getComputedStyle(probe).color; probe.remove(); return c; })() : "rgb(255,255,255)").slice(0, 3), 1]);
    const ink = parse(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(over([...ink.slice(0, 3), ink[3] * through], ground)), light(ground)];
    found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), words.slice(0, 40)]);
  }
  return found.sort((p, q) => p[0] - q[0])[0];
})()"""
"""The least contrast of any visible text with what lies behind it, and the words."""


class Browser:
    """One page; `asked` are the addresses that it wanted, `complaints` its console messages and exceptions."""

    def __init__(self, to: int, back: int) -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self._to, self._back = to, back
        self._rest = b""
        self._id = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path | str, *, width: int = 1280, dark: bool = False, media: str = "") -> None:
        """Shows a file or an address, as wide as asked for, and waits until it is there."""
        self.asked, self.complaints = [], []
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self._call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        until = time.monotonic() + _SECONDS
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < until, "the page does not end loading"
            time.sleep(0.02)

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression; `$all(SELECTOR)` is a list of elements."""
        code = f"var $all = which => [...document.querySelectorAll(which)];\n{code}"
        found = self._call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """One key, to the element that has the focus."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def write(self, words: str) -> None:
        """Text, into the field that has the focus."""
        self._call("Input.insertText", text=words)

    def picture(self, height: int, scale: float = 1.0) -> bytes:
        """A PNG of the first `height` pixels of the page."""
        clip = {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": height, "scale": scale}
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """The page on A4."""
        printed = self._call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)
        return base64.b64decode(printed["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._id:
                assert "error" not in found, f"{method}: {found['error']}"
                answer: dict[str, Any] = found["result"]
                return answer
            self._hear(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._back, 1 << 20)
            assert piece, "the browser is gone"
            self._rest += piece
        line, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        kind, params = event.get("method"), event.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif kind == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{params['type']}: {params['args']}")
        elif kind == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif kind == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, with a profile that is thrown away."""
    assert PROGRAM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        # The pipe is wherever Chromium looks for it: 3 for what it reads, 4 for what it writes.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.kill()
            process.wait()
