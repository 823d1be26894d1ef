"""Pure machine of an agent's link to its coordinator: how long an agent holds on to one that it does not reach.

It is given facts with the time, and answers each with one effect. It has no clock and no I/O: the agent runs it
(`rackrun.agent.tray.uplink`), and so does the simulator. When it gives up, the agent ends, and its workers with it.

- A connection over which nothing comes is kept for a lease and as long again as a broken one: the coordinator may be
  the one that is cut off, and then it gives no agent up.
- A connection that breaks is resumed. That is tried for ``orphan_s``, then the agent gives up.
- The coordinator refuses an agent that it has given up. Only if it had not heard a word of it may it join anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import TypeAlias, assert_never

import msgspec

from rackrun.errors import InvalidTransition

__all__ = [
    "LINK_TRANSITIONS",
    "AttemptFailed",
    "CoordinatorLease",
    "LeaseEnd",
    "GiveUp",
    "HangUp",
    "JoinAnew",
    "LinkBroke",
    "LinkSilent",
    "LinkState",
    "LinkWelcomed",
    "Ping",
    "Proceed",
    "Retry",
]

_JOIN_S = 60.0
_RETRY_S = (0.02, 1.0)
_REFUSED = (400, 401, 403, 404, 409, 426)
_TAKEN = 503
"""Status when another agent has the tray, which may be gone soon."""


class LeaseEnd(Enum):
    """Why there is no coordinator any more."""

    REFUSED = 2
    LOST = 3


class LinkState(StrEnum):
    """Where the link to the coordinator stands."""

    JOINING = "joining"
    """The coordinator has not received a word, as far as is known."""
    CONNECTED = "connected"
    BROKEN = "broken"
    """The connection broke; the link is resumed over another one."""
    GIVEN_UP = "given up"


LINK_TRANSITIONS: Mapping[LinkState, tuple[LinkState, ...]] = {
    LinkState.JOINING: (LinkState.CONNECTED, LinkState.GIVEN_UP),
    LinkState.CONNECTED: (LinkState.BROKEN,),
    LinkState.BROKEN: (LinkState.CONNECTED, LinkState.JOINING, LinkState.GIVEN_UP),
    LinkState.GIVEN_UP: (),
}
"""State -> the states that may follow."""


class _Value(msgspec.Struct, frozen=True, gc=False):
    pass


# -- facts
class LinkWelcomed(_Value, frozen=True):
    """The coordinator has welcomed the agent over a new connection."""


class LinkBroke(_Value, frozen=True):
    """The connection over which the coordinator had welcomed the agent has ended. ``overflows``: as below."""

    overflows: bool = False


class AttemptFailed(_Value, frozen=True):
    """An attempt to connect has failed.

    ``status``: that of the coordinator's answer; 0: there was none. ``unheard``: the coordinator has received nothing
    of what the agent has sent over the link. ``overflows``: more waits to be sent than is kept without a connection.
    """

    because: str
    status: int = 0
    unheard: bool = False
    overflows: bool = False


class LinkSilent(_Value, frozen=True):
    """Nothing has come over the connection for ``for_s`` seconds. ``job_over``: the launcher says that the job is over,
    and a connection that breaks is not mended."""

    for_s: float
    job_over: bool = False


LinkFact: TypeAlias = LinkWelcomed | LinkBroke | AttemptFailed | LinkSilent


# -- effects
class Proceed(_Value, frozen=True):
    """Exchange messages."""


class Ping(_Value, frozen=True):
    """Ask whether the other end of the connection is still there."""


class HangUp(_Value, frozen=True):
    """End the connection. `LinkBroke` follows. ``text``: a line for people."""

    text: str


class Retry(_Value, frozen=True):
    """Connect again after ``after_s`` seconds. ``text``: a line for people, or ""."""

    after_s: float
    text: str = ""


class JoinAnew(_Value, frozen=True):
    """Forget the link, and connect after ``after_s`` seconds as an agent that joins."""

    after_s: float


class GiveUp(_Value, frozen=True):
    """End the agent. ``text``: a line for people."""

    end: LeaseEnd
    text: str


LinkEffect: TypeAlias = Proceed | Ping | HangUp | Retry | JoinAnew | GiveUp


class CoordinatorLease:
    """Decides for one link.

    ``lease_s``: after this long, a side that hears nothing may count the other as lost. ``orphan_s``: for so long a
    connection that broke is tried to be mended. ``where``: the coordinator's address, for people.
    """

    def __init__(self, lease_s: float, orphan_s: float, now_s: float, where: str = "") -> None:
        self.state = LinkState.JOINING
        self._lease_s, self._orphan_s, self._where = lease_s, orphan_s, where
        self._until_s = now_s + _JOIN_S
        self._pause_s = _RETRY_S[0]
        self._taken_told = False

    def handle(self, fact: LinkFact, now_s: float) -> LinkEffect:
        """Take in a fact at ``now_s``, in seconds of any monotonic clock, and return what is to be done."""
        match fact:
            case LinkWelcomed():
                self._move(LinkState.CONNECTED)
                return Proceed()
            case LinkSilent():
                if fact.for_s > self._lease_s + self._orphan_s or fact.job_over:
                    return HangUp(f"no word from the coordinator for {fact.for_s:.0f} s")
                return Ping()
            case LinkBroke():
                self._move(LinkState.BROKEN)
                self._until_s, self._pause_s = now_s + self._orphan_s, _RETRY_S[0]
                if fact.overflows:
                    return self._overflow()
                return self._retry("the connection to the coordinator broke; the workers go on, and I try again")
            case AttemptFailed():
                return self._attempt_failed(fact, now_s)
            case _:
                assert_never(fact)

    def _attempt_failed(self, fact: AttemptFailed, now_s: float) -> LinkEffect:
        text = ""
        anew = False
        if fact.status in _REFUSED:
            anew = self.state is LinkState.BROKEN and fact.unheard
            if not anew:
                end = LeaseEnd.LOST if self.state is LinkState.BROKEN else LeaseEnd.REFUSED
                return self._give_up(end, f"the coordinator refuses this tray: {fact.because}")
            self._move(LinkState.JOINING)
        elif fact.status == _TAKEN and not self._taken_told:
            self._taken_told = True
            text = f"the coordinator does not take this tray yet: {fact.because}; I ask again"
        if self.state is LinkState.BROKEN and fact.overflows:
            return self._overflow()
        if now_s >= self._until_s:
            return self._give_up(LeaseEnd.LOST, f"no coordinator at {self._where}: {fact.because}")
        return JoinAnew(self._retry().after_s) if anew else self._retry(text)

    def _retry(self, text: str = "") -> Retry:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _RETRY_S[1])
        return Retry(pause_s, text)

    def _overflow(self) -> GiveUp:
        return self._give_up(LeaseEnd.LOST, "more waits for the coordinator than is kept without a connection")

    def _give_up(self, end: LeaseEnd, text: str) -> GiveUp:
        self._move(LinkState.GIVEN_UP)
        return GiveUp(end, text)

    def _move(self, state: LinkState) -> None:
        if state not in LINK_TRANSITIONS[self.state]:
            raise InvalidTransition("the link to the coordinator", self.state, f"become {state}", [self.state])
        self.state = state
