"""A headless Chromium that is told what to do over a pipe (the DevTools protocol), with nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "--force-color-profile=srgb", "--no-pings",
)  # fmt: skip
SECONDS = 30.0
TRAMPOLINE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium listens at 3 and answers at 4."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """(reads, writes), both above 4, so that neither is overwritten on the way."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high  # type: ignore[return-value]


class PageError(AssertionError):
    """The page did not do what was waited for, or a script of it failed."""


class Chromium:
    """One browser with one tab. `requests` are the addresses that it asked for, `problems` what its console complained of."""

    def __init__(self, path: str, profile: Path, width: int = 1440, height: int = 900) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        to_read, self._to = _pipe()
        self._from, to_write = _pipe()
        words = [path, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        command = [sys.executable, "-c", TRAMPOLINE, str(to_read), str(to_write), *words]
        self._log = open(profile.parent / "chromium.log", "wb")  # noqa: SIM115 - `close` closes it
        environment = {**os.environ, "HOME": str(profile)}
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=self._log, stderr=self._log, env=environment
        )
        os.close(to_read)
        os.close(to_write)
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank", session=None)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True, session=None)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    # ---- the protocol ------------------------------------------------------------------------------------------------

    def call(self, method: str, session: str | None = "", **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = queue.Queue()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        try:
            answer = self._answers[number].get(timeout=SECONDS)
        except queue.Empty:
            raise PageError(f"Chromium did not answer {method} within {SECONDS:g} s.") from None
        finally:
            self._answers.pop(number, None)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def _listen(self) -> None:
        waiting = b""
        while block := os.read(self._from, 1 << 16):
            *messages, waiting = (waiting + block).split(b"\0")
            for message in messages:
                self._hear(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        if "id" in message and message["id"] in self._answers:
            self._answers[message["id"]].put(message)
        method, facts = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.problems.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")

    # ---- what a person does ------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> Any:
        """Wait for an expression to be true, and return its value."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                # A null, so far.
                value = self.run(f"(() => {{ try {{ return {script}; }} catch {{ return false; }} }})()")
            except PageError as error:  # a page that is just being loaded again has not done it yet
                if "navigated" not in str(error):
                    raise
                value = None
            if value not in (None, False, 0, ""):  # an element is {} here
                return value
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText.slice(0, 1500)")
                raise PageError(f"Waited {seconds:g} s for {script}. Problems: {self.problems}. The page says:\n{text}")
            time.sleep(0.03)

    def press(self, key: str) -> None:
        """One key, such as "j", "Enter" or "/"."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39}.get(
            key, 0
        )
        facts = {"key": key, "windowsVirtualKeyCode": code or ord(key.upper()[0])}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """In the middle of an element, where it is."""
        place = self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null; "
            "e.scrollIntoView({block: 'nearest', inline: 'nearest'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def dark(self, is_dark: bool) -> None:
        """What the system prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        content = self.call("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))

    def close(self) -> None:
        try:
            self.call("Browser.close", session=None)
            self._process.wait(timeout=10)
        except (PageError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        self._log.close()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
