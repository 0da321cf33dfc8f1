"""A headless Chromium, driven over the pipe of its DevTools protocol: no driver program and no package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--proxy-server=127.0.0.1:9",  # what the browser itself wants to tell its makers ends there; loopback is direct
    "--no-sandbox",  # it cannot be used as root, and the pages are ours
)


class Browser:
    """One page. `requests` are the addresses of everything that it asked for, `problems` its errors and warnings."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer, self._number = read, write, b"", 0
        self._session = ""
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(120)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params"))
        return message

    def _note(self, method: str, facts: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(facts["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.problems.append(json.dumps(facts["args"])[:2000])
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(facts["entry"])[:2000])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        parameters = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self._call("Runtime.evaluate", expression=script, **parameters)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            message = self.run("document.getElementById('message')?.textContent")
            assert time.monotonic() < deadline, f"not within {seconds} s: {condition}; {message}; {self.problems}"
            time.sleep(0.05)

    def key(self, name: str, code: int, modifiers: int = 0) -> None:
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        about = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def drag(self, *places: tuple[float, float]) -> None:
        """With the left button, from place to place in the window."""
        kinds = ["mousePressed", *["mouseMoved"] * (len(places) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*places, places[-1]], strict=True):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def window(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, *, whole: bool = False) -> None:
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def downloads(self, folder: Path) -> None:
        self._call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """profile: a new directory."""
    assert PROGRAM is not None
    to_read, to_write = os.pipe(), os.pipe()

    def numbered() -> None:  # it reads commands from 3 and answers on 4
        commands, answers = os.dup(to_read[0]), os.dup(to_write[1])
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}"]
    with open(os.devnull, "wb") as nothing:
        process = subprocess.Popen(
            command, preexec_fn=numbered, close_fds=False, stdout=nothing, stderr=nothing, start_new_session=True
        )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Browser(to_write[0], to_read[1])
    finally:
        os.close(to_read[1])  # it ends with its pipe
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_write[0])
