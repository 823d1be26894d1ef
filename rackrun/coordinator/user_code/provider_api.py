"""What a provider of racks is, and what it is asked: `rackrun.provider` gives them to the user."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Provider", "RackRequest", "Refused"]


class Refused(Exception):
    """Raised by `Provider.request_rack`: there is no rack to be had now. The text is for people."""


class RackRequest:
    """A rack that is wanted."""

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
        """From 1 on, in this job."""
        self.name = name
        """Of the request, and nothing else's: `Provider.release` is told of it, perhaps in another process than the one that was asked."""
        self.trays = trays
        self.slots = slots
        """Of each tray."""
        self.because = because
        """What has happened, for people."""
        self.cancelled = threading.Event()
        """It is not wanted any more; `Provider.release` is called at the same time."""
        self.console = console
        """A descriptor of the launcher's standard output, for what agents that are started on this host print."""
        self._template = template
        self._preempted = preempted

    def agent_config(
        self, tray: str, *, slots: int | None = None, advertise: str | None = None, simulated: bool = False
    ) -> bytes:
        """For ``python -m rackrun.agent FILE``: a tray of this job, with its secret, which nobody else is to read. The caller writes
        it to a file for the owner's eyes only.

        tray: a name that no other tray of the job has. slots: workers there; by default as many as are wanted. advertise: the address
        under which other hosts reach that one; by default as the launcher's. simulated: it shares its host with other trays.
        """
        fields: dict[str, Any] = json.loads(self._template)
        fields |= {"tray": tray, "slots": self.slots if slots is None else slots, "simulated": simulated}
        if advertise is not None:
            fields["advertise"] = advertise
        return json.dumps(fields).encode()

    def preempted(self, because: str, trays: Sequence[str] = ()) -> None:
        """Tell the job that this rack, or these trays of it, will be gone before long. From any thread, once it has been delivered."""
        self._preempted(because, trays)


class Provider(Protocol):
    """Where racks come from. It lives in a process of its own, without torch.

    It may also have ``expected_s``: how many seconds a request takes, as far as it knows. Without it, and until the job has seen one,
    that is taken for ten minutes.
    """

    def request_rack(self, request: RackRequest) -> Sequence[str]:
        """Get a rack, and return the names of its trays, under which its agents join. In a thread of its own; it may take hours, and
        should look at ``request.cancelled`` now and then. Raises `Refused` when there is none; whatever else it raises is a failure,
        and what it may have got is released."""
        ...

    def release(self, name: str) -> None:
        """Take back all that there is of the request of this name, or nothing: it may still be under way, be back already, or have been
        asked for by a process that has ended since. In a thread of its own; it has half a minute."""
        ...
