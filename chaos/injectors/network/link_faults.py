"""Make the link between an agent and the coordinator bad, by a proxy between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rackrun.chaos.faults.network.bad_link import Link
from rackrun.chaos.injectors.common.injection import CONFIRM_S, StrikeOutcome
from rackrun.chaos.testbed.network.link_proxy import LinkOrder
from rackrun.chaos.testbed.network.proxy_control import Links

__all__ = ["BadLink"]


class BadLink:
    """A bad link of each of ``trays``. It has taken effect when bytes or connections of every tray have met it."""

    def __init__(self, trays: Sequence[str], fault: Link, number: int, seed: int, links: Links) -> None:
        self._began_s = time.monotonic()
        self._trays, self._number, self._links = trays, number, links
        for index, tray in enumerate(trays):
            links.say(LinkOrder(number, tray, fault, seed + index))

    def outcome(self) -> StrikeOutcome | None:
        found = {tray: self._links.effect(self._number, tray) for tray in self._trays}
        if all(found.values()):
            return StrikeOutcome(True, "; ".join(f"{tray}: {detail}" for tray, detail in found.items()))
        if time.monotonic() - self._began_s < CONFIRM_S:
            return None
        return StrikeOutcome(
            False, f"nothing went over the link of {', '.join(t for t, seen in found.items() if not seen)}"
        )

    def take_back(self) -> None:
        """Undo the fault. It needs no undo record: the proxy is a process of the job's, and the fault ends with it."""
        with contextlib.suppress(OSError, ValueError):  # the proxy has ended
            for tray in self._trays:
                self._links.say(LinkOrder(self._number, tray, None))
