"""Where the time of a recovery goes: ranks are killed one after another in one job, and each stage is timed.

    python benchmarks/waterfall.py               12 kills (about 2 minutes on 2 cores)
    python benchmarks/waterfall.py --kills 4     fewer

The workload is that of ``recovery.py``: a residual MLP of 25.2 M fp32 parameters with fused AdamW under DDP, 4 gloo ranks and a warm spare.
A SIGKILL hits a random rank at a random moment of a step. The table has the median time from the signal to the end of each stage, in
milliseconds: of the slowest survivor, and of the newcomer. What follows is the median time from the signal until all ranks have finished a step, and how
much that is beyond an undisturbed step. The stages of a worker are those of ``rackrun/worker/membership/recovery_stages.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import time
from contextlib import closing
from typing import Any

from jobs import Job, Mark, machine, rackrun_command, save, step_seconds
from recovery import FULL, RANKS, WARM_UP, all_ranks_at

STAGES = (
    "broken",
    "parked",
    "planned",
    "built",
    "copied",
    "verified",
    "served",
    "resumed",
    "noted",
    "computed",
    "entered",
    "passed",
)
BETWEEN = 6
"""Undisturbed steps before each kill."""
Timeline = dict[str, tuple[float | None, float | None]]
"""Stage -> milliseconds from the signal to its end: of the slowest survivor, and of the newcomer. None: it has no such stage."""


def kill_one(job: Job, rng: random.Random) -> dict[str, Any]:
    """Kill a rank, and wait until all ranks have finished a step that nobody had finished before. Seconds."""
    job.wait_for(lambda _: spare_is_ready(job), FULL.start_timeout_s, poll_s=0.1)
    first = max(mark.step for mark in job.marks()) + 1
    job.wait_for(lambda marks: all_ranks_at(marks, first + BETWEEN), BETWEEN * FULL.step_timeout_s, poll_s=0.002)
    now = max(mark.step for mark in job.marks())
    usual = statistics.median(step_seconds(job.marks(), now - BETWEEN + 1, now))
    time.sleep(rng.random() * usual)
    victim = rng.randrange(RANKS)
    pid = next(mark.pid for mark in reversed(job.marks()) if mark.rank == victim)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def recovered(marks: list[Mark]) -> float | None:
        before = max(mark.step for mark in marks if mark.t < killed)
        after = [mark for mark in marks if mark.t >= killed and mark.step > before]
        for step in sorted({mark.step for mark in after}):
            done = {mark.rank: mark for mark in after if mark.step == step}
            if len(done) == RANKS and done[victim].pid != pid:
                return max(mark.t for mark in done.values())
        return None

    at = job.wait_for(recovered, FULL.start_timeout_s, poll_s=0.002)
    return {"rank": victim, "killed": killed, "recovery_s": at - killed, "usual_step_s": usual}


def spare_is_ready(job: Job) -> bool:
    return any(spare["state"] == "ready" for spare in job.status()["core"]["spares"])


def recoveries(job: Job) -> tuple[float, list[dict[str, Any]]]:
    """When the journal's time began, and what it tells of each recovery."""
    journal = f"file:{job.folder}/out/journal.sqlite?mode=ro"
    with closing(sqlite3.connect(journal, uri=True)) as connection:
        began = dict(connection.execute("select key, value from meta"))["began_monotonic_s"]
        rows = connection.execute("select body from recoveries order by generation").fetchall()
    return float(began), [json.loads(body) for (body,) in rows]


def timeline(kill: dict[str, Any], recovery: dict[str, Any], began: float) -> Timeline:
    """Of one kill."""
    signal_ms = (kill["killed"] - began) * 1e3
    zero = {"survivors": recovery["break_ms"] - signal_ms, "newcomer": recovery["plan_ms"] - signal_ms}
    ends: Timeline = {}
    for stage in STAGES:
        found: dict[str, list[float]] = {"survivors": [], "newcomer": []}
        for rank, stages in recovery["stages"].items():
            who = "newcomer" if int(rank) == kill["rank"] else "survivors"
            if stage in stages:
                found[who].append(zero[who] + stages[stage])
        ends[stage] = max(found["survivors"], default=None), max(found["newcomer"], default=None)
    return ends


def table(timelines: list[Timeline]) -> str:
    lines = ["| stage ends after, ms | survivors | newcomer |", "|---|---|---|"]
    for stage in STAGES:
        cells = []
        for who in (0, 1):
            known = [at for one in timelines if (at := one[stage][who]) is not None]
            cells.append(f"{statistics.median(known):.0f}" if known else "")
        lines.append(f"| {stage} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="waterfall", help="of the file in benchmarks/results")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with Job(rackrun_command("elastic_mlp.py", "--steps", "1000000", ranks=RANKS, spares=1)) as job:
        job.wait_for(lambda marks: all_ranks_at(marks, WARM_UP), FULL.start_timeout_s + WARM_UP * FULL.step_timeout_s)
        kills = [kill_one(job, rng) for _ in range(args.kills)]
        job.wait_for(lambda _: len(recoveries(job)[1]) == args.kills, 30.0, poll_s=0.1)  # it is written in batches
        began, told = recoveries(job)
    timelines = [timeline(kill, one, began) for kill, one in zip(kills, told, strict=True)]
    beyond = [kill["recovery_s"] - kill["usual_step_s"] for kill in kills]
    print(table(timelines))
    print(
        f"\nrecovery {statistics.median(kill['recovery_s'] for kill in kills):.2f} s, of which an undisturbed step takes "
        f"{statistics.median(kill['usual_step_s'] for kill in kills):.2f} s; beyond it {statistics.median(beyond):.2f} s "
        f"[{min(beyond):.2f}-{max(beyond):.2f}] (medians of {args.kills})"
    )
    save(args.name, {"machine": machine(), "kills": kills, "timelines": timelines})


if __name__ == "__main__":
    main()
