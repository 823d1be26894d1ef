"""A whole rack on one machine: a GB200 NVL72's 18 trays of 4, 64 training ranks and 8 spares, and the loss of a whole tray.

    python benchmarks/rack.py            72 processes (about 2 minutes on 2 cores, 8 GB)
    python benchmarks/rack.py --quick    4 trays of 2

Measured: from the command to the first step of all ranks, and from the SIGKILL of a training tray's agent (its four workers
die with it) to a step that nobody had finished before, finished by all ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from jobs import Job, Mark, machine, rackrun_command, save, step_seconds

NVL72 = Path(__file__).resolve().parents[1] / "examples" / "racks" / "gb200-nvl72.yaml"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def agent_of(worker: int, launcher: int) -> int:
    """The worker's ancestor that the launcher started."""
    pid = worker
    while (parent := parent_of(pid)) != launcher:
        if parent <= 1:
            raise RuntimeError(f"process {worker} does not descend from the launcher {launcher}")
        pid = parent
    return pid


def spares_ready(job: Job) -> int:
    return sum(spare["state"] == "ready" for spare in job.status()["core"]["spares"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 trays of 2")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    trays, per_tray, spares = (4, 2, 2) if args.quick else (18, 4, 8)
    ranks = trays * per_tray - spares

    def all_ranks_at(marks: list[Mark], step: int) -> bool:
        return len({mark.rank for mark in marks if mark.step >= step}) == ranks

    placement = ["--trays", str(trays), "--nproc-per-node", str(per_tray)] if args.quick else ["--rack", str(NVL72)]
    command = rackrun_command(
        *("elastic_mlp.py", "--steps", "100000", "--width", "64", "--layers", "4"),
        ranks=ranks,
        spares=spares,
        launcher_args=placement,
    )
    with Job(command, env={"BENCH_RANKS": str(ranks)}) as job:
        job.wait_for(lambda marks: all_ranks_at(marks, 0), timeout_s=180)
        first_step_s = max(mark.t for mark in job.marks() if mark.step == 0) - job.started
        job.wait_for(lambda marks: all_ranks_at(marks, 10) and spares_ready(job) == spares, timeout_s=180, poll_s=0.5)
        steady = statistics.median(step_seconds(job.marks(), 3, 10))

        rng = random.Random(args.seed)
        pid_of = {mark.rank: mark.pid for mark in job.marks()}
        agent = agent_of(pid_of[rng.randrange(ranks)], job.process.pid)
        lost = {rank for rank, pid in pid_of.items() if agent_of(pid, job.process.pid) == agent}
        time.sleep(rng.random() * steady)
        fault_at = time.monotonic()
        os.kill(agent, signal.SIGKILL)

        def recovered(marks: list[Mark]) -> tuple[int, float] | None:
            before = max(mark.step for mark in marks if mark.t < fault_at)
            after = [mark for mark in marks if mark.t >= fault_at]
            for step in sorted({mark.step for mark in after if mark.step > before}):
                done = {mark.rank: mark for mark in after if mark.step == step}
                if len(done) == ranks and all(done[rank].pid != pid_of[rank] for rank in lost):
                    return step, max(mark.t for mark in done.values())
            return None

        _, recovered_at = job.wait_for(recovered, timeout_s=180)

    result: dict[str, Any] = {
        "machine": machine(),
        "trays": trays,
        "ranks": ranks,
        "spares": spares,
        "ranks_lost": sorted(lost),
        "command_to_first_step_s": first_step_s,
        "steady_step_s": steady,
        "tray_killed_to_next_step_s": recovered_at - fault_at,
    }
    path = save("rack-quick" if args.quick else "rack", result)
    print(
        "| trays | ranks | spares | command to first step, s | steady step, s | ranks lost | tray killed to next step of all, s |"
    )
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {trays} of {per_tray} | {ranks} | {spares} | {first_step_s:.1f} | {steady:.2f} | {len(lost)} | {recovered_at - fault_at:.1f} |"
    )
    print(f"\n{path.relative_to(path.parents[2])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
