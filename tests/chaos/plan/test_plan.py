"""Plans as text."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.faults import fault_types
from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.hold_gil import HoldGil
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.hardware.xid_error import Xid
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.table.fault_table import all_faults
from rackrun.chaos.faults.targets import BuddyOf, Exactly, Last, Minority, One, Several, Target
from rackrun.chaos.oracles import ORACLES
from rackrun.chaos.plan.definition import (
    AtPoint,
    AtStep,
    AtTime,
    Budget,
    Burst,
    Every,
    FlipFlop,
    Heal,
    Inject,
    Now,
    Par,
    Part,
    Plan,
    Quiet,
    Seq,
    Swizzle,
    Trigger,
    plan_from,
    read_plan,
    schema,
    write_plan,
)

RANK, TRAY = Subjects.RANK, Subjects.TRAY
TRIGGERS = st.one_of(
    st.builds(Now, plus_s=st.floats(0, 9)),
    st.builds(AtStep, step=st.integers(-1, 99), plus_s=st.floats(0, 9)),
    st.builds(AtPoint, point=st.sampled_from(["a", "b.c"]), nth=st.integers(1, 3)),
    st.builds(AtTime, s=st.floats(0, 99)),
)
STRIKES = st.one_of(
    st.tuples(
        st.builds(Kill), st.sampled_from([One(RANK), Several(TRAY, 2), BuddyOf(Last(RANK)), Exactly(RANK, ("3", "4"))])
    ),
    st.tuples(
        st.builds(Pause, for_s=st.one_of(st.none(), st.floats(0, 9))), st.sampled_from([Minority(RANK), One(TRAY)])
    ),
    st.tuples(st.builds(Xid, code=st.integers(1, 200)), st.just(One(RANK))),
    st.tuples(st.builds(FlipBit), st.just(One(RANK))),
)
INJECTS = st.builds(lambda strike, when: Inject(fault=strike[0], target=strike[1], when=when), STRIKES, TRIGGERS)
PARTS = st.recursive(
    st.one_of(
        INJECTS,
        st.just(Heal()),
        st.builds(Quiet, steps=st.integers(1, 9)),
        st.builds(
            FlipFlop, fault=st.just(Pause()), target=st.just(One(TRAY)), on_s=st.floats(0.1, 9), off_s=st.floats(0.1, 9)
        ),
        st.builds(Swizzle, fault=st.just(Pause()), target=st.just(Minority(RANK)), over_s=st.floats(0.1, 9)),
    ),
    lambda inner: st.one_of(
        st.builds(Seq, parts=st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Par, parts=st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Every, mean_s=st.floats(0.1, 9), part=inner, times=st.one_of(st.none(), st.integers(1, 5))),
        st.builds(Burst, times=st.integers(1, 5), within_s=st.floats(0.1, 9), part=inner),
    ),
    max_leaves=6,
)


@given(part=PARTS, seed=st.integers(0, 2**32))
def test_what_is_written_is_read_back_the_same(
    part: Inject, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = Plan(plan=part, seed=seed, budget=Budget(slots=2))
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(write_plan(plan))
    assert read_plan(path) == plan


INJECT = "{do: inject, fault: {fault: kill}, target: {who: one, of: rank}}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("plan: {do: inject, fault: {fault: kil}, target: {who: one, of: rank}}", r"'kil' - at `\$.plan.fault.fault`"),
        ("plan: {do: inject, fault: {fault: kill}, target: {who: one, of: gpu}}", r"'gpu' - at `\$.plan.target.of`"),
        ("plan: {do: inject, fault: {fault: kill}, target: {who: one, of: storage}}", "kill cannot strike a storage"),
        ("plan: {do: inject, fault: {fault: pause, fors: 1}, target: {who: one, of: rank}}", "unknown field `fors`"),
        (f"plan: {{do: every, mean_s: -3, part: {INJECT}}}", "mean_s is -3"),
        (f"plan: {{do: burst, times: 0, within_s: 1, part: {INJECT}}}", "times is 0"),
        (
            "plan: {do: inject, when: {at: step, step: -2}, fault: {fault: kill}, target: {who: one, of: rank}}",
            "before the start",
        ),
        (
            "plan: {do: inject, when: {at: time, s: -1}, fault: {fault: kill}, target: {who: one, of: rank}}",
            "in the past",
        ),
        (
            "plan: {do: flip_flop, on_s: 1, off_s: 1, fault: {fault: kill}, target: {who: one, of: rank}}",
            "kill does not last",
        ),
        ("plan: {do: seq, parts: []}", "no parts"),
        ("plan: {do: quiet, steps: 0}", "quiet for 0 steps"),
        ("plan: {do: heal}\nbudget: {slots: -1}", "a budget of -1 slots"),
        ("plan: {do: heal}\nformat: 2", "format 2 is not known"),
        ("plan: {do: heal}\nexpect: luck", "'luck'"),
        ("plan: [", r"plan.yaml:1: no YAML"),
        ("plan: {do: inject, fault: {fault: kill}, target: {who: one, of: rnk}}", "did you mean rank"),
        ("plan: {do: inject, fault: {fault: pause, for_s: -1}, target: {who: one, of: rank}}", "for_s is -1"),
        ("plan: {do: inject, fault: {fault: step_clock, by_s: .inf}, target: {who: one, of: agent}}", "by_s is inf"),
        ("plan: {do: inject, fault: {fault: slow, share: .nan}, target: {who: one, of: rank}}", "share is nan"),
        ("plan: {do: inject, fault: {fault: raise, error: print}, target: {who: one, of: rank}}", "no error 'print'"),
        (
            "plan: {do: inject, fault: {fault: crash_at, point: gate.before, nth: 0}, target: {who: one, of: rank}}",
            "the 0th time",
        ),
        (
            "plan: {do: inject, when: {at: time, s: .nan}, fault: {fault: kill}, target: {who: one, of: rank}}",
            "s is nan",
        ),
        (f"plan: {{do: every, mean_s: .inf, part: {INJECT}}}", "mean_s is inf"),
        (
            "plan: {do: swizzle, over_s: 1, fault: {fault: pause}, target: {who: several, of: rank, count: 2}}\nbudget: {slots: 1}",
            "never fits into a budget of 1 slots",
        ),
        ("", "is empty, not a mapping"),
        ("- a\n- b", "is a list, not a mapping"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=what):
        read_plan(path)


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("{who: several, of: rank, count: 0}", "0 ranks"),
        ("{who: exactly, kind: rank}", "ranks without names"),
        ("{who: exactly, kind: rank, names: []}", "ranks without names"),
        ("{who: exactly, kind: rank, names: ['1', '1']}", "rank 1 is named twice"),
        ("{who: exactly, kind: rank, names: [1]}", "put numbers in quotes"),
        ("{who: exactly, kind: coordinator, names: ['0']}", "the coordinator has no name"),
        ("{who: neighbour_of, whom: {who: one, of: coordinator}}", "the coordinator has no neighbour"),
        ("{who: buddy_of, whom: {who: one, of: spare}}", "a spare has no buddy"),
        ("{who: buddy_of, whom: {who: several, of: rank, count: -1}}", "-1 ranks"),
    ],
)
def test_a_target_that_is_nobody_in_any_job_is_refused(target: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"plan: {{do: inject, fault: {{fault: kill}}, target: {target}}}")
    with pytest.raises(PlanError, match=what):
        read_plan(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.yaml cannot be read"):
        read_plan(tmp_path / "nowhere.yaml")


def test_what_ends_by_itself_cannot_be_taken_back() -> None:
    swizzled = Swizzle(fault=HoldGil(), target=One(RANK), over_s=1)
    with pytest.raises(PlanError, match="hold_gil does not last"):
        plan_from(
            {
                "plan": {
                    "do": "swizzle",
                    "fault": {"fault": "hold_gil"},
                    "target": {"who": "one", "of": "rank"},
                    "over_s": 1,
                }
            }
        )
    assert not swizzled.fault.lasts


def test_every_fault_has_a_family_and_something_to_strike_and_is_in_the_schema() -> None:
    names = [fault_types.name_of(fault) for fault in all_faults()]
    assert len(set(names)) == len(names)
    text = str(schema())
    for fault in all_faults():
        assert fault.family in fault_types.Family
        assert fault.strikes
        assert f"'{fault_types.name_of(fault)}'" in text


# -- the documentation
def test_all_that_a_plan_may_say_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "chaos.md").read_text()
    kinds = [*get_args(Part), *get_args(Trigger), *get_args(Target), *all_faults()]
    names = [str(kind.__struct_config__.tag) for kind in kinds]
    names += [*Subjects, *ORACLES, *(field.name for field in msgspec.structs.fields(Plan) if field.name != "format")]
    assert [name for name in names if f"`{name}`" not in page] == []
