"""The rules of one worker's membership: whether its generation is whole, and whether a unit counts. No thread, no clock."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import BreakGeneration, Member, Reshard
from rackrun.protocol.events import WorkerParked
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.membership.decisions.interruptions import Abandoned
from rackrun.worker.membership.decisions.membership_machine import MembershipMachine
from rackrun.worker.membership.decisions.membership_states import (
    INTACT,
    MEMBERSHIP_TRANSITIONS,
    UNIT_TRANSITIONS,
    MembershipState,
    MembershipTrigger,
    UnitState,
    UnitTrigger,
)
from rackrun.worker.membership.worker_membership import WorkerMembership
from tests.worker.membership_model import plan_of, sums_of

ROOT = Path(__file__).resolve().parents[3]
FIRST, SECOND = Position(0), Position(1)
SUMS, OTHERS = sums_of((1, 1, 0)), sums_of((1, 1, 1))


@pytest.fixture
def machine() -> MembershipMachine:
    """In generation 1, with step 0 committed."""
    machine = MembershipMachine()
    machine.take_plan(plan_of(1))
    machine.join(plan_of(1))
    passes(machine, FIRST)
    return machine


def passes(machine: MembershipMachine, at: Position) -> None:
    machine.begin_unit()
    assert machine.enter_gate(at)
    machine.pass_gate(SUMS)


def breaks(machine: MembershipMachine, generation: int = 2) -> bool:
    return machine.announce_break(Generation(generation))


def plans(
    machine: MembershipMachine, generation: int = 2, upto: Position = FIRST, gate: GateSums | None = None
) -> bool:
    return machine.take_plan(plan_of(generation, upto, gate.values if gate else ()))


def known(machine: MembershipMachine) -> tuple[Any, ...]:
    return machine.passed, machine.entered, machine.gate


# -- a unit ------------------------------------------------------------------------------------------------------------
def test_a_unit_counts_once_its_sums_are_here(machine: MembershipMachine) -> None:
    machine.begin_unit()
    assert not machine.unit_passed
    assert machine.enter_gate(SECOND)
    assert known(machine) == (FIRST, SECOND, SUMS)
    assert not machine.unit_passed
    machine.pass_gate(OTHERS)
    assert known(machine) == (SECOND, SECOND, OTHERS)
    assert machine.unit_passed


def test_a_unit_that_all_ranks_refuse_is_open_again(machine: MembershipMachine) -> None:
    machine.begin_unit()
    machine.enter_gate(SECOND)
    machine.refuse_gate()
    assert known(machine) == (FIRST, FIRST, SUMS)
    assert not machine.unit_passed
    assert machine.enter_gate(SECOND), "it is done again"


def test_no_gate_is_entered_where_none_can_pass(machine: MembershipMachine) -> None:
    spare = MembershipMachine()
    assert not spare.enter_gate(FIRST), "it is in no generation"
    breaks(machine)
    assert not machine.enter_gate(SECOND)
    assert known(machine) == (FIRST, FIRST, SUMS)


@pytest.mark.parametrize(("upto", "counts"), [(FIRST, False), (SECOND, True), (Position(2), True)])
def test_the_plan_says_whether_a_unit_counts_whose_gate_broke(
    upto: Position, counts: bool, machine: MembershipMachine
) -> None:
    machine.begin_unit()
    machine.enter_gate(SECOND)
    breaks(machine)
    assert plans(machine, upto=upto, gate=OTHERS)
    assert known(machine) == ((SECOND, SECOND, OTHERS) if counts else (FIRST, FIRST, SUMS))
    assert not machine.unit_passed, "the main thread does not know it yet"
    assert machine.count_by_plan(SECOND) == machine.unit_passed == counts


def test_a_plan_of_a_position_that_was_passed_here_changes_nothing(machine: MembershipMachine) -> None:
    breaks(machine)
    plans(machine, upto=FIRST, gate=OTHERS)
    assert known(machine) == (FIRST, FIRST, SUMS)


def test_a_plan_without_gate_values_leaves_none(machine: MembershipMachine) -> None:
    machine.enter_gate(SECOND)
    breaks(machine)
    plans(machine, upto=SECOND)
    assert known(machine) == (SECOND, SECOND, None)


def test_what_is_reported_is_final_until_the_plan(machine: MembershipMachine) -> None:
    machine.begin_unit()
    machine.enter_gate(SECOND)
    breaks(machine)
    reported = known(machine)
    with pytest.raises(AssertionError, match="broken generation"):
        machine.pass_gate(SUMS)
    machine.fail_collective(1, "reset", 0.0)
    machine.begin_unit()
    assert not machine.enter_gate(SECOND)
    assert not breaks(machine, 2)
    assert breaks(machine, 3), "a further rank is lost"
    assert known(machine) == reported


def test_a_position_can_be_set_back(machine: MembershipMachine) -> None:
    passes(machine, SECOND)
    machine.place(FIRST, ())
    assert known(machine) == (FIRST, FIRST, None)
    machine.place(SECOND, OTHERS.values)
    assert known(machine) == (SECOND, SECOND, OTHERS)


def test_sums_that_contradict_a_plan_are_a_bug(machine: MembershipMachine) -> None:
    """A plan that came without a break, which the coordinator does not do."""
    machine.enter_gate(SECOND)
    plans(machine, upto=FIRST)
    with pytest.raises(InvalidTransition, match="cannot pass"):
        machine.pass_gate(SUMS)
    assert machine.passed == FIRST


# -- a generation ------------------------------------------------------------------------------------------------------
def test_a_generation_that_is_broken_stays_so_until_the_next_is_joined(machine: MembershipMachine) -> None:
    assert not machine.broken
    assert machine.fail_collective(1, "reset", 0.0)
    assert machine.broken
    assert breaks(machine)
    assert machine.broken
    assert not machine.has_next_plan
    plans(machine)
    assert machine.broken
    assert machine.has_next_plan
    machine.join(plan_of(2))
    assert (machine.generation, machine.broken, machine.has_next_plan) == (2, False, False)


def test_a_collective_of_another_generation_breaks_nothing(machine: MembershipMachine) -> None:
    for other in (0, 2):
        assert not machine.fail_collective(other, "reset", 0.0)
    assert machine.is_whole(1)
    assert not machine.is_whole(2)


def test_a_collective_that_fails_for_a_worker_in_no_generation_breaks_nothing(machine: MembershipMachine) -> None:
    spare = MembershipMachine()
    assert not spare.fail_collective(0, "reset", 0.0)
    assert spare.state is MembershipState.WAITING
    breaks(machine)
    plans(machine)
    machine.leave_main(plan_of(2))
    assert not machine.fail_collective(0, "reset", 0.0)
    assert (machine.generation, machine.state) == (0, MembershipState.CALLED)
    for one in (spare, machine):
        assert one.take_unreported_failure(1.0) is None


def test_a_broken_generation_does_not_look_whole_while_the_next_is_joined(machine: MembershipMachine) -> None:
    """A thread that asks without the lock, and is interrupted between its two reads."""

    class Interrupted(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            machine.join(plan_of(2))
            return int(self) == other

    breaks(machine)
    plans(machine)
    assert not machine.is_whole(Interrupted(1))


def test_what_is_outdated_changes_nothing(machine: MembershipMachine) -> None:
    breaks(machine, 4)
    for generation in (1, 2, 3):
        assert not plans(machine, generation)
    for generation in (1, 2, 3, 4):
        assert not breaks(machine, generation)
    assert machine.state is MembershipState.BROKEN
    assert plans(machine, 4)
    assert not plans(machine, 4), "it was taken"
    assert not breaks(machine, 4)
    assert machine.is_superseded(3)
    assert not machine.is_superseded(4)


def test_a_plan_before_its_break_is_the_break(machine: MembershipMachine) -> None:
    machine.fail_collective(1, "reset", 0.0)
    assert plans(machine, 2)
    assert not breaks(machine, 2)
    assert machine.has_next_plan


def test_a_plan_is_overtaken_by_a_newer_break(machine: MembershipMachine) -> None:
    breaks(machine, 2)
    plans(machine, 2)
    assert breaks(machine, 3)
    assert not machine.has_next_plan
    with pytest.raises(InvalidTransition):
        machine.join(plan_of(2))


def test_a_failed_collective_is_reported_once_if_nobody_else_knows(machine: MembershipMachine) -> None:
    assert machine.take_unreported_failure(100.0) is None
    machine.fail_collective(1, "reset", 100.0)
    machine.fail_collective(1, "another", 100.1)
    assert machine.take_unreported_failure(100.1) is None, "a break may follow"
    assert machine.take_unreported_failure(100.3) == "reset"
    assert machine.take_unreported_failure(101.0) is None


@pytest.mark.parametrize("joins", [False, True])
def test_a_failed_collective_is_not_reported_after_a_break(joins: bool, machine: MembershipMachine) -> None:
    machine.fail_collective(1, "reset", 100.0)
    breaks(machine)
    if joins:
        plans(machine)
        machine.join(plan_of(2))
    assert machine.take_unreported_failure(101.0) is None


def test_a_collective_that_fails_after_the_break_is_not_reported(machine: MembershipMachine) -> None:
    breaks(machine)
    machine.fail_collective(1, "reset", 100.0)
    assert machine.take_unreported_failure(101.0) is None


def test_who_leaves_main_as_a_newcomer_is_in_no_generation(machine: MembershipMachine) -> None:
    breaks(machine)
    plans(machine)
    machine.leave_main(plan_of(2))
    assert (machine.generation, machine.broken) == (0, False)
    assert known(machine) == (BEGIN, BEGIN, None)
    assert machine.has_next_plan


def test_who_leaves_main_with_its_shards_keeps_the_committed_position(machine: MembershipMachine) -> None:
    passes(machine, SECOND)
    breaks(machine)
    reshard = Reshard(layout=Generation(0), images=())
    plan = msgspec.structs.replace(plan_of(2, SECOND, OTHERS.values), reshard=reshard)
    machine.take_plan(plan)
    machine.leave_main(plan)
    assert (machine.generation, machine.broken) == (1, True)
    assert known(machine) == (SECOND, SECOND, OTHERS)
    assert not machine.unit_passed


# -- the tables --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("state", "trigger"), [*product(MembershipState, MembershipTrigger)])
def test_a_worker_moves_as_its_table_says(
    state: MembershipState, trigger: MembershipTrigger, machine: MembershipMachine
) -> None:
    machine.state, machine.broken = state, state not in INTACT
    to = MEMBERSHIP_TRANSITIONS[state].get(trigger)
    if to is not None:
        machine._move(trigger)
        assert (machine.state, machine.broken) == (to, to not in INTACT)
        return
    with pytest.raises(InvalidTransition, match=f"is {state} and cannot {trigger}"):
        machine._move(trigger, Generation(9))
    assert (machine.state, machine.broken, machine.generation) == (state, state not in INTACT, 1)


@pytest.mark.parametrize(("state", "trigger"), [*product(UnitState, UnitTrigger)])
def test_a_unit_moves_as_its_table_says(state: UnitState, trigger: UnitTrigger, machine: MembershipMachine) -> None:
    machine.unit = state
    to = UNIT_TRANSITIONS[state].get(trigger)
    if to is not None:
        machine._move_unit(trigger)
        assert machine.unit is to
        return
    with pytest.raises(InvalidTransition, match=f"is {state} and cannot {trigger}"):
        machine._move_unit(trigger)
    assert machine.unit is state


def test_an_impossible_transition_tells_what_led_there(machine: MembershipMachine) -> None:
    breaks(machine)
    with pytest.raises(InvalidTransition, match=r"generation 1 is broken and cannot join \(") as found:
        machine.join(plan_of(2))
    assert found.value.story == ("plan", "join", "break")


def test_the_machine_needs_no_torch_and_no_thread() -> None:
    code = (
        "import sys; import rackrun.worker.membership.decisions.membership_machine; "
        "assert not {'torch', 'numpy', 'threading', 'time'} & (sys.modules.keys() - before), sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", f"import sys, msgspec; before = {{*sys.modules}}; {code}"], check=True, cwd=ROOT
    )


# -- the shell around it -----------------------------------------------------------------------------------------------
MINE = Member(rank=Rank(0), slot=SlotId("t/0"), incarnation=Incarnation(1), fresh=True)


@pytest.mark.parametrize("ended", ["whole", "failed"])
@pytest.mark.parametrize("breaks_at", ["before", "meanwhile", "never"])
@pytest.mark.parametrize("upto", [FIRST, SECOND])
def test_a_unit_counts_if_its_gate_passed_before_the_report_or_the_plan_says_so(
    ended: str, breaks_at: str, upto: Position, world: WorkerMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (ended, breaks_at) == ("failed", "never"):
        return  # the coordinator hears of it, and breaks the generation
    world.create_default(0, 2)
    world.machine.start_alone(Generation(1))
    world.set_position(FIRST, SUMS.values)
    world.begin_unit(phase=False)
    reports: list[WorkerParked | None] = []

    def broken() -> None:
        command = BreakGeneration(generation=Generation(2), workers=(), because="a test")
        reports.append(world.on_break(command, lambda: ()))

    def summed(_: Any) -> list[float]:
        if ended == "failed":
            world.collective_failed(1, RuntimeError("reset"))
        if breaks_at == "meanwhile":
            broken()
            world.on_plan(plan_of(2, upto, OTHERS.values), MINE)
        return [2.0, 2.0 * SECOND.step, 0.0, 0.0, 0.0, *OTHERS.values]

    monkeypatch.setattr(world, "_sum", summed)
    if breaks_at == "before":
        broken()
    counts = breaks_at == "never" or (breaks_at == "meanwhile" and upto == SECOND)
    try:
        world.pass_gate(SECOND, np.zeros(1), lambda at, sums: False)
        assert counts
    except Abandoned:
        assert not counts
    assert world.unit_passed == world.updated == counts
    assert world.passed == (SECOND if counts else FIRST)
    assert world.gate == (OTHERS if counts else SUMS)
    if breaks_at != "never":
        [report] = reports
        assert report is not None
        assert (report.passed, report.gate) == (FIRST, SUMS.values)
        assert report.entered == (FIRST if breaks_at == "before" else SECOND)
