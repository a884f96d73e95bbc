"""A real browser for tests: Chromium, driven over a pipe by its DevTools protocol.

Console messages, exceptions and network requests are collected: a report must cause none of them.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-extensions", "--hide-scrollbars", "--no-default-browser-check", "--remote-debugging-pipe",
)  # fmt: skip
ANSWER_S = 200


def find_browser() -> str:
    """Path of the browser; skips the test, with a note on what to install, if there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium (as root, `make test` does it)")
    return found


class Page:
    """One tab."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process, self._to, self._from = process, to_browser, from_browser
        self._number = 0
        self._rest = b""
        self.problems: list[str] = []
        """Console errors and warnings, exceptions, security violations."""
        self.requests: list[str] = []
        """URLs of all requests, including the page itself but not data: URLs."""
        self._loaded = False
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Opens a page and waits until it has loaded."""
        self._loaded = False
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self._wait(lambda: self._loaded)
        self.settle()

    def resize(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.settle()

    def dark(self, on: bool = True) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; awaits promises."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 200) -> None:
        """Returns when the expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """x, y, width and height of an element, after scrolling it into view."""
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x, b.y, b.width, b.height]; })()"
        )
        return found[0], found[1], found[2], found[3]

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Sends a mouse event; `kind` is mouseMoved, mousePressed or mouseReleased."""
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=int(kind == "mousePressed"), **pressed)

    def click(self, selector: str) -> None:
        x, y, width, height = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x + width / 2, y + height / 2)
        self.settle()

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drags across an element, from one fraction of its width to another."""
        x, y, width, height = self.place(selector)
        middle = y + height / 2
        self.mouse("mouseMoved", x + start * width, middle)
        self.mouse("mousePressed", x + start * width, middle)
        for part in (0.5, 1.0):
            at = x + (start + part * (end - start)) * width
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at, y=middle, button="left", buttons=1)
        self.mouse("mouseReleased", x + end * width, middle)
        self.settle()

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, text=name if len(name) == 1 else "")

    def screenshot(self, path: Path) -> None:
        """A PNG of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def settle(self) -> None:
        """Waits until everything requested so far has been drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        wish: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            wish["sessionId"] = self._session
        os.write(self._to, json.dumps(wish).encode() + b"\0")
        answers: list[dict[str, Any]] = []
        self._wait(lambda: bool(answers), answers)
        assert "error" not in answers[0], (method, answers[0])
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _wait(self, condition: Any, answers: list[dict[str, Any]] | None = None) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not condition():
            while b"\0" not in self._rest:
                ready = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]
                assert ready, "the browser does not answer"
                data = os.read(self._from, 1 << 20)
                assert data, f"the browser has ended: {self._process.poll()}"
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(line)
            if message.get("id") == self._number and answers is not None:
                answers.append(message)
            elif "method" in message:
                self._note(message["method"], message["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(argument.get("value")) for argument in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith("data:"):
            self.requests.append(told["request"]["url"])


@contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """A tab in a fresh browser with an empty profile; the browser writes its files to `folder`."""
    program = find_browser()
    to_browser, from_browser = os.pipe(), os.pipe()
    ours = (to_browser[1], from_browser[0])
    theirs = (to_browser[0], from_browser[1])

    def as_three_and_four() -> None:  # where the browser looks for its pipe
        # Move ours away first: one of them may already be 3 or 4.
        inward, outward = (os.dup2(descriptor, 100 + at) for at, descriptor in enumerate(theirs))
        os.dup2(inward, 3)
        os.dup2(outward, 4)

    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(folder / "browser.log").open("wb"),
        close_fds=False, preexec_fn=as_three_and_four, start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    for descriptor in theirs:
        os.close(descriptor)
    try:
        yield Page(process, *ours)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        for descriptor in ours:
            os.close(descriptor)
