"""A browser without a screen, driven over two pipes (the DevTools protocol): what a page logs, asks for, and looks like."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
DEADLINE_S = 100.0
OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",  # descriptors 3 and 4
    "--no-sandbox",  # it shows our own pages only, and may be root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
)


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of it. ``complaints``: what a page has logged as an error, or raised; ``requests``: all that it has asked for."""

    def __init__(self, executable: str, profile: Path) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._buffer, self._number, self._session, self._loaded = b"", 0, "", False
        ours_out, theirs_in = _pipe()
        theirs_out, ours_in = _pipe()
        self._write, self._read = theirs_in, theirs_out
        command = [executable, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        pipes = [(os.POSIX_SPAWN_DUP2, ours_out, 3), (os.POSIX_SPAWN_DUP2, ours_in, 4)]
        self._pid = os.posix_spawn(executable, command, os.environ, file_actions=[*nothing, *pipes], setsid=True)
        os.close(ours_out)
        os.close(ours_in)
        try:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next(one["targetId"] for one in targets if one["type"] == "page")
            self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """With the processes of its pages: it ends them when it is asked to close."""
        pidfd = os.pidfd_open(self._pid)
        with contextlib.suppress(OSError):
            self._session = ""
            self._send("Browser.close")
            select.select([pidfd], [], [], 20.0)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """The window, and what the reader likes."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Returns when its scripts have run."""
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def run(self, expression: str) -> Any:
        """What it comes to, in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = self._send(method, **parameters)
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                found: dict[str, Any] = message["result"]
                return found

    def _send(self, method: str, **parameters: object) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        more = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.complaints.append(str(more["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if more["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(more["args"]))
            case "Log.entryAdded" if more["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(more["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(str(more["request"]["url"]))
            case _:
                pass
        return message


def _pipe() -> tuple[int, int]:
    """Away from the numbers that the browser wants its own to have."""
    found = os.pipe()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in found]
    for fd in found:
        os.close(fd)
    return moved[0], moved[1]
