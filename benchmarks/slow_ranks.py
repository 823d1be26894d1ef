"""A rank that gets 30 % of its processor time: how soon it is found, what that costs, and how much of it comes back when it computes less.

    python benchmarks/slow_ranks.py                  4 ranks of 8 micro-batches, 3 rounds (about 4 minutes on 2 cores)
    python benchmarks/slow_ranks.py --quick          one round: does it still work
    python benchmarks/slow_ranks.py --healthy        10,000 steps of a tiny model beside noise: is anybody called slow? (about 4 minutes)

Every rank has a quota of processor time, by a control group: healthy ranks 40 % of a core, so that four are independent of each other on two
cores; the slow one 30 % of that. In each round one is slowed down while the job trains, found, given fewer micro-batches
(``--slow-ranks shift``), and given its time back. *Steps to find* are those that were done from then until it was told. With one of four
at 30 % three quarters of what is lost are still there to be had: 3.3 ranks' worth of 4.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jobs import Job, Mark, machine, median_range, rackrun_command, save, step_seconds
from quota import Quota, QuotaUnavailable

RANKS, MICRO_BATCHES, BATCH = 4, 8, 32
HEALTHY, SLOW = 0.4, 0.3
"""Of a core; of that."""
STEADY = 24
"""Steps of each kind that are measured."""
WAIT_S = 240.0
TINY_STEPS = 10_000


def job(steps: int, *options: str, width: int, layers: int, micro_batches: int, batch: int) -> Job:
    arguments = ("--steps", str(steps), "--width", str(width), "--layers", str(layers))
    placement = ["--standalone", "--nproc-per-node", str(RANKS), *options]
    command = rackrun_command("elastic_mlp.py", *arguments, ranks=RANKS, spares=0, launcher_args=placement)
    return Job(command, env={"BENCH_MICRO_BATCHES": str(micro_batches), "BENCH_BATCH": str(batch)})


def told(run: Job, name: str) -> list[tuple[float, dict[str, Any]]]:
    """Events and commands of this name: when (CLOCK_MONOTONIC), and what."""
    since = time.time() - time.monotonic()
    path = run.folder / "out" / "journal.sqlite"
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(path, timeout=10.0)) as journal:
        found = journal.execute("SELECT wall, body FROM events WHERE name = ? ORDER BY id", (name,)).fetchall()
    return [(wall - since, json.loads(body)) for wall, body in found]


def wait_told(
    run: Job, name: str, since: float, wanted: Callable[[dict[str, Any]], Any]
) -> tuple[float, dict[str, Any]]:
    """The first since then of which ``wanted`` is true."""

    def found(_: object) -> list[tuple[float, dict[str, Any]]]:
        return [(at, body) for at, body in told(run, name) if at >= since and wanted(body)]

    first: tuple[float, dict[str, Any]] = run.wait_for(found, WAIT_S, poll_s=0.2)[0]
    return first


def has_told(body: dict[str, Any], rank: int) -> bool:
    return rank in [one["rank"] for one in body["slow"]]


def last_step(marks: Sequence[Mark]) -> int:
    return max((mark.step for mark in marks), default=-1)


def wait_steps(run: Job, more: int) -> tuple[int, int]:
    """The first and the last of so many steps from now on."""
    first = last_step(run.marks()) + 1
    run.wait_for(lambda marks: last_step(marks) >= first + more, WAIT_S)
    return first, first + more


def one_round(seed: int, share: float) -> dict[str, Any]:
    """``share`` of a core for each healthy rank; micro-batches are as large as that is worth."""
    victim, batch = random.Random(seed).randrange(RANKS), max(round(BATCH * share / HEALTHY), 1)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            job(1_000_000, "--slow-ranks", "shift", width=512, layers=8, micro_batches=MICRO_BATCHES, batch=batch)
        )
        run.wait_for(lambda marks: last_step(marks) >= 3, WAIT_S)
        pids = {mark.rank: mark.pid for mark in run.marks()}
        quotas = {rank: Quota(pid, share) for rank, pid in pids.items()}
        for quota in quotas.values():
            stack.callback(quota.close)
        stack.callback(run.kill)
        wait_steps(run, 3)
        healthy = wait_steps(run, 2 * STEADY)

        quotas[victim].set(SLOW * share)
        began = time.monotonic()
        found_at, found = wait_told(run, "SlowRanksChanged", began, lambda body: has_told(body, victim))
        dealt_at, deal = wait_told(run, "DealShards", found_at - 0.1, lambda body: body["shares"])
        during = [mark.step for mark in run.marks() if mark.rank == 0 and began < mark.t <= found_at]
        slow = (during[0], during[-1])
        wait_steps(run, 3)
        shifted = wait_steps(run, STEADY)
        deals = [body["shares"] for at, body in told(run, "DealShards") if at > began]

        quotas[victim].set(share)
        lifted = time.monotonic()
        even_at, _ = wait_told(run, "DealShards", lifted, lambda body: not body["shares"])
        after = [mark.step for mark in run.marks() if mark.rank == 0 and lifted < mark.t <= even_at]
        wait_steps(run, 3)
        again = wait_steps(run, STEADY)
        marks, verdicts = list(run.marks()), told(run, "SlowRanksChanged")
        alive = {mark.pid for mark in marks} == set(pids.values())

    def rate(span: tuple[int, int]) -> float:
        return RANKS * MICRO_BATCHES * batch / statistics.median(step_seconds(marks, *span))

    rates = {"healthy": rate(healthy), "slow": rate(slow), "shifted": rate(shifted), "even_again": rate(again)}
    result = {
        "slow_rank": victim,
        "found": [one["rank"] for one in found["slow"]],
        "times": [one["times"] for one in found["slow"]],
        "steps_to_find": len(during),
        "seconds_to_find": round(found_at - began, 1),
        "shares": deal["shares"],
        "other_verdicts": sum(any(one["rank"] != victim for one in body["slow"]) for _, body in verdicts),
        "told_to_all_after_s": round(dealt_at - found_at, 3),
        "samples_per_s": {name: round(value, 1) for name, value in rates.items()},
        "recovered": round((rates["shifted"] - rates["slow"]) / (rates["healthy"] - rates["slow"]), 3),
        "steps_to_even": len(after),
        "deals_while_slow": deals,
        "same_processes": alive,
    }
    print(json.dumps(result), flush=True)
    return result


# -- nobody is slow ----------------------------------------------------------------------------------------------------
def noise(seed: int) -> None:
    """Now and then, for some time: spins, or writes memory."""
    rng, memory = random.Random(seed), bytearray(16 << 20)
    while True:
        until = time.monotonic() + rng.choice((0.002, 0.02, 0.2, 1.0)) * rng.random()
        copies = rng.random() < 0.5
        while time.monotonic() < until:
            if copies:
                memory[: 8 << 20] = memory[8 << 20 :]
        time.sleep(rng.choice((0.01, 0.1, 0.5)) * rng.random())


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    processes = [multiprocessing.Process(target=noise, args=(seed,), daemon=True) for seed in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def healthy_steps(steps: int) -> dict[str, Any]:
    with job(steps, width=64, layers=2, micro_batches=2, batch=4) as run, beside(2):
        began = time.monotonic()
        assert run.finish(1200.0) == 0, run.output()[-3000:]
        taken = time.monotonic() - began
        verdicts = [(one["slow"], one["everybody"]) for _, one in told(run, "SlowRanksChanged")]
        load = round(os.getloadavg()[0], 1)
    result = {
        "steps": steps,
        "seconds": round(taken, 1),
        "noise_processes": 2,
        "load_at_end": load,
        "called_slow": sum(bool(slow) for slow, _ in verdicts),
        "called_slower_all_together": sum(bool(everybody) for _, everybody in verdicts),
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, or 1,000 steps; nothing is written")
    parser.add_argument("--healthy", action="store_true", help="only the steps in which nobody is slow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--share", type=float, default=HEALTHY, help="of a core, for a healthy rank (default: %(default)s)"
    )
    args = parser.parse_args()
    here = machine()
    count = 0 if args.healthy else 1 if args.quick else args.rounds
    try:
        rounds = [one_round(seed, args.share) for seed in range(count)]
    except QuotaUnavailable as error:
        print(f"slow ranks are not measured: {error}")
        return
    calm = healthy_steps(1_000 if args.quick else TINY_STEPS) if args.healthy or not args.quick else {}
    for name in ("steps_to_find", "recovered") if rounds else ():
        print(f"{name}: {median_range([one[name] for one in rounds])}")
    if not args.quick and not args.healthy:
        quota = {"healthy": args.share, "slow": round(SLOW * args.share, 3)}
        found = {"machine": here, "ranks": RANKS, "micro_batches": RANKS * MICRO_BATCHES, "cores_by_quota": quota}
        print(save("slow_ranks", {**found, "rounds": rounds, "healthy": calm}))


if __name__ == "__main__":
    main()
