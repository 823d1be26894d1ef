"""The `Provider` protocol and the requests that a provider receives; `rackrun.provider` exports them to users."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Provider", "RackRequest", "Refused"]


class Refused(Exception):
    """Raised by `Provider.request_rack` if no rack is available now. The text is for people."""


class RackRequest:
    """A request for a rack."""

    def __init__(
        self,
        *,
        number: int,
        name: str,
        trays: int,
        slots: int,
        because: str = "",
        template: bytes = b"{}",
        console: int = 1,
        preempted: Callable[[str, Sequence[str]], None] = lambda _because, _trays: None,
    ) -> None:
        self.number = number
        """Number of the request in this job, from 1."""
        self.name = name
        """Unique name of the request. `Provider.release` receives it, perhaps in another process than the one that was
        asked."""
        self.trays = trays
        self.slots = slots
        """Slots of each tray."""
        self.because = because
        """What has happened, for people."""
        self.cancelled = threading.Event()
        """Set when the rack is not wanted any more. `Provider.release` is called at the same time."""
        self.console = console
        """Descriptor of the launcher's standard output, for agents that are started on this host."""
        self._template = template
        self._preempted = preempted

    def agent_config(
        self, tray: str, *, slots: int | None = None, advertise: str | None = None, simulated: bool = False
    ) -> bytes:
        """Return a configuration for ``python -m rackrun.agent FILE``: a tray of this job.

        It contains the job's secret. The caller must write it to a file that only the owner can read.

        ``tray``: a name that no other tray of the job has. ``slots``: workers on it; default: as requested.
        ``advertise``: the address at which other hosts reach its host; default: the launcher's. ``simulated``: it
        shares its host with other trays.
        """
        fields: dict[str, Any] = json.loads(self._template)
        fields |= {"tray": tray, "slots": self.slots if slots is None else slots, "simulated": simulated}
        if advertise is not None:
            fields["advertise"] = advertise
        return json.dumps(fields).encode()

    def preempted(self, because: str, trays: Sequence[str] = ()) -> None:
        """Report that this rack, or these trays of it, will soon be gone. Callable from any thread after the rack was
        delivered."""
        self._preempted(because, trays)


class Provider(Protocol):
    """A source of racks. It lives in a process of its own, without torch.

    It may also have ``expected_s``, the expected seconds of a request. Without it ten minutes are assumed until the job
    has measured a request.
    """

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        """Get a rack and return the names of its trays, under which their agents join.

        Called in a thread of its own. It may take hours, and should check ``request.cancelled`` now and then. Raises
        `Refused` if there is no rack. Any other exception is a failure, and whatever it may have acquired is released.
        """
        ...

    def release(self, name: str) -> None:
        """Take back everything that belongs to the request of this name.

        There may be nothing: the request may still be under way, be released already, or be from a process that has
        ended since. Called in a thread of its own, with half a minute of time.
        """
        ...
