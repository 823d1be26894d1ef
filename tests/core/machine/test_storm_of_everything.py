"""Storms in which everything meets: each seed draws a job with all that there is, and some kinds of what may happen to it."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import Command, DealShards, GenerationPlan, ReleaseRack, RequestRack
from rackrun.protocol.events import Event
from rackrun.protocol.job_config import JobConfig, SlowRanks
from tests.core.core_followed import Followed, FollowedCore
from tests.core.core_model import Cluster
from tests.core.machine.test_storms import ASKED, HEALTH, KINDS, SIZED, play

SEEDS = 20_000 if os.environ.get("RACKRUN_HYPOTHESIS") == "large" else 250
ORDERS = (
    "",
    "no-wait",
    "swap,move,shrink,wait,restart",
    "swap,acquire-wait,shrink,wait,restart",
    "swap,acquire-train,wait,restart",
    "swap,acquire",
    "swap,hold",
    "swap,move,wait,hold,restart",
)
SLOW: tuple[SlowRanks, ...] = ("notice", "swap", "shift", "swap,shift")
MIXED = [
    *KINDS,
    *ASKED,
    *SIZED,
    *SIZED,
    *HEALTH,
    *["fit", "unfit", "slow", "slow", "slow", "close", "lie", "lie", "nan"],
    *["provider"] * 8,
]


class _Core(FollowedCore):
    """It keeps what it was told, as a journal has it."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.journal: list[tuple[bytes, Sequence[Command]]] = []

    def handle(self, event: Event) -> Sequence[Command]:
        commands = super().handle(event)
        self.journal.append((msgspec.json.encode(event), commands))
        return commands


class _Journalled(Followed):
    def __init__(self, config: JobConfig, slots: int, units: int, shards: str, *, racks: bool = False) -> None:
        super().__init__(config, slots, units, shards, racks=racks)
        self.core = _Core(config)


def storm_of_everything(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 4), rng.randint(1, 3)
    racks = rng.random() < 0.4
    pairs = (trays * slots - 1) // 2
    tied = pairs > 0 and rng.random() < 0.3
    pairs = rng.randint(1, pairs) if tied else 0
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=0 if tied else rng.choice([0, 1, min(3, trays * slots - 1)]),
        mesh=(("dp", pairs), ("tp", 2)) if tied else (),
        cross_clique=rng.random() < 0.3,
        start_over=rng.random() < 0.6,
        max_restarts=rng.choice([0, 4]),
        no_progress_max=20,
        min_ranks=rng.choice([0, 1, 1, 2]),
        slow_ranks=rng.choice(SLOW),
        provider=rng.choice(["", "local", "local"]),
        repair_patience_ms=rng.choice([0, 0, 100_000]),
        rules=parse_rules(rng.choice(ORDERS)),
        snapshot_copies=rng.choice(["mirror", "xor", "local"]),
        set_size=rng.randint(2, 4),
    )
    shards = rng.choice(["replicas", "pairs", "unique"])
    cluster = kind(config, slots, rng.randint(10, 40), "pairs" if tied else shards, racks=racks)
    cluster.workers.exact, cluster.workers.reenters = rng.random() < 0.7, rng.random() < 0.7
    cluster.trays_come, cluster.agents_return = rng.random() < 0.5, seed % 3 == 0
    kinds = rng.sample(MIXED, rng.randint(8, 30))
    return play(cluster, trays, rng, kinds, rng.choice([0.02, 0.05, 0.15]))


def test_in_a_storm_of_everything_each_story_ends_with_one_history_or_with_a_reason(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            cluster = storm_of_everything(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        plans: list[GenerationPlan] = list(cluster.plans.values())
        told = "\n".join(cluster.log)
        seen["asked"] += RequestRack.__name__ in told
        seen["released"] += ReleaseRack.__name__ in told
        seen["dealt"] += DealShards.__name__ in told
        seen["back"] += any(plan.anew for plan in plans)
        seen["cut anew"] += cluster.reshards > 0
        seen["held"] += "all ranks wait in a hold" in told
        seen["asked to shrink"] += any(name.startswith("shrink") for name in cluster.answers)
    assert seen["exit 0"] > len(seeds) / 5, seen
    assert min(count for what, count in seen.items() if "exit" not in what) > len(seeds) / 100, seen


def test_a_journal_of_everything_told_once_more_gives_the_same_commands_and_a_replay_knows_the_same() -> None:
    for seed in range(SEEDS // 5):
        try:
            cluster = storm_of_everything(seed, _Journalled)
            assert isinstance(cluster.core, _Core)
            again = ControlPlane(cluster.core_config)
            for event, commands in cluster.core.journal:
                assert again.handle(msgspec.json.decode(event, type=Event)) == commands
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
