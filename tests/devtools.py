"""Chromium driven by its DevTools protocol, over a pipe: what a page does when keys and the mouse are used."""

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM

OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "z": 90}
PATIENCE = 60.0


class Browser:
    """A browser with one tab, or several.

    Attributes:
        complaints: errors and warnings of the console, exceptions, and what a policy blocked, of all tabs.
    """

    def __init__(self, profile: Path) -> None:
        ends, self._write = os.pipe()
        self._read, others = os.pipe()
        # Beyond the two that the browser reads and writes, so that neither is overwritten by the other.
        reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (ends, others))
        command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}"]
        connected = ["bash", "-c", f'exec "$0" "$@" 3<&{reads} 4>&{writes}', *command]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(connected, pass_fds=(reads, writes), stdout=quiet, stderr=quiet)
        for end in (ends, others, reads, writes):
            os.close(end)
        self._held, self._number = b"", 0
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []

    def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        """The answer to a request of the protocol."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self._next(end)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
        raise TimeoutError(method)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            self._held += os.read(self._read, 2**20)
        line, _, self._held = self._held.partition(b"\0")
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        if message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([argument.get("value") for argument in params["args"]]))

    def tab(self, address: str, width: int = 1280, height: int = 900) -> "Tab":
        """A new tab at an address."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", session, **size)
        tab = Tab(self, session)
        self.ask("Page.navigate", session, url=address)
        return tab

    def downloads(self, folder: Path) -> None:
        self.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)


class Tab:
    """A page in a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def do(self, script: str) -> Any:
        """What an expression of JavaScript gives, awaited."""
        answer = self.browser.ask(
            "Runtime.evaluate", self.session, expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + PATIENCE
        while not self.do(f"!!({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition}: {self.do('document.body.innerText')[:800]}")
            time.sleep(0.02)

    def press(self, key: str, times: int = 1, **held: bool) -> None:
        """Press a key as a person does, several times; `ctrl=True` or `shift=True` hold another one."""
        modifiers = 2 * held.get("ctrl", False) + 8 * held.get("shift", False)
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for _ in range(times):
            pressed = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
            kind = "keyDown" if text else "rawKeyDown"
            self.browser.ask("Input.dispatchKeyEvent", self.session, type=kind, text=text, **pressed)
            self.browser.ask("Input.dispatchKeyEvent", self.session, type="keyUp", **pressed)

    def drag(self, start: str, end: str) -> None:
        """Drag the mouse from one element to another."""
        middle = "(({x, y, width, height}) => [x + width / 2, y + height / 2])(document.querySelector('%s')%s)"
        self.do(f"document.querySelector({start!r}).scrollIntoView({{block: 'center'}})")
        points = [self.do(middle % (place, ".getBoundingClientRect()")) for place in (start, end)]
        for kind, (x, y) in zip(("mousePressed", "mouseMoved", "mouseReleased"), (points[0], points[1], points[1]),
                                strict=True):  # fmt: skip
            self.browser.ask(
                "Input.dispatchMouseEvent", self.session, type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
            )

    def picture(self, path: Path) -> None:
        data = self.browser.ask("Page.captureScreenshot", self.session, format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(data["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
