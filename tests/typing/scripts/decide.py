"""A policy and a provider of one's own, with a test of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from rackrun.policy import ClusterView, Decision, Failure, Option, Rank, Rung, SlotId, choose, options
from rackrun.provider import Provider, RackRequest, Refused


def decide(failure: Failure, view: ClusterView) -> Decision | None:
    possible = {option.rung: option for option in options(failure, view) if option.possible}
    assert_type(possible, dict[Rung, Option])
    if Rung.RESTART in possible and (view.rollback_steps or 0) > 1000:
        return Decision(rung=Rung.RESTART, reason="a rollback of more than 1000 steps")
    return choose(failure, view)


def test_decide() -> None:
    failure = Failure(what="rank 3 lost (SIGKILL)", ranks=(Rank(3),), slots=(SlotId("tray-0/3"),))
    view = ClusterView(world_size=4, usable_slots=5, takeovers={Rank(3): SlotId("tray-0/4")})
    decision = decide(failure, view)
    assert decision is not None
    assert_type(decision.rung, Rung)


class Shelf:
    expected_s = 120.0

    def request_rack(self, request: RackRequest) -> list[str]:
        if request.cancelled.is_set():
            raise Refused("nobody waits for it")
        return [f"{request.name}-{number}" for number in range(request.trays)]

    def release(self, name: str) -> None:
        print(name)


class NoShelf:
    def request_rack(self, request: RackRequest) -> Sequence[str]:
        raise Refused(request.because)


def shelf() -> Provider:
    return Shelf()


def no_shelf() -> Provider:
    return NoShelf()  # type: ignore[return-value]
