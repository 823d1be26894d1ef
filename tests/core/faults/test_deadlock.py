"""Ranks that all wait in collectives, and for each other, are judged at once. Whatever only looks like it is waited for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rackrun.core.faults.deadlock import is_deadlock
from rackrun.protocol.commands import BreakGeneration, Command, SetTimer
from rackrun.protocol.events import CollectiveWait
from rackrun.protocol.ids import Generation, Rank
from tests.core.core_harness import CoreHarness, condemned, every, only, only_condemned, stop_in
from tests.variants import in_stories

WORLD, LEFT, RIGHT, OUTER, INNER = "world", "ranks 0, 1", "ranks 2, 3", "ranks 0, 3", "ranks 1, 2"
MEMBERS = {WORLD: (0, 1, 2, 3), LEFT: (0, 1), RIGHT: (2, 3), OUTER: (0, 3), INNER: (1, 2)}
NUMBERS = {group: number for number, group in enumerate(MEMBERS)}


@pytest.fixture
def training(training: CoreHarness) -> CoreHarness:
    """Four ranks in generation 2, whose rank 1 is a newcomer: it has not done a step yet."""
    training.exits("a/1", signal=9)
    training.park_all(passed=4)
    training.resume_all()
    assert training.view.phase == "training"
    return training


def wait(
    rank: int,
    group: str,
    called: Mapping[str, int],
    *,
    groups: Sequence[str] = (WORLD, LEFT, RIGHT),
    generation: int = 2,
) -> CollectiveWait:
    """``rank`` waits in the last collective that it has called in ``group``. ``called``: in those of ``groups`` that it is in; else none."""
    mine = [one for one in groups if rank in MEMBERS[one]]
    return CollectiveWait(
        generation=Generation(generation),
        group=NUMBERS[group],
        number=called[group],
        called=tuple((NUMBERS[one], called.get(one, 0)) for one in mine),
    )


def says(harness: CoreHarness, rank: int, blocked: CollectiveWait | None, **further: Any) -> Sequence[Command]:
    """Its limit is not over, and it tells that it waits."""
    slot = harness.view.ranks[rank].slot
    count = sum(calls for _, calls in blocked.called) if blocked is not None else 5
    line = 30 + blocked.group if blocked is not None else 50
    fields = {"waiting": True, "early": True, "took_ms": 20, "for_ms": 10_000, "where": f"train.py:{line}"}
    return harness.stalls(slot, **{"collective": count, "blocked": blocked, **fields, **further})


def unequal_counts() -> dict[int, CollectiveWait]:
    """Rank 1 calls one collective more with rank 0; all others are at the gate, which rank 1 has not called."""
    return {
        1: wait(1, LEFT, {WORLD: 3, LEFT: 2}),
        **{rank: wait(rank, WORLD, {WORLD: 4, LEFT: 1, RIGHT: 1}) for rank in (0, 2, 3)},
    }


def other_groups() -> dict[int, CollectiveWait]:
    """A ring: each waits in a group whose other member waits in another."""
    groups = (WORLD, LEFT, RIGHT, OUTER, INNER)
    return {
        rank: wait(rank, group, {WORLD: 3, group: 1}, groups=groups)
        for rank, group in enumerate((LEFT, INNER, RIGHT, OUTER))
    }


def is_judged(harness: CoreHarness, answers: Sequence[Command]) -> bool:
    return bool(every(BreakGeneration, answers) or condemned(answers) or harness.view.phase != "training")


def tell_all(
    harness: CoreHarness, waits: Mapping[int, CollectiveWait], order: Sequence[int] = (0, 1, 2, 3)
) -> list[Command]:
    return [command for rank in order for command in says(harness, rank, waits[rank])]


# -- deadlocks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("waits", [unequal_counts(), other_groups()], ids=["unequal counts", "other groups"])
def test_ranks_that_wait_for_each_other_are_judged_at_once_though_no_limit_is_over(
    waits: dict[int, CollectiveWait], training: CoreHarness
) -> None:
    assert not is_judged(training, tell_all(training, waits, (0, 1, 2)))
    answers = says(training, 3, waits[3])
    assert is_judged(training, answers), "without a timer in between"
    announced = only(BreakGeneration, answers)
    assert "4 of 4 ranks report, and wait for each other" in announced.because


@pytest.mark.parametrize("last", range(4))
def test_it_does_not_matter_who_is_heard_last(last: int, training: CoreHarness) -> None:
    order = [*(rank for rank in range(4) if rank != last), last]
    assert is_judged(training, tell_all(training, unequal_counts(), order))


def test_limits_that_are_over_count_as_well_and_need_no_second_window(training: CoreHarness) -> None:
    waits = unequal_counts()
    for rank in (0, 2, 3):
        answers = says(training, rank, waits[rank], early=False)
    assert every(SetTimer, training.answers)
    assert not is_judged(training, [*answers, *training.timer("stalled"), *training.timer("judge")])
    assert is_judged(training, says(training, 1, waits[1]))


def test_who_has_called_the_fewest_is_replaced_as_in_any_stall(training: CoreHarness) -> None:
    behind = wait(1, LEFT, {WORLD: 2, LEFT: 1})
    ahead = {rank: wait(rank, WORLD, {WORLD: 4, LEFT: 0, RIGHT: 1}) for rank in (0, 2, 3)}
    assert only_condemned(tell_all(training, {1: behind, **ahead})).slot == training.view.ranks[1].slot


def test_the_same_deadlock_twice_ends_the_job(training: CoreHarness) -> None:
    assert is_judged(training, tell_all(training, unequal_counts()))
    training.park_all(passed=4)
    training.resume_all()
    again = {rank: wait_in(one, 3) for rank, one in unequal_counts().items()}
    assert "came twice" in stop_in(tell_all(training, again)).because


def wait_in(one: CollectiveWait, generation: int) -> CollectiveWait:
    return CollectiveWait(generation=Generation(generation), group=one.group, number=one.number, called=one.called)


# -- look-alikes -----------------------------------------------------------------------------------------------------
def test_while_one_rank_is_not_heard_it_may_work_and_all_wait_for_it(training: CoreHarness) -> None:
    assert not is_judged(training, tell_all(training, unequal_counts(), (1, 2, 3)))


@pytest.mark.parametrize(
    "why",
    [
        "its collective is in flight, and it computes, also on its device",
        "it waits for a peer's send, which is of two ranks only",
        "it waits in a broadcast, or in a phase, which may have other threads",
    ],
)
def test_who_waits_and_is_not_known_to_be_blocked_may_go_on(why: str, training: CoreHarness) -> None:
    waits = unequal_counts()
    tell_all(training, waits, (0, 2, 3))
    assert not is_judged(training, says(training, 1, None)), why


def test_a_newcomer_that_is_idle_in_its_own_code_may_load_data(training: CoreHarness) -> None:
    tell_all(training, unequal_counts(), (0, 2, 3))
    assert not is_judged(training, says(training, 1, None, waiting=False, for_ms=31_000, took_ms=-1, collective=9))


def test_ranks_in_subgroups_that_go_on_one_after_the_other_are_waited_for(training: CoreHarness) -> None:
    """Both of LEFT have called; ranks 2 and 3 wait at the gate for them."""
    waits = {rank: wait(rank, LEFT, {WORLD: 3, LEFT: 2}) for rank in (0, 1)}
    waits |= {rank: wait(rank, WORLD, {WORLD: 4, RIGHT: 1}) for rank in (2, 3)}
    assert not is_judged(training, tell_all(training, waits))


def test_all_in_one_collective_that_all_have_entered_may_be_a_slow_network(training: CoreHarness) -> None:
    waits = {rank: wait(rank, WORLD, {WORLD: 4, LEFT: 1, RIGHT: 1}) for rank in range(4)}
    assert not is_judged(training, tell_all(training, waits))


def test_a_wait_that_has_ended_since_proves_nothing(training: CoreHarness) -> None:
    """Rank 0 was heard in the collective before that in which rank 1 is; both have come to the gate since, and it says nothing new yet."""
    waits = unequal_counts()
    waits[0] = wait(0, LEFT, {WORLD: 3, LEFT: 1})
    waits[1] = wait(1, WORLD, {WORLD: 4, LEFT: 1})
    assert not is_judged(training, tell_all(training, waits))


def test_who_goes_on_after_all_is_not_blocked_any_more(training: CoreHarness) -> None:
    waits = unequal_counts()
    says(training, 1, waits[1])
    says(training, 1, None, over=True, waiting=False)
    assert not is_judged(training, tell_all(training, waits, (0, 2, 3)))


def test_what_was_told_in_another_generation_is_over(training: CoreHarness) -> None:
    waits = unequal_counts()
    former = {rank: wait_in(one, 1) for rank, one in waits.items()}
    assert not is_judged(training, tell_all(training, former))
    assert not is_judged(training, tell_all(training, waits, (0, 2, 3))), "rank 1 has told of the former one only"
    training.exits("b/0", signal=9)
    training.park_all(passed=4)
    training.resume_all()
    later = {rank: wait_in(one, 3) for rank, one in unequal_counts().items()}
    assert not is_judged(training, tell_all(training, later, (0, 2, 3))), "rank 1 has said nothing in this one"


def test_what_was_told_in_another_generation_does_not_complete_a_proof(training: CoreHarness) -> None:
    waits = unequal_counts()
    tell_all(training, waits, (0, 2, 3))
    assert not is_judged(training, says(training, 1, wait_in(waits[1], 1)))


def test_a_newcomer_in_its_restore_is_waited_for(training: CoreHarness) -> None:
    training.exits("a/0", signal=9)
    training.park_all(passed=4)
    waits = {rank: wait_in(one, 3) for rank, one in unequal_counts().items()}
    for slot in [slot for slot in training.members if slot not in ("a/0", training.view.ranks[0].slot)]:
        training.resumes(slot)
    assert training.view.phase == "resuming"
    answers = tell_all(training, waits, (1, 2, 3))
    assert not condemned(answers)
    assert training.view.phase == "resuming"


def test_a_group_whose_other_members_do_not_name_it_proves_nothing(training: CoreHarness) -> None:
    waits = unequal_counts() | {0: wait(0, OUTER, {WORLD: 3, LEFT: 1, OUTER: 1}, groups=(WORLD, LEFT, OUTER))}
    assert not is_judged(training, tell_all(training, waits))


def test_ranks_that_have_returned_from_main_are_another_matter(training: CoreHarness) -> None:
    training.finishes("b/1")
    waits = unequal_counts()
    assert not is_judged(training, tell_all(training, waits, (0, 1, 2)))


# -- the rule itself: against all that can happen ----------------------------------------------------------------------
Program = tuple[str, ...]
"""The groups in which a rank calls collectives, one after the other. It is blocked in each until all members have called."""


class Machine:
    """Ranks that carry out programs, in any order."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        """In which collective of its program each rank is blocked."""

    def called(self, rank: int, group: str) -> int:
        return self.programs[rank][: self.at[rank] + 1].count(group)

    def may_go_on(self, rank: int) -> bool:
        if self.at[rank] == len(self.programs[rank]):
            return False
        group = self.programs[rank][self.at[rank]]
        number = self.called(rank, group)
        return all(self.called(member, group) >= number for member in MEMBERS[group])

    def movable(self) -> list[int]:
        return [rank for rank in range(len(self.programs)) if self.may_go_on(rank)]

    def says(self, rank: int) -> CollectiveWait | None:
        """None: its program is over, and it computes."""
        if self.at[rank] == len(self.programs[rank]):
            return None
        groups = tuple(MEMBERS)
        called = {group: self.called(rank, group) for group in groups if rank in MEMBERS[group]}
        return wait(rank, self.programs[rank][self.at[rank]], called, groups=groups)


def program(rng: random.Random, rank: int) -> Program:
    groups = [group for group, members in MEMBERS.items() if rank in members]
    return tuple(rng.choice(groups) for _ in range(rng.randrange(1, 7)))


@pytest.mark.parametrize("seed", [*range(75), *in_stories(*range(75, 300))])
def test_reports_of_any_moments_show_a_deadlock_only_where_there_is_one(seed: int) -> None:
    """Every report that a rank has ever made may be the last one that is known of it."""
    rng = random.Random(seed)
    programs = [program(rng, rank) for rank in range(4)]
    if seed % 3 == 0:  # that fit, but for one call of one rank
        common = [rng.choice(list(MEMBERS)) for _ in range(8)]
        programs = [tuple(group for group in common if rank in MEMBERS[group]) for rank in range(4)]
        late = rng.randrange(4)
        programs[late] = (*programs[late][:2], *program(rng, late)[:1], *programs[late][2:])
    machine = Machine(programs)
    reports: list[list[CollectiveWait | None]] = [[machine.says(rank)] for rank in range(4)]
    while movable := machine.movable():
        rank = rng.choice(movable)
        machine.at[rank] += 1
        reports[rank].append(machine.says(rank))
    last = [made[-1] for made in reports]
    for known in itertools.product(*reports):
        waits = {Rank(rank): one for rank, one in enumerate(known) if one is not None}
        if len(waits) == 4 and is_deadlock(waits):
            assert list(known) == last, "nobody has left the collective that it was reported in, or ever will"
    if None not in last:
        assert is_deadlock({Rank(rank): one for rank, one in enumerate(last) if one is not None}), "none is missed"
