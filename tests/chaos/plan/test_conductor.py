"""How a plan is carried out, in a job of which only steps and times are told."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.return_tray import Return
from rackrun.chaos.faults.targets import Exactly, Last, One, Scene, Several, Subject
from rackrun.chaos.plan.conductor import TARGET_PATIENCE_S, Conductor, Observation, Order, StrikeOrder, TakeBack
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
)

RANK, TRAY = Subjects.RANK, Subjects.TRAY
KILL = Inject(fault=Kill(), target=One(RANK))


@dataclass
class Played:
    """A job of steps that take a second. Whoever is killed is gone, and returns when told to; ``fails``: strikes that do not take."""

    scene: Scene
    part: Part
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    last_step: int | None = None
    fails: frozenset[int] = frozenset()
    points: dict[str, int] = field(default_factory=dict)
    log: list[tuple[float, Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conductor = Conductor(Plan(plan=self.part, seed=self.seed, budget=self.budget), last_step=self.last_step)
        self.whole = self.scene

    def play(self, until_s: float) -> Played:
        now = 0.0
        while now <= until_s and not self.conductor.done:
            self._obey(now, self.conductor.see(Observation(now, int(now) - 1, self.scene, self.points)))
            wake = self.conductor.wake_s
            now = min(int(now) + 1.0, wake if wake is not None and wake > now else now + 1.0)
        return self

    def _obey(self, now: float, orders: list[Order]) -> None:
        for order in orders:
            self.log.append((round(now, 3), order))
            if isinstance(order, StrikeOrder):
                took = order.number not in self.fails
                if took:
                    self._strike(order)
                self._obey(now, self.conductor.confirm(order.number, took=took))

    def _strike(self, order: StrikeOrder) -> None:
        for subject in order.subjects:
            of = {place.slot for place in self.whole.places if subject.name in (str(place.rank), place.tray)}
            live = [place for place in self.scene.places if place.slot not in of]
            if isinstance(order.fault, Return):
                live += [replace(p, incarnation=p.incarnation + 1) for p in self.whole.places if p.slot in of]
            if isinstance(order.fault, Return | Kill):
                self.scene = replace(self.scene, places=tuple(live))

    @property
    def strikes(self) -> list[tuple[float, tuple[str, ...]]]:
        return [
            (now, tuple(s.name for s in order.subjects)) for now, order in self.log if isinstance(order, StrikeOrder)
        ]

    @property
    def taken_back(self) -> list[float]:
        return [now for now, order in self.log if isinstance(order, TakeBack)]


def at(step: int, plus_s: float = 0.0) -> Inject:
    return Inject(fault=Kill(), target=One(RANK), when=AtStep(step=step, plus_s=plus_s))


def test_a_fault_strikes_after_its_step_and_so_long_into_the_next(scene: Scene) -> None:
    assert [now for now, _ in Played(scene, Seq(parts=(at(3), at(5, 0.25)))).play(20).strikes] == [4.0, 6.25]


def test_a_moment_that_has_passed_is_now(scene: Scene) -> None:
    assert [now for now, _ in Played(scene, Seq(parts=(at(5), at(2)))).play(20).strikes] == [6.0, 6.0]


def test_times_count_from_the_first_committed_step(scene: Scene) -> None:
    timed = Inject(fault=Kill(), target=One(RANK), when=AtTime(s=2.5))
    assert [now for now, _ in Played(scene, timed).play(20).strikes] == [3.5]


def test_a_point_counts_from_the_start(scene: Scene) -> None:
    pointed = Inject(fault=Kill(), target=One(RANK), when=AtPoint(point="saved", nth=3))
    assert not Played(scene, pointed, points={"saved": 2}).play(9).strikes
    assert Played(scene, pointed, points={"saved": 3}).play(9).strikes


def test_parts_of_a_sequence_wait_for_each_other_and_those_beside_each_other_do_not(scene: Scene) -> None:
    pause = Inject(fault=Pause(for_s=3), target=One(TRAY))
    assert [now for now, _ in Played(scene, Seq(parts=(pause, KILL))).play(20).strikes] == [0.0, 3.0]
    assert [now for now, _ in Played(scene, Par(parts=(pause, KILL))).play(20).strikes] == [0.0, 0.0]


def test_what_lasts_is_taken_back_after_its_time_or_when_the_plan_heals(scene: Scene) -> None:
    assert Played(scene, Inject(fault=Pause(for_s=3), target=One(TRAY))).play(20).taken_back == [3.0]
    forever = Inject(fault=Pause(), target=One(TRAY))
    assert not Played(scene, forever).play(20).taken_back
    assert Played(scene, Seq(parts=(forever, Inject(fault=Kill(), target=One(RANK), when=Now(plus_s=4)), Heal()))).play(
        20
    ).taken_back == [4.0]


def test_quiet_lasts_until_the_job_has_got_on(scene: Scene) -> None:
    assert [now for now, _ in Played(scene, Seq(parts=(at(2), Quiet(steps=4), KILL))).play(20).strikes] == [3.0, 7.0]


def test_quiet_ends_with_the_last_step_so_that_what_lasts_is_taken_back_from_a_job_that_waits_for_it(
    scene: Scene,
) -> None:
    lasting = Inject(fault=Pause(), target=One(TRAY), when=AtStep(step=6))
    assert Played(scene, Seq(parts=(lasting, Quiet(steps=4), Heal())), last_step=8).play(20).taken_back == [9.0]


def test_again_and_again_follows_an_exponential_distribution(scene: Scene) -> None:
    pause = Inject(fault=Pause(for_s=0.001), target=One(TRAY))
    strikes = Played(scene, Every(mean_s=5, times=2000, part=pause)).play(1e6).strikes
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(strikes)]
    assert 4.5 < sum(gaps) / len(gaps) < 5.5
    assert 0.30 < sum(gap > 5 for gap in gaps) / len(gaps) < 0.43, (
        "1/e of an exponential distribution is above its mean"
    )


def test_a_burst_is_over_in_its_time(scene: Scene) -> None:
    moments = [now for now, _ in Played(scene, Burst(times=5, within_s=2, part=KILL)).play(20).strikes]
    assert len(moments) == 5
    assert moments == sorted(moments)
    assert 0 <= moments[0] < moments[-1] <= 2


def test_a_flip_flop_comes_and_goes(scene: Scene) -> None:
    played = Played(scene, FlipFlop(fault=Pause(), target=One(TRAY), on_s=2, off_s=3, times=2)).play(50)
    assert [now for now, _ in played.strikes] == [0.0, 5.0]
    assert played.taken_back == [2.0, 7.0]


def test_a_swizzle_stops_one_by_one_and_heals_in_another_order(scene: Scene) -> None:
    swizzle = Swizzle(fault=Pause(), target=Several(RANK, 6), over_s=3)
    orders = set()
    for seed in range(5):
        played = Played(scene, swizzle, seed=seed).play(50)
        struck = [names for _, names in played.strikes]
        back = [
            played.conductor.records[o.number].strike.subjects[0].name for _, o in played.log if isinstance(o, TakeBack)
        ]
        assert sorted(name for (name,) in struck) == sorted(back)
        orders.add((tuple(struck), tuple(back)))
        assert max(now for now, _ in played.strikes) <= 3 <= min(played.taken_back) + 3
    assert len(orders) == 5


def test_what_would_exceed_the_budget_waits_until_something_is_back(scene: Scene) -> None:
    back = Inject(fault=Return(), target=Last(TRAY), when=AtStep(step=8))
    lose = Inject(fault=Kill(), target=One(TRAY), when=AtStep(step=1))
    plan = Par(parts=(lose, lose, back))
    assert [now for now, _ in Played(scene, plan, budget=Budget(trays=1)).play(30).strikes] == [2.0, 9.0, 10.0]
    assert [now for now, _ in Played(scene, plan).play(30).strikes] == [2.0, 2.0, 9.0]


def test_a_swizzle_keeps_to_the_budget(scene: Scene) -> None:
    killed_first = Seq(parts=(KILL, Swizzle(fault=Pause(), target=One(TRAY), over_s=1)))
    assert len(Played(scene, killed_first, budget=Budget(slots=1)).play(30).strikes) == 1
    assert len(Played(scene, killed_first, budget=Budget(slots=4)).play(30).strikes) == 2


@pytest.mark.parametrize(
    ("part", "owes"),
    [
        (Every(mean_s=3, part=KILL), False),
        (Every(mean_s=1e6, part=KILL), True),
        (Par(parts=(Every(mean_s=3, part=KILL), at(5))), False),
        (Par(parts=(Every(mean_s=3, part=KILL), at(500))), True),
        (Seq(parts=(Every(mean_s=3, part=KILL), at(0))), True),
        (at(500), True),
        (Seq(parts=(at(5), Quiet(steps=1))), False),
    ],
)
def test_what_has_never_struck_is_owed_though_another_part_goes_on_for_ever(
    part: Part, owes: bool, scene: Scene
) -> None:
    assert Played(scene, part).play(60).conductor.owes is owes


NO_RANK = Inject(fault=Kill(), target=Exactly(RANK, ("77",)))


def test_without_a_target_nothing_is_struck_and_that_is_told(scene: Scene) -> None:
    played = Played(scene, Seq(parts=(NO_RANK, KILL))).play(60)
    assert [now for now, _ in played.strikes] == [TARGET_PATIENCE_S]
    assert "there is no rank 77 now" in played.conductor.nobody[0]


def test_a_strike_waits_for_somebody_to_strike(scene: Scene) -> None:
    """It draws whom it takes only then."""
    played = Played(replace(scene, places=scene.places[:1]), Inject(fault=Kill(), target=Several(RANK, 2)))
    assert not played.play(4).strikes
    played.scene = played.whole = scene
    assert played.play(5).strikes == Played(scene, played.part).play(5).strikes
    assert not played.conductor.nobody


def test_a_flip_flop_that_waits_for_its_target_takes_back_its_own_fault_alone(scene: Scene) -> None:
    flip = FlipFlop(fault=Pause(), target=Several(RANK, 2), on_s=2, off_s=1, times=1)
    pause = Inject(fault=Pause(for_s=60), target=One(RANK), when=AtTime(s=2))
    played = Played(replace(scene, places=scene.places[:1]), Par(parts=(flip, pause))).play(5)
    played.scene = played.whole = scene
    played.play(9)
    taken_back = [order.number for _, order in played.log if isinstance(order, TakeBack)]
    assert [len(names) for _, names in played.strikes] == [1, 2]
    assert taken_back == [1]


def test_a_strike_without_a_target_waits_for_no_budget(scene: Scene) -> None:
    missing = replace(scene, places=scene.places[1:])
    played = Played(scene, NO_RANK, budget=Budget(slots=0))
    played.play(1)
    played.scene = missing
    played.play(60)
    assert len(played.conductor.nobody) == 1
    assert played.conductor.done


def test_a_strike_that_waits_for_its_budget_asks_for_no_other_look(scene: Scene) -> None:
    """It comes when somebody is back; until then there is nothing to see."""
    played = Played(scene, Seq(parts=(KILL, KILL)), budget=Budget(slots=1)).play(60)
    assert len(played.strikes) == 1
    assert played.conductor.wake_s is None


def test_what_did_not_take_is_not_taken_back_and_is_not_in_the_record(scene: Scene) -> None:
    pause = Inject(fault=Pause(for_s=2), target=One(TRAY))
    played = Played(scene, Seq(parts=(pause, KILL)), fails=frozenset({0})).play(9)
    assert not played.taken_back
    assert [record.took for record in played.conductor.records] == [False, True]
    assert played.conductor.resolved().plan.parts[0].fault == Kill()  # type: ignore[union-attr]


STORM = Par(
    parts=(
        Every(mean_s=3, times=6, part=KILL),
        Every(mean_s=4, times=5, part=Inject(fault=Pause(for_s=1.5), target=One(TRAY))),
        FlipFlop(fault=Pause(), target=One(RANK), on_s=1, off_s=2, times=3),
    )
)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_orders_and_another_seed_others(seed: int, scene: Scene) -> None:
    first = Played(scene, STORM, seed=seed).play(100)
    assert first.log == Played(scene, STORM, seed=seed).play(100).log
    assert first.log != Played(scene, STORM, seed=seed + 1).play(100).log


def test_a_part_more_does_not_move_the_others(scene: Scene) -> None:
    more = Par(parts=(*STORM.parts, Inject(fault=Pause(for_s=1), target=Exactly(TRAY, ("t0",)), when=AtStep(step=7))))
    without = [entry for entry in Played(scene, STORM).play(100).strikes if entry[1] != ("t0",)]
    assert without == [entry for entry in Played(scene, more).play(100).strikes if entry[1] != ("t0",)]


@pytest.mark.parametrize("seed", range(5))
def test_the_record_as_a_plan_strikes_the_same_at_the_same_times(seed: int, scene: Scene) -> None:
    first = Played(scene, STORM, seed=seed).play(100)
    again = Played(scene, first.conductor.resolved().plan).play(100)
    assert again.strikes == first.strikes
    assert sorted(again.taken_back) == pytest.approx(sorted(first.taken_back), abs=0.01)


def test_all_orders_of_a_plan_name_what_they_strike(scene: Scene) -> None:
    for _, order in Played(scene, STORM).play(100).log:
        if isinstance(order, StrikeOrder):
            assert all(isinstance(subject, Subject) and subject.name for subject in order.subjects)
