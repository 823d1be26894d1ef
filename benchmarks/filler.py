"""Promotion of a spare beside which a filler runs, against one beside which nothing does; and how fast the filler is gone.

    python benchmarks/filler.py              50 pairs of a killed rank: with a filler, and without (about 8 minutes on 2 cores)
    python benchmarks/filler.py --pairs 3    does it still work

Two jobs of 3 ranks and a warm spare take turns, one with the filler of ``workloads/filler.py`` (deaf to SIGTERM, computing in three
processes, one of them a daemon, with 256 MB); while one is measured the other is stopped. A random rank is killed once the spare waits, with its
filler at work: once in each job makes a pair, in an order that alternates. **Recovery** is the time from the signal until all ranks have finished a step that nobody had finished before.
**Gone** is the time from when the agent was told that the spare is needed until no process of the filler was left, as
the agent saw it; that nothing was left is checked from outside, too, by the mark that all of them carry.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import WORKLOADS, Job, JobFailed, Mark, bootstrap_median, machine, median_range, rackrun_command, save

RANKS = 3
SIZE = ("--width", "512", "--layers", "8")
WAIT_S = 120.0
PAUSE_S = 0.02
"""Of the ranks after each step. A filler runs on what they leave idle; with 3 ranks on 2 processors that would be next to nothing."""
NAMES = {False: "without", True: "with"}


def job(*, filler: bool) -> Job:
    placement = ["--standalone", "--nproc-per-node", str(RANKS + 1), "--max-restarts", "1000"]
    if filler:
        command = shlex.join([sys.executable, str(WORKLOADS / "filler.py"), "FOLDER"]).replace("FOLDER", "{folder}")
        placement += ["--filler", command]
    arguments = ("--steps", "1000000", *SIZE)
    env = {"BENCH_RANKS": str(RANKS), "BENCH_PAUSE_S": str(PAUSE_S)}
    return Job(rackrun_command("elastic_mlp.py", *arguments, spares=1, launcher_args=placement), env=env)


def until(what: str, find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := find()):
        if time.monotonic() > deadline:
            raise JobFailed(f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(0.02)
    return found


def at_work(running: Job, *, filler: bool) -> str:
    """Waits until the spare is ready; returns the mark of its filler, which is at work."""
    spare = until(
        "a ready spare", lambda: next((s for s in running.status()["core"]["spares"] if s["state"] == "ready"), None)
    )
    if not filler:
        return ""
    name = f"filler-{spare['slot'].replace('/', '.')}:{spare['incarnation']}:*"
    path: Path = until("a filler at work", lambda: next(running.folder.glob(name), None))
    slot, incarnation, start = path.name.removeprefix("filler-").split(":")
    return f"RACKRUN_FILLER={slot.replace('.', '/')}:{incarnation}:{start}"


def marked(mark: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def kill_one(running: Job, rng: random.Random, *, filler: bool) -> dict[str, float]:
    mark = at_work(running, filler=filler)
    processes = len(marked(mark)) if mark else 0
    seen = max(mark.step for mark in running.marks())
    running.wait_for(lambda marks: len({m.rank for m in marks if m.step > seen + 2}) == RANKS, WAIT_S, poll_s=0.005)
    victim = rng.randrange(RANKS)
    pid = next(mark.pid for mark in reversed(running.marks()) if mark.rank == victim)
    time.sleep(rng.random() * 0.05)
    before = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def recovered(marks: list[Mark]) -> float:
        last = max(mark.step for mark in marks if mark.t < before)
        for step in range(last + 1, last + 20):
            done = {mark.rank: mark for mark in marks if mark.step == step and mark.t >= before}
            if len(done) == RANKS and done[victim].pid != pid:
                return max(mark.t for mark in done.values())
        return 0.0

    result = {"recovery_s": running.wait_for(recovered, WAIT_S, poll_s=0.002) - before}
    if filler:
        time.sleep(max(0.0, before + 1.0 - time.monotonic()))
        result |= {"processes": processes, "left_after_1_s": len(marked(mark))}
    return result


def gone(running: Job) -> list[float]:
    """What the agent has told, from the journal."""
    connection = sqlite3.connect(running.folder / "out" / "journal.sqlite")
    try:
        told = [json.loads(body) for (body,) in connection.execute("SELECT body FROM fillers")]
    finally:
        connection.close()
    return [one["gone_s"] for one in told if one.get("because") == "the spare is needed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    began = time.monotonic()
    with job(filler=False) as plain, job(filler=True) as filled:
        jobs = {False: plain, True: filled}
        for running in jobs.values():
            running.wait_for(lambda marks: len({m.rank for m in marks if m.step >= 5}) == RANKS, 2 * WAIT_S)
        filled.pause()
        turn = False
        for pair in range(arguments.pairs):
            for which in (turn, not turn):  # so who was second begins the next
                if which != turn:
                    jobs[turn].pause()
                    jobs[which].resume()
                    turn = which
                rows[which].append(kill_one(jobs[which], rng, filler=which))
            seconds = ", ".join(f"{rows[which][-1]['recovery_s']:.3f} {name}" for which, name in NAMES.items())
            print(f"{pair + 1}: {seconds}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        jobs[not turn].resume()
        time.sleep(1.0)
        gone_s = gone(filled)
    recovery = {which: [row["recovery_s"] for row in rows[which]] for which in rows}
    ratios = [with_ / without for without, with_ in zip(recovery[False], recovery[True], strict=True)]
    low, high = bootstrap_median(ratios)
    in_time = sum(not row["left_after_1_s"] for row in rows[True])
    result = {
        "machine": machine(),
        "ranks": RANKS,
        "model": " ".join(SIZE),
        "without": recovery[False],
        "with": recovery[True],
        "median_without_s_95": bootstrap_median(recovery[False]),
        "median_with_s_95": bootstrap_median(recovery[True]),
        "median_ratio": statistics.median(ratios),
        "median_ratio_95": (low, high),
        "gone_s": sorted(gone_s),
        "filler_processes": sorted({int(row["processes"]) for row in rows[True]}),
        "gone_within_1_s": in_time,
        "seconds": time.monotonic() - began,
    }
    count = len(ratios)
    print("| | median [least to most] | n |\n|---|---|---|")
    for which, name in NAMES.items():
        print(f"| recovery {name} a filler, s | {median_range(recovery[which], digits=3)} | {count} |")
    print(
        f"| with against without, in pairs | {statistics.median(ratios):.3f} (95 %: {low:.3f} to {high:.3f}) | {count} |"
    )
    print(f"| filler gone, s | {median_range(gone_s, digits=3)} | {len(gone_s)} |")
    print(f"| nothing of it left after 1 s | {in_time} of {count} | {count} |")
    print(f"-> {save('filler' if count >= 50 else 'filler-quick', result)}")
    if in_time < count or max(gone_s) > 1.0:
        sys.exit("a filler was not gone within a second")
    if low > 1.0:
        sys.exit("promotion is slower with a filler")


if __name__ == "__main__":
    main()
