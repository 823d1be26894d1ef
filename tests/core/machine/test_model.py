"""The core against a model of the world, over thousands of orders of events and faults.

``RACKRUN_HYPOTHESIS=large`` plays far more of them, each run other ones.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from tests.core.core_model import SHORT, TIMEOUTS, Cluster

SMALL = settings(
    max_examples=300,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
LARGE = settings(SMALL, max_examples=5000, stateful_step_count=150, derandomize=False)
PICK = st.integers(min_value=0, max_value=10_000)
SEED = st.integers(min_value=0, max_value=2**30)


class Play(RuleBasedStateMachine):
    """Rules are what can happen; Hypothesis chooses the order."""

    cluster: Cluster

    @initialize(
        trays=st.integers(1, 4),
        slots=st.integers(1, 3),
        spares=st.integers(0, 4),
        shards=st.sampled_from(["replicas", "pairs", "unique"]),
        units=st.integers(1, 12),
        warm=st.sampled_from([True, True, True, False]),
    )
    def begin(self, trays: int, slots: int, spares: int, shards: str, units: int, warm: bool) -> None:
        config = JobConfig(
            trays_min=trays, trays_max=trays, spares=min(spares, trays * slots - 1), max_restarts=3, no_progress_max=20
        )
        self.cluster = Cluster(config, slots, units, shards)
        for number in range(trays):
            self.cluster.join(TrayId(f"tray-{number}"))
        while warm and self.cluster.core.view().phase == "setup":
            self.cluster.do(*self.cluster.actions()[0])

    @property
    def going(self) -> bool:
        return self.cluster.stopped is None

    def _busy(self) -> bool:
        return self.going and bool(self.cluster.actions())

    @precondition(_busy)
    @rule(seed=SEED, times=st.sampled_from([1, 3, 10, 30]))
    def something_happens(self, seed: int, times: int) -> None:
        order = random.Random(seed)  # bursts in an order of their own: deep histories out of few choices
        for _ in range(times):
            actions = self.cluster.actions()
            if actions and self.going:
                self.cluster.do(*order.choice(actions))
                self.cluster.check()

    @precondition(_busy)
    @rule(seed=SEED, whom=PICK)
    def all_but_one_go_on(self, seed: int, whom: int) -> None:
        order = random.Random(seed)
        slow = list(self.cluster.processes)[whom % len(self.cluster.processes)]
        for _ in range(20):
            actions = [(name, p) for name, p in self.cluster.actions() if (p.slot, p.incarnation) != slow]
            if actions and self.going:
                self.cluster.do(*order.choice(actions))
                self.cluster.check()

    @precondition(lambda self: self.going and self.cluster.pending(*SHORT))
    @rule()
    def a_window_closes(self) -> None:
        self.cluster.fire(self.cluster.pending(*SHORT)[0])

    @precondition(lambda self: self.going and self.cluster.pending(*TIMEOUTS))
    @rule(really=st.integers(0, 3))
    def a_timeout_passes(self, really: int) -> None:
        if really == 0:
            self.cluster.fire(self.cluster.pending(*TIMEOUTS)[0])

    @precondition(lambda self: self.going)
    @rule(pick=PICK, how=st.sampled_from(["kill", "kill", "kill", "segv", "bug", "hang", "silent", "leave"]))
    def a_worker_fails(self, pick: int, how: str) -> None:
        alive = [process for process in self.cluster.processes.values() if process.alive]
        if not alive:
            return
        process = alive[pick % len(alive)]
        match how:
            case "kill":
                self.cluster.workers.end(process, signal=9)
            case "segv":
                self.cluster.workers.end(process, signal=11)
            case "bug":
                self.cluster.workers.end(process, code=1, bug=f"train.py:{pick}")
            case "leave" if process.state != "starting":  # a plain script may leave when it likes
                self.cluster.workers.end(process, code=0)
            case "hang":
                process.hung = process.hung or ("code" if process.state == "running" else "")
            case "silent":
                process.hung = "silent"
            case _:
                pass

    @rule()
    def time_passes(self) -> None:
        """Also when all is over: Hypothesis always finds a rule."""

    @precondition(lambda self: self.going)
    @rule()
    def the_fabric_jams(self) -> None:
        self.cluster.workers.jammed.add(self.cluster.announced)

    @precondition(lambda self: self.going and any(self.cluster.up_trays.values()))
    @rule(pick=PICK, really=st.integers(0, 2))
    def a_tray_dies(self, pick: int, really: int) -> None:
        up = [tray for tray, alive in self.cluster.up_trays.items() if alive]
        if really == 0:
            self.cluster.tray_dies(up[pick % len(up)])

    @precondition(lambda self: self.going and not all(self.cluster.up_trays.values()))
    @rule(pick=PICK)
    def a_lease_lapses(self, pick: int) -> None:
        dead = [tray for tray, alive in self.cluster.up_trays.items() if not alive]
        self.cluster.lease_lapses(dead[pick % len(dead)])

    @precondition(lambda self: self.going)
    @rule(number=st.integers(0, 3))
    def a_tray_joins(self, number: int) -> None:
        tray = TrayId(f"tray-{number}")
        if tray not in self.cluster.up_trays:
            self.cluster.join(tray)

    @invariant()
    def histories_agree(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            end = self.cluster.run_to_the_end()
            assert end.because
            assert end.exit_code in (0, 1, 3)


TestPlay = Play.TestCase
TestPlay.settings = LARGE if os.environ.get("RACKRUN_HYPOTHESIS") == "large" else SMALL
