"""How long an agent holds on to a coordinator that it does not reach. No connection, no clock."""

from __future__ import annotations

import random

import pytest

from rackrun.agent.tray.coordinator_lease import (
    LINK_TRANSITIONS,
    AttemptFailed,
    CoordinatorLease,
    GiveUp,
    HangUp,
    JoinAnew,
    LeaseEnd,
    LinkBroke,
    LinkEffect,
    LinkFact,
    LinkSilent,
    LinkState,
    LinkWelcomed,
    Ping,
    Proceed,
    Retry,
)
from rackrun.errors import InvalidTransition

LEASE_S, ORPHAN_S = 15.0, 30.0
FAILED = AttemptFailed("connection refused")
AGAIN = "the connection to the coordinator broke; the workers go on, and I try again"


class LeaseHarness:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.lease = CoordinatorLease(LEASE_S, ORPHAN_S, self.now_s, "http://head")

    def __call__(self, fact: LinkFact) -> LinkEffect:
        return self.lease.handle(fact, self.now_s)


@pytest.fixture
def harness() -> LeaseHarness:
    return LeaseHarness()


@pytest.fixture
def broken(harness: LeaseHarness) -> LeaseHarness:
    """Was connected, and is not any more."""
    assert harness(LinkWelcomed()) == Proceed()
    assert harness(LinkBroke()) == Retry(0.02, AGAIN)
    return harness


def test_an_agent_that_joins_tries_for_a_minute_ever_more_rarely(harness: LeaseHarness) -> None:
    pauses = [harness(FAILED) for _ in range(8)]
    assert pauses == [Retry(pause_s) for pause_s in (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0)]
    harness.now_s += 60.0
    assert harness(FAILED) == GiveUp(LeaseEnd.LOST, "no coordinator at http://head: connection refused")


def test_an_agent_that_is_refused_when_it_joins_says_why_and_ends(harness: LeaseHarness) -> None:
    assert harness(AttemptFailed("409 taken", 409)) == GiveUp(
        LeaseEnd.REFUSED, "the coordinator refuses this tray: 409 taken"
    )


def test_an_agent_whose_tray_is_taken_says_so_once_and_asks_again(harness: LeaseHarness) -> None:
    taken = AttemptFailed("503 tray-0 has an agent", 503)
    said = "the coordinator does not take this tray yet: 503 tray-0 has an agent; I ask again"
    assert [harness(taken), harness(taken)] == [Retry(0.02, said), Retry(0.04)]


def test_a_connection_that_breaks_is_resumed_and_the_time_for_it_counts_anew(broken: LeaseHarness) -> None:
    broken.now_s += 29.0
    assert broken(FAILED) == Retry(0.04)
    assert broken(LinkWelcomed()) == Proceed()
    broken.now_s += 29.0
    assert broken(LinkBroke()) == Retry(0.02, AGAIN)
    broken.now_s += 29.0
    assert isinstance(broken(FAILED), Retry)


def test_a_coordinator_that_does_not_come_back_in_time_is_given_up(broken: LeaseHarness) -> None:
    broken.now_s += ORPHAN_S
    assert broken(FAILED) == GiveUp(LeaseEnd.LOST, "no coordinator at http://head: connection refused")


def test_an_agent_that_was_heard_and_given_up_is_refused_and_ends(broken: LeaseHarness) -> None:
    assert broken(AttemptFailed("409 given up", 409)) == GiveUp(
        LeaseEnd.LOST, "the coordinator refuses this tray: 409 given up"
    )


def test_an_agent_of_which_no_word_was_heard_joins_anew(broken: LeaseHarness) -> None:
    assert broken(AttemptFailed("409 unknown", 409, unheard=True)) == JoinAnew(0.04)
    assert broken.lease.state is LinkState.JOINING
    assert broken(AttemptFailed("409 unknown", 409, unheard=True)) == GiveUp(
        LeaseEnd.REFUSED, "the coordinator refuses this tray: 409 unknown"
    ), "once"


@pytest.mark.parametrize("fact", [LinkBroke(overflows=True), AttemptFailed("refused", overflows=True)])
def test_an_agent_gives_up_when_more_waits_than_is_kept(harness: LeaseHarness, fact: LinkFact) -> None:
    harness(LinkWelcomed())
    if isinstance(fact, AttemptFailed):
        harness(LinkBroke())
    assert harness(fact) == GiveUp(LeaseEnd.LOST, "more waits for the coordinator than is kept without a connection")


def test_what_waits_before_the_agent_has_joined_is_no_reason_to_give_up(harness: LeaseHarness) -> None:
    assert harness(AttemptFailed("refused", overflows=True)) == Retry(0.02)


def test_a_silent_coordinator_is_asked_and_given_up_only_after_a_lease_and_as_long_as_a_broken_link(
    harness: LeaseHarness,
) -> None:
    """It may be the one that is cut off, and then it gives nobody up."""
    harness(LinkWelcomed())
    assert [harness(LinkSilent(silent_s)) for silent_s in (15.0, 30.0, 45.0)] == [Ping()] * 3
    assert harness(LinkSilent(45.1)) == HangUp("no word from the coordinator for 45 s")
    assert harness(LinkBroke()) == Retry(0.02, AGAIN), "that, too, is a connection that broke"


def test_a_silent_connection_is_ended_at_once_when_the_job_is_over(harness: LeaseHarness) -> None:
    harness(LinkWelcomed())
    assert harness(LinkSilent(15.0, job_over=True)) == HangUp("no word from the coordinator for 15 s")


@pytest.mark.parametrize(
    ("facts", "last"),
    [
        ([LinkWelcomed()], LinkWelcomed()),
        ([], LinkBroke()),
        ([AttemptFailed("403", 403)], LinkWelcomed()),
        ([LinkWelcomed(), LinkBroke()], LinkBroke()),
    ],
)
def test_what_cannot_be_raises(harness: LeaseHarness, facts: list[LinkFact], last: LinkFact) -> None:
    for fact in facts:
        harness(fact)
    with pytest.raises(InvalidTransition, match="the link to the coordinator is"):
        harness(last)


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_of_facts_it_gives_up_in_time_and_never_while_connected(harness: LeaseHarness, seed: int) -> None:
    draw, broke_s = random.Random(seed), harness.now_s + 30.0  # 60 s are for joining
    for _ in range(200):
        harness.now_s += 3 * draw.random()
        state = harness.lease.state
        facts: list[LinkFact] = [FAILED, AttemptFailed("503", 503), AttemptFailed("409", 409, unheard=True)]
        if state is LinkState.CONNECTED:
            facts = [LinkBroke(), LinkSilent(60 * draw.random()), LinkSilent(10.0)]
        elif draw.random() < 0.05:
            facts = [LinkWelcomed()]
        fact = draw.choice(facts)
        effect = harness(fact)
        assert harness.lease.state in (state, *LINK_TRANSITIONS[state])
        if isinstance(fact, LinkBroke):
            broke_s = harness.now_s
        if isinstance(effect, GiveUp):
            assert state is not LinkState.CONNECTED
            return
        assert state is LinkState.CONNECTED or harness.now_s < broke_s + ORPHAN_S or isinstance(fact, LinkWelcomed)
