"""Promotion of a spare beside which a filler runs, against one beside which nothing does; and how fast the filler is gone.

    python benchmarks/filler.py              50 ranks killed with a filler, 50 without (about 10 minutes on 2 cores)
    python benchmarks/filler.py --kills 5    does it still work

Two jobs of 3 ranks and a warm spare alternate, one with the filler of ``workloads/filler.py`` (deaf to SIGTERM, computing in three
processes, one of them a daemon, with 256 MB); while one is measured the other is stopped. A random rank is killed once the spare waits, with its
filler at work. **Recovery** is the time from the signal until all ranks have finished a step that nobody had finished before.
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
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import WORKLOADS, Job, JobFailed, Mark, bootstrap_median, machine, median_range, rackrun_command, save

RANKS = 3
SIZE = ("--width", "512", "--layers", "8")
BLOCK = 5
"""Kills of one job before it is the other's turn."""
WAIT_S = 60.0


def job(*, filler: bool) -> Job:
    placement = ["--standalone", "--nproc-per-node", str(RANKS + 1), "--max-restarts", "1000"]
    if filler:
        command = shlex.join([sys.executable, str(WORKLOADS / "filler.py"), "FOLDER"]).replace("FOLDER", "{folder}")
        placement += ["--filler", command]
    arguments = ("--steps", "1000000", *SIZE)
    env = {"BENCH_RANKS": str(RANKS)}
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
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with job(filler=False) as plain, job(filler=True) as filled:
        jobs = {False: plain, True: filled}
        for running in jobs.values():
            running.wait_for(lambda marks: len({m.rank for m in marks if m.step >= 5}) == RANKS, 2 * WAIT_S)
        filled.pause()
        turn = False
        while len(rows[True]) < arguments.kills:
            for _ in range(min(BLOCK, arguments.kills - len(rows[turn]))):
                rows[turn].append(kill_one(jobs[turn], rng, filler=turn))
            seconds = " ".join(f"{row['recovery_s']:.2f}" for row in rows[turn][-BLOCK:])
            print(f"{'with' if turn else 'without'}: {seconds}", file=sys.stderr, flush=True)
            jobs[turn].pause()
            turn = not turn
            jobs[turn].resume()
        jobs[False].resume()
        jobs[True].resume()
        time.sleep(1.0)
        gone_s = gone(filled)
    recovery = {which: [row["recovery_s"] for row in rows[which]] for which in rows}
    result = {
        "machine": machine(),
        "ranks": RANKS,
        "model": " ".join(SIZE),
        "without": recovery[False],
        "with": recovery[True],
        "median_without_s_95": bootstrap_median(recovery[False]),
        "median_with_s_95": bootstrap_median(recovery[True]),
        "gone_s": sorted(gone_s),
        "filler_processes": sorted({int(row["processes"]) for row in rows[True]}),
        "left_after_1_s": sum(row["left_after_1_s"] > 0 for row in rows[True]),
    }
    print(f"recovery without a filler  {median_range(recovery[False])} s, n = {len(rows[False])}")
    print(f"recovery with a filler     {median_range(recovery[True])} s, n = {len(rows[True])}")
    print(f"filler gone in             {median_range(gone_s)} s, n = {len(gone_s)}")
    print(f"something of it left after 1 s: {result['left_after_1_s']} of {len(rows[True])}")
    print(f"-> {save('filler', result)}")
    if result["left_after_1_s"] or max(gone_s) > 1.0:
        sys.exit("a filler was not gone within a second")


if __name__ == "__main__":
    main()
