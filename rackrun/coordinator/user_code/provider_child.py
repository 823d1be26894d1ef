"""Process in which a provider runs: ``python -m rackrun.coordinator.user_code.provider_child FD SPEC``.

Messages are lines of JSON. Standard input carries `Hello`, then `RequestRack` and `ReleaseRack`. Descriptor FD carries
first `Loaded`, then `RackDelivered`, `RackRefused`, `RackPreempted` and, for each `ReleaseRack`, `Released`. Each call
has a thread of its own. The process ends with its parent, or when its input ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeAlias

import msgspec

from rackrun.coordinator.user_code.child_setup import error_text, exit_in_forks, find, open_pipes
from rackrun.coordinator.user_code.provider_api import Provider, RackRequest, Refused
from rackrun.protocol.commands import ReleaseRack, RequestRack
from rackrun.protocol.events import RackDelivered, RackPreempted, RackRefused
from rackrun.protocol.ids import TrayId

__all__ = ["Downward", "Hello", "Loaded", "Released", "Upward", "load", "main"]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="command"):
    """First message to the process."""

    run_id: str
    template: bytes
    """An `AgentConfig` as JSON, without the fields that differ from tray to tray."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """First message from the process: whether the provider could be loaded."""

    expected_s: float | None = None
    trouble: str = ""


class Released(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """A release is done, or failed."""

    request: int
    trouble: str = ""


Downward: TypeAlias = Hello | RequestRack | ReleaseRack
Upward: TypeAlias = Loaded | Released | RackDelivered | RackRefused | RackPreempted


def main() -> int:
    console = os.dup(1)
    commands, answers = open_pipes(int(sys.argv[1]))
    pid = os.getpid()
    try:
        provider = load(sys.argv[2])
        expected_s = getattr(provider, "expected_s", None)
        loaded = Loaded(expected_s=None if expected_s is None else max(float(expected_s), 0.0))
    except BaseException as error:  # noqa: BLE001 - a user's module may do anything while it is imported
        exit_in_forks(pid)
        _ProviderCalls(None, answers, console, pid).say(Loaded(trouble=f"cannot be loaded: {error_text(error)}"))
        return 1
    exit_in_forks(pid)
    desk = _ProviderCalls(provider, answers, console, pid)
    desk.say(loaded)
    for line in commands:
        desk.handle(msgspec.json.decode(line, type=Downward))
    os._exit(0)  # hanging calls are not waited for


def load(spec: str) -> Provider:
    """Load a provider: call ``module:function``, or ``module:function:ARGS`` with ARGS as its only argument.

    Raises whatever the call raises, and TypeError if the result is no provider.
    """
    module, _, rest = spec.partition(":")
    name, _, arguments = rest.partition(":")
    function = find(f"{module}:{name}")
    if not callable(function):
        raise TypeError(f"{module}:{name} is a {type(function).__name__}, not a function that gives a provider")
    provider = function(arguments) if arguments else function()
    for method in ("request_rack", "release"):
        if not callable(getattr(provider, method, None)):
            raise TypeError(f"{module}:{name} gives a {type(provider).__name__}, which has no {method}")
    found: Provider = provider
    return found


class _ProviderCalls:
    def __init__(self, provider: Provider | None, answers: BinaryIO, console: int, pid: int) -> None:
        self._provider = provider
        self._answers = answers
        self._console = console
        self._pid = pid
        self._speaking = threading.Lock()
        self._hello = Hello(run_id="", template=b"{}")
        self._requests: dict[int, RackRequest] = {}

    def say(self, message: Upward) -> None:
        exit_in_forks(self._pid)
        with self._speaking:
            self._answers.write(msgspec.json.encode(message) + b"\n")

    def handle(self, message: Downward) -> None:
        match message:
            case Hello():
                self._hello = message
            case RequestRack():
                self._requests[message.request] = request = self._request(message)
                self._in_a_thread(lambda: self._ask(message.request, request))
            case ReleaseRack():
                if (asked := self._requests.pop(message.request, None)) is not None:
                    asked.cancelled.set()
                self._in_a_thread(lambda: self._release(message.request))

    def _request(self, message: RequestRack) -> RackRequest:
        def preempted(because: str, trays: Sequence[str]) -> None:
            named = tuple(TrayId(str(tray)) for tray in trays)
            self.say(RackPreempted(request=message.request, because=str(because), trays=named))

        return RackRequest(
            number=message.request,
            name=self._name(message.request),
            trays=message.trays,
            slots=message.slots,
            because=message.because,
            template=self._hello.template,
            console=self._console,
            preempted=preempted,
        )

    def _ask(self, number: int, request: RackRequest) -> None:
        assert self._provider is not None
        try:
            trays = self._provider.request_rack(request)
            if isinstance(trays, str) or not all(isinstance(tray, str) for tray in trays):
                raise TypeError(f"request_rack returned {trays!r:.100}, not the names of trays")
            answer: Upward = RackDelivered(request=number, trays=tuple(TrayId(tray) for tray in trays))
        except Refused as refused:
            answer = RackRefused(request=number, because=str(refused) or "for no reason that it gives")
        except BaseException as error:  # noqa: BLE001 - a user's provider may raise anything
            answer = RackRefused(request=number, because=error_text(error), failed=True)
        self.say(answer)

    def _release(self, number: int) -> None:
        assert self._provider is not None
        trouble = ""
        try:
            self._provider.release(self._name(number))
        except BaseException as error:  # noqa: BLE001 - a user's provider may raise anything
            trouble = error_text(error)
        self.say(Released(request=number, trouble=trouble))

    def _name(self, number: int) -> str:
        return f"{self._hello.run_id}-rack-{number}"

    def _in_a_thread(self, call: Callable[[], None]) -> None:
        threading.Thread(target=call, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
