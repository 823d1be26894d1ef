"""Long storms of faults over warm jobs: deeper histories than `test_model` finds, each from its seed alone."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter

import pytest

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import (
    BreakerClosed,
    DepartureAnnounced,
    DeviceChecked,
    DeviceJudged,
    DrainRequested,
    Event,
    GrowRequested,
    LossNotRepeated,
    PolicyRequested,
    RackDelivered,
    RackPreempted,
    RackRefused,
    ReplicasDiffer,
    ReturnRequested,
    ShrinkRequested,
    SlowRanksChanged,
    SwapRequested,
    TrayStoodStill,
)
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import (
    Generation,
    Incarnation,
    Position,
    Rank,
    SlotId,
    Step,
    TrayId,
    slot_id,
    steps_in,
    tray_of,
)
from rackrun.protocol.job_config import JobConfig, SlowRanks
from tests.core.core_followed import Followed, FollowedCore
from tests.core.core_harness import slow_rank, verdict_on
from tests.core.core_model import SHORT, TIMEOUTS, Cluster, Process

SEEDS = 20_000 if os.environ.get("RACKRUN_HYPOTHESIS") == "large" else 400

NOT_OF_HARDWARE = (
    "planned swap",
    "Waiting for",
    "at the next step boundary",
    "growing has failed",
    "rack ",
    "had finished training",
    "all ranks wait in a hold",
)
HEALTH = {
    "degraded": Health.DEGRADED,
    "lost": Health.LOST,
    "app": Health.APP,
    "fabric": Health.FABRIC,
    "well": Health.OK,
}
ASKED = ["drain", "drain", "drain and wait", "return", "return", "swap", "swap", "swap", "notice", "grace"]
SIZED = ["shrink", "shrink", "grow", "grow", "policy"]
KINDS = ["kill", "kill", "kill", "segv", "bug", "hang", "silent", "jam", "tray", "timeout", "pair", "rot"]


def storm(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    rng = random.Random(seed)
    trays, slots, units = rng.randint(1, 4), rng.randint(1, 3), rng.randint(5, 40)
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=rng.randint(0, min(4, trays * slots - 1)),
        max_restarts=4,
        start_over=rng.random() < 0.7,
        no_progress_max=20,
        min_ranks=rng.choice([0, 1, 2]),
        rules=parse_rules(rng.choice(["", "swap,move,shrink,wait,restart"])),
    )
    cluster = kind(config, slots, units, rng.choice(["replicas", "replicas", "pairs", "unique"]))
    cluster.workers.exact, cluster.workers.reenters = rng.random() < 0.7, rng.random() < 0.5
    cluster.agents_return = seed % 3 == 0
    return play(cluster, trays, rng, KINDS, rng.choice([0.005, 0.02, 0.05]))


def storm_of_trays(seed: int) -> Cluster:
    """Every shard is a rank's own, one tray waits, and nearly all that is lost is a tray."""
    rng = random.Random(seed)
    trays, slots = rng.randint(4, 5), rng.randint(1, 2)
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=slots,
        start_over=True,
        no_progress_max=20,
        snapshot_copies="xor",
        set_size=rng.randint(2, 5),
    )
    cluster = Cluster(config, slots, rng.randint(10, 40), "unique")
    return play(cluster, trays, rng, ["tray", "tray", "tray", "kill", "timeout", "rot"], 0.01)


def storm_in_racks(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    """GPUs are judged, spares are found unfit and fit again, and tensor-parallel pairs are bound to a clique of two trays."""
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 4), rng.randint(2, 3)
    pairs = rng.randint(1, (trays * slots - 1) // 2)
    tied = rng.random() < 0.5
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=0 if tied else rng.randint(0, trays * slots - 1),
        mesh=(("dp", pairs), ("tp", 2)) if tied else (),
        cross_clique=rng.random() < 0.2,
        start_over=rng.random() < 0.7,
        no_progress_max=20,
    )
    cluster = kind(config, slots, rng.randint(5, 40), rng.choice(["replicas", "pairs", "unique"]), racks=True)
    kinds = ["kill", "degraded", "degraded", "lost", "app", "fabric", "well", "well", "unfit", "fit", "tray", "timeout"]
    return play(cluster, trays, rng, [*kinds, "standstill"], rng.choice([0.01, 0.03]))


def storm_of_requests(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    """Trays and slots are drained and returned, ranks are swapped, trays are told to leave; among losses of every kind."""
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 5), rng.randint(1, 3)
    racks = rng.random() < 0.4
    pairs = rng.randint(1, (trays * slots - 1) // 2) if trays * slots > 2 else 0
    tied = racks and pairs > 0 and rng.random() < 0.5
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=0 if tied else rng.randint(1, trays * slots - 1),
        mesh=(("dp", pairs), ("tp", 2)) if tied else (),
        start_over=rng.random() < 0.7,
        max_restarts=4,
        no_progress_max=20,
        snapshot_copies=rng.choice(["mirror", "xor"]),
        set_size=2,
    )
    cluster = kind(config, slots, rng.randint(10, 40), rng.choice(["replicas", "pairs", "unique"]), racks=racks)
    kinds = [
        *ASKED,
        *ASKED,
        "kill",
        "tray",
        "hang",
        "timeout",
        *(["degraded", "unfit", "fit", "well"] if racks else []),
    ]
    return play(cluster, trays, rng, kinds, rng.choice([0.02, 0.05]))


def check(cluster: Cluster, tray: TrayId, index: int, *, fit: bool) -> None:
    if fit:
        cluster.unfit.discard(slot_id(tray, index))
    else:
        cluster.unfit.add(slot_id(tray, index))
    why = () if fit else ("its fabric registration is not completed",)
    cluster.tell(DeviceChecked(tray=tray, index=index, unfit=why))


def some_are_slow(cluster: Cluster, rng: random.Random) -> SlowRanksChanged:
    newest = max(cluster.plans)
    members = cluster.plans[newest].members
    slow = rng.sample(members, rng.randint(0, min(2, len(members))))
    found = tuple(slow_rank(member.rank, member.slot, 1.5 + rng.random()) for member in slow)
    return SlowRanksChanged(generation=Generation(newest), slow=found)


def ask(cluster: Cluster, rng: random.Random, kind: str) -> None:
    leaving = [tray for tray, lives in cluster.up_trays.items() if lives and tray in cluster.departing]
    if kind == "provider":
        provider_acts(cluster, rng)
    elif kind == "grace":  # it is over
        for tray in leaving[:1]:
            cluster.tray_dies(tray)
    elif (event := request(cluster, rng, kind)) is not None:
        cluster.tell(event)


def request(cluster: Cluster, rng: random.Random, kind: str) -> Event | None:
    """Something that a person, or a scheduler, may ask at any moment: also for what there is not."""
    number = len(cluster.answers)
    steps = max((process.passed + 1 for process in cluster.processes.values()), default=0)
    tray = TrayId(f"tray-{rng.randrange(5)}")
    target: str = tray if rng.random() < 0.5 else slot_id(tray, rng.randrange(cluster.slots))
    match kind:
        case "drain" | "drain and wait":
            name = f"drain {number} {target}"
            return DrainRequested(request=name, target=target, wait=kind != "drain", steps=steps)
        case "return":
            target = rng.choice(sorted(cluster.drained)) if cluster.drained else target
            tray_or_slot = rng.choice([target, tray_of(SlotId(target)) or target])
            return ReturnRequested(request=f"return {number}", target=tray_or_slot)
        case "swap":
            spares = [spare.slot for spare in cluster.core.view().spares]
            slot = rng.choice(spares) if spares and rng.random() < 0.5 else slot_id(tray, rng.randrange(cluster.slots))
            rank, to = Rank(rng.randrange(cluster.core.view().world_size + 1)), rng.choice([slot, SlotId("")])
            return SwapRequested(request=f"swap {number}", rank=rank, to=to, steps=steps)
        case "shrink":
            size = cluster.core.view().world_size
            going = tuple(Rank(rng.randrange(size + 1)) for _ in range(rng.randint(1, 2)))
            smaller = rng.randrange(size + 1)
            by_name = rng.random() < 0.5
            return ShrinkRequested(
                request=f"shrink {number}", ranks=going if by_name else (), to=0 if by_name else smaller, steps=steps
            )
        case "grow":
            return GrowRequested(request=f"grow {number}", to=rng.choice([0, 0, rng.randint(1, 6)]))
        case "policy":
            policy = rng.choice(["", "swap,shrink,wait,restart", "no-shrink", "no-swap", "swop", "swap,hold"])
            return PolicyRequested(request=f"policy {number}", policy=policy)
        case _:
            up = [one for one, lives in cluster.up_trays.items() if lives and one not in cluster.departing]
            if len(up) < 2:
                return None
            return DepartureAnnounced(tray=rng.choice(up), because="SIGTERM", exit_code=143)


def storm_of_two_trays(seed: int) -> Cluster:
    """Two at once, of sets that may lose two; two trays wait."""
    rng = random.Random(seed)
    trays = rng.randint(5, 6)
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=2,
        start_over=True,
        no_progress_max=20,
        snapshot_copies="rs",
        set_size=rng.randint(3, 5),
        set_parity=2,
    )
    cluster = Cluster(config, 1, rng.randint(10, 40), "unique")
    return play(cluster, trays, rng, ["trays", "trays", "trays", "tray", "rot"], 0.02)


def storm_of_shards(seed: int) -> Cluster:
    """Hardly any spare, and who is lost is not waited for: all enter main again, with other shards, or with other pairs."""
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 5), rng.randint(1, 2)
    tied = slots == 2 and rng.random() < 0.5
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=0 if tied else rng.randint(0, min(2, trays * slots - 1)),
        mesh=(("dp", trays), ("tp", 2)) if tied else (),
        start_over=rng.random() < 0.5,
        no_progress_max=20,
        min_ranks=1,
        rules=parse_rules("swap,move,shrink,wait,restart"),
        snapshot_copies=rng.choice(["mirror", "xor", "local"]),
    )
    cluster = Cluster(config, slots, rng.randint(5, 40), "pairs" if tied else rng.choice(["pairs", "unique"]))
    cluster.workers.reenters = True
    kinds = ["kill", "kill", "kill", "segv", "hang", "silent", "tray", "timeout", "pair", "rot", "jam"]
    return play(cluster, trays, rng, kinds, rng.choice([0.01, 0.03]))


def storm_of_sizes(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    """The world is made smaller and larger, and its policy is changed, among losses and other requests."""
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 4), rng.randint(1, 3)
    tied = slots == 2 and rng.random() < 0.5
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=0 if tied else rng.randint(0, min(2, trays * slots - 1)),
        mesh=(("dp", trays), ("tp", 2)) if tied else (),
        start_over=rng.random() < 0.7,
        no_progress_max=20,
        min_ranks=rng.choice([1, 1, 2]),
        rules=parse_rules("swap,move,shrink,wait,restart"),
    )
    cluster = kind(config, slots, rng.randint(10, 40), "pairs" if tied else rng.choice(["replicas", "unique"]))
    cluster.workers.reenters = tied or cluster.workers.shards == "unique" or rng.random() < 0.3
    kinds = [*SIZED, *SIZED, "drain", "return", "swap", "kill", "hang", "tray", "timeout", "rot"]
    return play(cluster, trays, rng, kinds, rng.choice([0.02, 0.05]))


def storm_of_slow_ranks(seed: int, kind: type[Cluster] = Cluster, answer: SlowRanks = "swap") -> Cluster:
    """Ranks become slow, and fast again, also while others are lost."""
    rng = random.Random(seed)
    trays, slots = rng.randint(1, 4), rng.randint(2, 3)
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=rng.randint(1, min(3, trays * slots - 1)),
        start_over=True,
        no_progress_max=20,
        slow_ranks=answer,
        min_ranks=0 if answer == "swap" else 1,
    )
    shards = rng.choice(["replicas", "pairs", "unique"])
    cluster = kind(config, slots, rng.randint(10, 40), shards, racks=rng.random() < 0.5)
    kinds = ["slow", "slow", "slow", "slow", "slow", "close", "return", "degraded", "well", "kill", "timeout", "tray"]
    return play(cluster, trays, rng, kinds, 0.03)


def storm_of_racks(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    """Hardly any spare, and a provider that delivers, refuses, fails, lies and takes back at any moment."""
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 4), rng.randint(1, 2)
    order = rng.choice(["", "swap,acquire-wait,shrink,wait,restart", "swap,acquire-train,wait,restart", "swap,acquire"])
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=rng.randint(0, 1),
        start_over=rng.random() < 0.5,
        no_progress_max=20,
        min_ranks=1,
        provider="local",
        rules=parse_rules(order),
    )
    cluster = kind(config, slots, rng.randint(10, 40), rng.choice(["replicas", "replicas", "pairs", "unique"]))
    cluster.workers.exact, cluster.workers.reenters = rng.random() < 0.7, rng.random() < 0.5
    cluster.trays_come = False
    kinds = ["tray", "kill", "segv", "timeout", *["provider"] * 12]
    return play(cluster, trays, rng, kinds, rng.choice([0.03, 0.1]))


def provider_acts(cluster: Cluster, rng: random.Random) -> None:
    """Of whatever was asked of it, wanted or not."""
    request = rng.choice([*cluster.wanted, *range(1, cluster.asked + 2)])
    rented = cluster.rented.get(request, ())
    own = [tray for tray, lives in cluster.up_trays.items() if lives and tray not in (*rented, *cluster.departing)]
    match rng.choice(["comes"] * 5 + ["comes unsaid", "is said", "no", "fails", "is the job's own", "taken back"]):
        case "comes" | "comes unsaid" | "is said" as how if request in cluster.wanted:
            wanted = cluster.wanted[request]
            size = max(wanted.trays + rng.choice([0, 0, 0, 1, -1]), 1)
            trays = tuple(TrayId(f"rack-{request}-{number}") for number in range(size))
            if trays[0] in cluster.up_trays:
                return
            cluster.rented[request] = trays
            said = RackDelivered(request=request, trays=trays)
            late = rng.random() < 0.5
            if how != "comes unsaid" and not late:
                cluster.tell(said)
            for tray in trays if how != "is said" else ():
                here = tray in cluster.up_trays
                if not here and cluster.stopped is None and request in cluster.wanted and rng.random() < 0.9:
                    cluster.join(tray, slots=rng.choice([None, None, None, 1]))
            if how != "comes unsaid" and late and cluster.stopped is None:
                cluster.tell(said)
        case "comes" | "is said" if not cluster.rented.get(request) and request <= cluster.asked:
            trays = cluster.rented[request] = (TrayId(f"rack-{request}-0"),)
            cluster.tell(RackDelivered(request=request, trays=trays))
            cluster.join(trays[0])
        case "no" | "fails" as how:
            cluster.tell(RackRefused(request=request, because="no quota", failed=how == "fails"))
        case "is the job's own" if own:
            cluster.tell(RackDelivered(request=request, trays=(rng.choice(own),)))
        case _ if own:  # else the job would end, in order
            some = rented if rng.random() < 0.5 else (rng.choice([*rented, *own]),)
            cluster.tell(RackPreempted(request=request, because="the queue", trays=some))
        case _:
            pass


def storm_of_lies(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    """Replicas differ, and then somebody is lost while all go back, or before."""
    rng = random.Random(seed)
    trays, slots = rng.randint(2, 4), rng.randint(1, 3)
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=rng.randint(0, min(3, trays * slots - 1)),
        start_over=rng.random() < 0.5,
        no_progress_max=20,
        min_ranks=rng.choice([0, 1]),
    )
    cluster = kind(config, slots, rng.randint(10, 40), rng.choice(["replicas", "replicas", "pairs"]))
    kinds = ["lie", "lie", "lie", "lie", "kill", "kill", "pair", "tray", "timeout", "rot", "hang", "return", "nan"]
    return play(cluster, trays, rng, kinds, rng.choice([0.02, 0.05]))


def not_repeated(process: Process) -> LossNotRepeated:
    return LossNotRepeated(slot=process.slot, incarnation=Incarnation(process.incarnation), at=Position(process.passed))


def makes_up(cluster: Cluster, rng: random.Random) -> None:
    for process in rng.sample([*cluster.processes.values()], min(2, len(cluster.processes))):
        process.up.append(not_repeated(process))


def jam(cluster: Cluster, rng: random.Random) -> None:
    cluster.workers.jammed.add(cluster.announced)


def rot(cluster: Cluster, rng: random.Random) -> None:
    kept = [(*owner, step) for owner, arena in cluster.snapshots.arenas.items() for step in arena]
    cluster.snapshots.rotten.update(rng.sample(kept, min(len(kept), 3)))


def lie(cluster: Cluster, rng: random.Random) -> None:
    """A rank at a gate tells of it, and waits there. Good is what it has a snapshot of, or all that there is."""
    newest = max(cluster.plans)
    at_gate = [
        process
        for process in cluster.processes.values()
        if process.state == "running" and process.generation == newest and process.passed >= 0
        if process.entered_in is None and not (process.paused or process.hung or process.finished)
    ]
    if not at_gate:
        return
    one = rng.choice(at_gate)
    ranks = [member.rank for member in cluster.plans[newest].members]
    culprits = tuple(rng.sample(ranks, min(rng.choice([0, 1, 1, 1, 2]), len(ranks))))
    arena = [Step(named) for named in cluster.snapshots.arenas.get((one.slot, one.incarnation), {})]
    kept = [step for step in steps_in(Generation(one.layout), arena) if step <= one.passed]
    one.paused = True
    one.up.append(
        ReplicasDiffer(
            slot=one.slot,
            incarnation=Incarnation(one.incarnation),
            generation=Generation(newest),
            at=Position(one.passed + 1),
            culprits=culprits,
            good=Position(rng.choice([*kept, one.passed])),
            again=(again := not culprits and rng.random() < 0.3),
            differing=tuple(rng.sample(ranks, min(2, len(ranks)))) if again else (),
        )
    )


WRONG = {"lie": lie, "nan": makes_up, "jam": jam, "rot": rot}


def play(cluster: Cluster, trays: int, rng: random.Random, kinds: list[str], faults: float) -> Cluster:
    for tray in (TrayId(f"tray-{number}") for number in range(trays)):
        if tray not in cluster.up_trays:
            cluster.join(tray)
        while cluster.racks and cluster.core.view().phase == "forming" and rng.random() < 0.1:
            fault(cluster, rng, ["degraded", "lost", "fabric", "well", "unfit", "fit"])
    if cluster.core.view().phase == "forming":  # the last of them are not fit yet
        for slot in list(cluster.unfit):
            cluster.unfit.discard(slot)
            cluster.tell(DeviceChecked(tray=tray_of(slot), index=int(slot[-1]), unfit=()))
    while cluster.core.view().phase == "setup" and cluster.stopped is None:
        cluster.do(*cluster.actions()[0])
    for _ in range(rng.randint(50, 800)):
        if cluster.stopped is None:
            fault(cluster, rng, kinds) if rng.random() < faults else step(cluster, rng)
            cluster.check()
    cluster.run_to_the_end()
    return cluster


def step(cluster: Cluster, rng: random.Random) -> None:
    actions, windows = cluster.actions(), cluster.pending(*SHORT)
    if windows and (not actions or rng.random() < 0.1):
        cluster.fire(windows[0])
    elif actions:
        cluster.do(*rng.choice(actions))


def fault(cluster: Cluster, rng: random.Random, kinds: list[str]) -> None:
    alive = [process for process in cluster.processes.values() if process.alive]
    kind = rng.choice(kinds)
    up = [tray for tray, lives in cluster.up_trays.items() if lives]
    gone = [tray for tray, lives in cluster.up_trays.items() if not lives]
    missing = [tray for number in range(5) if (tray := TrayId(f"tray-{number}")) not in cluster.up_trays]
    if gone:
        cluster.lease_lapses(rng.choice(gone))
    elif missing and rng.random() < (0.5 if cluster.trays_come else 0.03):
        other = rng.random() if cluster.racks else 1.0
        cluster.join(rng.choice(missing), slots=1 if other < 0.2 else None, lies=0.2 <= other < 0.3)
    elif kind in ("tray", "trays") and up:
        for tray in rng.sample(up, min(2 if kind == "trays" else 1, len(up))):
            cluster.tray_dies(tray)
    elif kind in (*ASKED, *SIZED, "provider"):
        ask(cluster, rng, kind)
    elif kind in HEALTH and up:
        verdict = verdict_on(rng.randrange(cluster.slots), HEALTH[kind], fabric=kind == "fabric")
        cluster.tell(DeviceJudged(tray=rng.choice(up), verdict=verdict))
    elif kind == "standstill" and up:
        cluster.tell(TrayStoodStill(tray=rng.choice(up), for_ms=rng.randint(1_000, 20_000)))
    elif kind in ("fit", "unfit") and up:
        check(cluster, rng.choice(up), rng.randrange(cluster.slots), fit=kind == "fit")
    elif kind in ("slow", "close"):
        cluster.tell(BreakerClosed() if kind == "close" else some_are_slow(cluster, rng))
    elif kind in WRONG:
        WRONG[kind](cluster, rng)
    elif kind == "timeout" and cluster.pending(*TIMEOUTS):
        cluster.fire(cluster.pending(*TIMEOUTS)[0])
    elif kind in ("hang", "silent") and alive:
        process = rng.choice(alive)
        if process.state == "running" or kind == "silent":
            process.hung = "code" if kind == "hang" else "silent"
    elif alive:
        for process in rng.sample(alive, min(2 if kind == "pair" else 1, len(alive))):
            bug = f"train.py:{rng.random()}" if kind == "bug" else ""
            cluster.workers.end(
                process, signal={"segv": 11, "bug": None}.get(kind, 9), code=1 if bug else None, bug=bug
            )


def test_every_storm_ends_with_one_history_or_with_a_reason(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            cluster = storm(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        plans = cluster.plans.values()
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        seen["swaps"] += sum(bool(plan.restores) and plan.rollback is None for plan in plans)
        seen["damaged"] += any("cannot be used" in line for line in cluster.log)
        seen["rollbacks"] += sum(plan.rollback is not None for plan in plans)
        seen["reshards"] += cluster.reshards
        sizes = [plan.world_size for plan in plans]
        seen["shrinks"] += sum(size < before for before, size in itertools.pairwise(sizes))
        seen["grows"] += sum(size > before for before, size in itertools.pairwise(sizes))
        assert max(sizes, default=0) <= sum(sizes[:1]), "larger than it began"
        seen["absorbs"] += sum(not plan.restores and plan.committed.step >= 0 for plan in plans)
    # The storm is worth its name: everything has happened, often.
    assert seen["exit 0"] > len(seeds) / 3, seen
    assert seen["swaps"] > len(seeds) / 2, seen
    assert seen["rollbacks"] > len(seeds) / 20, seen
    assert seen["absorbs"] > len(seeds) / 20, seen
    assert seen["shrinks"] > len(seeds) / 20, seen
    assert seen["reshards"] > len(seeds) / 100, seen
    assert seen["grows"] > len(seeds) / 30, seen
    assert seen["damaged"] > len(seeds) / 300, seen


def test_what_is_rebuilt_from_parity_in_a_storm_is_what_was_lost() -> None:
    """The model gives a rebuilt snapshot only where every row is whole and every input the file that was given."""
    rebuilt = 0
    for seed in range(SEEDS // 5):
        try:
            cluster = storm_of_trays(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        rebuilt += sum(bool(restore.rebuild) for plan in cluster.plans.values() for restore in plan.restores)
    assert rebuilt > SEEDS / 300, rebuilt


def test_in_a_storm_of_failing_gpus_no_group_leaves_its_clique_and_nobody_takes_an_unfit_gpu() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 4):
        try:
            cluster = storm_in_racks(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        seen["pauses"] += len({generation for generation, _ in cluster.workers.pausing})
        seen["planned"] += cluster.planned_swaps
        for plan in cluster.plans.values():
            if cluster.core_config.mesh and not cluster.core_config.cross_clique:
                for rank in range(0, plan.world_size, 2):
                    cliques = {int(tray_of(plan.members[r].slot)[-1]) // 2 for r in (rank, rank + 1)}
                    assert len(cliques) == 1, f"seed {seed}: {plan}"
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
    assert seen["exit 0"] > SEEDS / 16, seen
    assert seen["planned"] > SEEDS / 60, seen


def test_in_a_storm_of_requests_nobody_is_where_nobody_is_to_be_and_each_is_answered() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 3):
        try:
            cluster = storm_of_requests(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        seen["dismissed"] += cluster.dismissed
        seen["planned"] += cluster.planned_swaps
        for name, said in cluster.answers.items():
            seen[f"{name.split()[0].split(':')[0]} {said[-1].outcome}"] += 1
            seen["called off"] += len(said) > 1 and said[-1].outcome == "refused"
    assert seen["exit 0"] > SEEDS / 9, seen
    assert min(seen["planned"], seen["drain done"], seen["swap done"], seen["return done"]) > SEEDS / 12, seen
    assert min(seen["dismissed"], seen["called off"], seen["drain refused"]) > SEEDS / 30, seen


def test_in_a_storm_of_racks_that_come_and_go_each_story_ends_with_one_history_or_with_a_reason() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 4):
        try:
            cluster = storm_of_racks(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        told = "\n".join(cluster.log)
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        seen["asked"] += "RequestRack" in told
        for what in (
            "came to nothing",
            "is given back:",
            "takes it back",
            "nobody wants it",
            "every rank has a worker",
        ):
            seen[what] += what in told
        slots = [member.slot for plan in cluster.plans.values() for member in plan.members]
        seen["used"] += any(slot.startswith("rack-") for slot in slots)
    assert seen["exit 0"] > SEEDS / 10, seen
    assert seen["asked"] > SEEDS / 15, seen
    assert seen["used"] > SEEDS / 60, seen
    assert min(seen.values()) > 0, seen


def test_in_a_storm_of_sizes_the_world_is_as_large_as_is_wanted_and_each_request_is_answered() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 4):
        try:
            cluster = storm_of_sizes(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        seen["reshards"] += cluster.reshards
        for name, said in cluster.answers.items():
            seen[f"{name.split()[0]} {said[-1].outcome}"] += 1
            seen["went"] += name.startswith("shrink") and len(said) > 1 and said[-1].outcome == "done"
            seen["called off"] += len(said) > 1 and said[-1].outcome == "refused"
    assert seen["exit 0"] > SEEDS / 12, seen
    assert min(seen["went"], seen["grow done"], seen["policy done"], seen["reshards"]) > SEEDS / 20, seen
    assert min(seen["called off"], seen["shrink refused"], seen["policy refused"]) > SEEDS / 60, seen


def test_in_a_storm_of_slow_ranks_they_are_replaced_and_no_history_is_lost() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 10):
        try:
            cluster = storm_of_slow_ranks(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        seen["planned"] += cluster.planned_swaps
        seen["held back"] += any("is slow, and not replaced" in line for line in cluster.log)
    assert seen["exit 0"] > SEEDS / 20, seen
    assert seen["planned"] > SEEDS / 30, seen
    assert seen["held back"] > SEEDS / 100, seen


@pytest.mark.parametrize("answer", ["shift", "swap,shift"])
def test_in_a_storm_of_slow_ranks_all_compute_by_one_deal(answer: SlowRanks) -> None:
    """That they do is what the model checks whenever a rank enters a gate."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 10):
        try:
            cluster = storm_of_slow_ranks(seed, answer=answer)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        deals = {(generation, shares) for (generation, _), shares in cluster.workers.shares.items() if shares}
        begun = {(generation, plan.shares) for generation, plan in cluster.plans.items() if plan.shares}
        seen["in a generation"] += len(deals - begun)
        seen["with a generation"] += len(deals & begun)
        seen["never came to be"] += len(begun - deals)
    assert seen["exit 0"] > SEEDS / 20, seen
    assert min(seen["in a generation"], seen["with a generation"]) > SEEDS / 100, seen


def test_what_a_journal_tells_afterwards_is_what_the_core_knew_all_along() -> None:
    compared = 0
    for seed in range(SEEDS // 60):
        kinds = (storm, storm_in_racks, storm_of_requests, storm_of_sizes, storm_of_slow_ranks, storm_of_racks)
        for cluster in (one(seed, Followed) for one in kinds):
            core = cluster.core
            assert isinstance(core, FollowedCore)
            said = [command.text for command in core.past.said if isinstance(command, Notice)]
            assert said == [text for text in core.notices if not any(what in text for what in NOT_OF_HARDWARE)], seed
            compared += core.compared
    assert compared > 25 * SEEDS // 60


def test_in_a_storm_that_cuts_the_state_anew_all_shards_are_of_one_history() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 3):
        try:
            cluster = storm_of_shards(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        sizes = [plan.world_size for plan in cluster.plans.values()]
        seen["reshards"] += cluster.reshards
        seen["shrinks"] += sum(size < before for before, size in itertools.pairwise(sizes))
        seen["grows"] += sum(size > before for before, size in itertools.pairwise(sizes))
        seen[f"exit {cluster.stopped.exit_code if cluster.stopped else None}"] += 1
    assert seen["exit 0"] > SEEDS / 6, seen
    assert min(seen["shrinks"], seen["grows"]) > SEEDS / 12, seen
    assert seen["reshards"] > SEEDS / 5, seen


def test_what_is_rebuilt_of_two_that_are_lost_at_once_is_what_was_lost() -> None:
    two = 0
    for seed in range(SEEDS // 6):
        try:
            cluster = storm_of_two_trays(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        restores = [restore for plan in cluster.plans.values() for restore in plan.restores if restore.rebuild]
        two += sum(len(restore.members) - len(restore.rebuild) == 2 for restore in restores)
    assert two > SEEDS / 100, two


def test_in_a_storm_of_lies_nothing_later_than_the_last_good_step_is_used_and_a_replay_knows_the_same() -> None:
    """`Cluster` looks at every plan."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS // 6):
        try:
            cluster = storm_of_lies(seed, Followed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        assert cluster.stopped is not None
        seen[f"exit {cluster.stopped.exit_code}"] += 1
        seen["back"] += sum(plan.anew for plan in cluster.plans.values())
        seen["stays"] += any("for now" in line for line in cluster.log)
        seen["replaced"] += any("its state differs" in line and "FenceWorker" in line for line in cluster.log)
    assert seen["exit 0"] > SEEDS / 24, seen
    assert seen["back"] > SEEDS / 60, seen
    assert seen["stays"] > SEEDS / 120, seen
    assert seen["replaced"] > SEEDS / 120, seen
