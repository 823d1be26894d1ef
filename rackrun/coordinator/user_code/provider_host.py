"""Runs the provider of racks in a process of its own, so that it cannot stop the coordinator.

The core decides how long a request may take. A release has `RELEASE_S` seconds. If it takes longer, the process is
ended, and everything under way in it has failed. Another process is started for the next request or release, which uses
the same name for the rack.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from rackrun.coordinator.user_code.provider_child import Downward, Hello, Loaded, Released, Upward
from rackrun.coordinator.user_code.user_process import UserProcess, UserProcesses, first_line
from rackrun.errors import UsageError
from rackrun.protocol.commands import ReleaseRack, RequestRack
from rackrun.protocol.events import RackDelivered, RackPreempted, RackRefused

__all__ = ["RELEASE_S", "ProviderHost", "check"]

RELEASE_S = 30.0
_CHILD = "rackrun.coordinator.user_code.provider_child"
_REMEDY = (
    "name a function that gives a provider as MODULE:FUNCTION or MODULE:FUNCTION:ARGS, with the module in this directory or in "
    "PYTHONPATH, or say local; see docs/providers.md."
)

_upward: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Upward)


def check(spec: str) -> float | None:
    """Load the provider once, before anything is started. Return how long it expects a request to take; None: it does
    not say.

    Raises UsageError if it cannot be loaded.
    """
    expected_s = None
    try:
        loaded = msgspec.json.decode(first_line(_CHILD, spec), type=Loaded)
        trouble, expected_s = loaded.trouble, loaded.expected_s
    except OSError as error:
        trouble = str(error)
    except msgspec.MsgspecError:
        trouble = "ends the process in which it is loaded"
    if trouble:
        raise UsageError(f"the provider {spec} {trouble}.", remedy=_REMEDY)
    return expected_s


class ProviderHost:
    """Passes commands to the provider. ``deliver`` receives its events about requests, ``notice`` texts for people."""

    def __init__(
        self,
        spec: str,
        hello: Hello,
        deliver: Callable[[RackDelivered | RackRefused | RackPreempted], None],
        notice: Callable[[str], None],
        *,
        release_s: float = RELEASE_S,
    ) -> None:
        self._spec = spec
        self._hello = hello
        self._deliver = deliver
        self._notice = notice
        self._release_s = release_s
        self._processes = UserProcesses()
        self._known: dict[int, None] = {}  # requests to this process that it has neither refused nor released
        self._left: dict[int, None] = {}  # requests of the whole job that are not released
        self._releasing: dict[int, asyncio.TimerHandle] = {}
        self._late: dict[int, bool] = {}
        """Racks that came while they were being released; whether they are to be released once more."""
        self._all_released = asyncio.Event()

    def start(self) -> None:
        """Start a child that loads the provider."""
        self._processes.reap()
        try:
            self._processes.now = process = UserProcess(_CHILD, self._spec)
        except OSError as error:
            self._over(f"cannot be started: {error}")
            return
        process.listen(self._on_line, self._over)
        self._send(self._hello)

    def pids(self) -> list[int]:
        """Return the process ids of the children, including those that are being killed."""
        return self._processes.pids()

    def provide(self, command: RequestRack | ReleaseRack) -> None:
        """Pass a request or release to the provider. Its answer comes as an event; a second release changes nothing."""
        if isinstance(command, RequestRack):
            self._known[command.request] = self._left[command.request] = None
        elif command.request in self._releasing:
            if command.request in self._late:
                self._late[command.request] = True
            return
        else:
            late = asyncio.get_running_loop().call_later(self._release_s, self._too_late, command.request)
            self._releasing[command.request] = late
        if self._processes.now is None:
            self.start()
        self._send(command)

    async def end(self, grace_s: float) -> None:
        """Release all racks within ``grace_s`` seconds at the end of the job, and close."""
        for request in list(self._left):
            self.provide(ReleaseRack(request=request, because="the job is over"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._left:
                    self._all_released.clear()
                    await self._all_released.wait()
        for request in self._left:
            self._notice(f"rack {request} was not released within {grace_s:g} s: see whether it is left behind")
        self._left.clear()
        self.close()

    def close(self) -> None:
        """End all children. Racks that were not released stay with the provider."""
        for timer in self._releasing.values():
            timer.cancel()
        self._releasing.clear()
        self._known.clear()
        self._processes.close()

    # -- what it says
    def _on_line(self, line: bytes) -> None:
        try:
            message: Upward = _upward.decode(line)
        except msgspec.MsgspecError as error:
            self._over(f"said what cannot be read: {error}")
            return
        match message:
            case Loaded():
                if message.trouble:
                    self._over(message.trouble)
            case Released():
                self._released(message.request, message.trouble)
            case RackRefused():
                self._known.pop(message.request, None)
                if not message.failed and message.request not in self._releasing:
                    self._left.pop(message.request, None)
                self._deliver(message)
            case RackDelivered():
                self._left[message.request] = None  # it may have been released before it came
                if message.request in self._releasing:
                    self._late[message.request] = False
                self._deliver(message)
            case RackPreempted():
                self._deliver(message)

    def _released(self, request: int, trouble: str) -> None:
        timer = self._releasing.pop(request, None)
        if timer is not None:
            timer.cancel()
        self._known.pop(request, None)
        again = self._late.pop(request, None)
        if again is None:
            self._left.pop(request, None)
        elif again:
            self.provide(ReleaseRack(request=request, because="it came while it was being released"))
        if trouble:
            self._notice(f"rack {request} could not be released, see whether it is left behind: {trouble}")
        self._all_released.set()

    def _too_late(self, request: int) -> None:
        self._released(request, f"the provider did not do it within {self._release_s:g} s, and its process is ended")
        self._over(f"hung in the release of rack {request}, and was ended")

    def _over(self, trouble: str) -> None:
        """End the process, which is of no use any more. Everything under way in it has failed."""
        self._processes.end()
        for request in list(self._releasing):
            self._released(request, f"the provider {trouble}")
        known, self._known = list(self._known), {}
        for request in known:
            self._deliver(RackRefused(request=request, because=f"the provider {trouble}", failed=True))

    def _send(self, message: Downward) -> None:
        if self._processes.now is not None:
            self._processes.now.write(msgspec.json.encode(message))
