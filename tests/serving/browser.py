"""A headless Chromium, led through its DevTools protocol over two pipes: messages are JSON, ended by a zero byte."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
"""Seconds within which the browser must answer."""

KEYS = {"Tab": 9, "Enter": 13}
"""Codes of keys."""

OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
)


class Browser:
    """A browser of its own.

    Args:
        program: path of Chromium.
        folder: for its profile and what it prints.
    """

    def __init__(self, program: str, folder: Path) -> None:
        given, self._given = os.pipe()
        self._told, told = os.pipe()
        # It reads from descriptor 3 and writes to 4, where nothing else may be.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (given, told)]
        places = [(os.POSIX_SPAWN_DUP2, end, place) for end, place in zip(ends, (3, 4), strict=True)]
        log = str(folder / "log")
        outputs = [(os.POSIX_SPAWN_OPEN, place, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for place in (1, 2)]
        options = [*OPTIONS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._pid = os.posix_spawn(
            program, [program, *options], os.environ | {"HOME": str(folder)}, file_actions=outputs + places, setpgroup=0
        )
        for end in (given, told, *ends):
            os.close(end)
        self._number, self._read = 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Events that come before it are kept. Raises: RuntimeError: it fails."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        os.write(self._given, json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def open(self, url: str) -> Tab:
        """A new tab with a page, which is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", url=url)
        tab.until(lambda: tab.value("document.readyState") == "complete")
        return tab

    def close(self) -> None:
        """End the browser, whatever it does."""
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._given)
        os.close(self._told)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._told], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._told, 2**20) if ready else b""
            if not part:
                raise TimeoutError("Chromium does not answer, or has ended")
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


class Tab:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def value(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, name: str) -> str:
        """The text of the element with this id, empty if it is not shown. A space is a space, breaking or not."""
        element = f"document.getElementById({json.dumps(name)})"
        return self.value(f"{element}?.checkVisibility() ? {element}.innerText : ''").replace("\xa0", " ")

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.value("document.body.innerText")
            time.sleep(0.03)

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, control: bool = False) -> None:
        """Press and release a key, with Control held or not."""
        for kind in ("keyDown", "keyUp"):
            more: dict[str, Any] = {"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}
            more |= {"modifiers": 2} if control else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **more)

    def look(self, width: int, scheme: str = "light") -> None:
        """Show the page in a window of this width, in a light or dark scheme."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    @property
    def errors(self) -> list[str]:
        """Exceptions, and what the console has as errors or warnings."""
        found = []
        for event in self._events("Runtime.exceptionThrown"):
            found.append(str(event["exceptionDetails"]))
        for event in self._events("Runtime.consoleAPICalled"):
            found += [str(event["args"])] if event["type"] in ("error", "warning", "assert") else []
        for event in self._events("Log.entryAdded"):
            found += [event["entry"]["text"]] if event["entry"]["level"] in ("error", "warning") else []
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def _events(self, method: str) -> list[dict[str, Any]]:
        self.value("0")  # what has happened until now has arrived then
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == method
        ]
