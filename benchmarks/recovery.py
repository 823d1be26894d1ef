"""Recovery from a lost rank, and the price of being able to: rackrun beside torchrun, in one run on one machine.

    python benchmarks/recovery.py            the numbers of docs/measured.md (about 25 minutes on 2 cores)
    python benchmarks/recovery.py --quick    one of each with a small model: does it still work (about 2 minutes)

The workload is a residual MLP of 25.2 M fp32 parameters with fused AdamW, 4 ranks, batch 4 a rank. torchrun writes a
checkpoint to disk every 10 steps and resumes from it; rackrun has one warm spare. A signal hits a rank at a random moment
(seeded) after warm-up.

**Recovery** is the time from the signal to the moment at which all 4 ranks have finished a step that nobody had finished
before. **Redone** steps had been finished before the fault and were computed once more. **Overhead** compares step times
and CPU seconds (of all processes, launchers included) without a fault, in pairs of short blocks that alternate while the
other job is stopped, because the same code differs by several per cent from one minute to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs import (
    TORCHRUN_ENV,
    Job,
    JobFailed,
    Mark,
    bootstrap_median,
    machine,
    median_range,
    rackrun_command,
    save,
    step_seconds,
    torchrun_command,
)

RANKS = 4
WARM_UP = 15  # steps
BLOCK_STEPS = 8
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Workload:
    size: tuple[str, ...]
    start_timeout_s: float
    step_timeout_s: float

    def job(self, system: str, steps: int, *, checkpoint: bool) -> Job:
        arguments = ("--steps", str(steps), *self.size)
        if system == "rackrun":
            return Job(rackrun_command("elastic_mlp.py", *arguments, ranks=RANKS, spares=1))
        if system == "rackrun, plain script":
            return Job(
                rackrun_command(
                    "ddp_mlp.py", *arguments, "--checkpoint", "{folder}/checkpoint.pt", ranks=RANKS, spares=1
                )
            )
        return Job(torchrun_command("ddp_mlp.py", *arguments, ranks=RANKS, checkpoint=checkpoint), env=TORCHRUN_ENV)


FULL = Workload(size=(), start_timeout_s=90, step_timeout_s=20)
QUICK = Workload(size=("--width", "256", "--layers", "8"), start_timeout_s=60, step_timeout_s=10)


def all_ranks_at(marks: Sequence[Mark], step: int) -> bool:
    return len({mark.rank for mark in marks if mark.step >= step}) == RANKS


def fault_free_losses(workload: Workload, system: str, steps: int) -> dict[str, float]:
    with workload.job(system, steps, checkpoint=system != "rackrun") as job:
        job.wait_for(
            lambda marks: all_ranks_at(marks, steps - 1), workload.start_timeout_s + steps * workload.step_timeout_s
        )
        return {f"{mark.rank}/{mark.step}": mark.loss for mark in job.marks()}


def recovery(
    workload: Workload, system: str, fault: str, rng: random.Random, expected: dict[str, float], steps: int
) -> dict[str, Any]:
    """One fault. ``beyond_s`` is None when the job never got going again within the time limit."""
    victim, fault_step, fraction = rng.randrange(RANKS), rng.randrange(WARM_UP, WARM_UP + 10), rng.random()
    with workload.job(system, steps, checkpoint=system != "rackrun") as job:
        job.wait_for(lambda marks: all_ranks_at(marks, 0), workload.start_timeout_s)
        launch_s = max(mark.t for mark in job.marks() if mark.step == 0) - job.started
        job.wait_for(lambda marks: all_ranks_at(marks, fault_step), fault_step * workload.step_timeout_s, poll_s=0.002)
        steady = statistics.median(step_seconds(job.marks(), 5, fault_step))
        time.sleep(fraction * steady)

        victim_pid = next(mark.pid for mark in reversed(job.marks()) if mark.rank == victim)
        fault_at = time.monotonic()
        os.kill(victim_pid, SIGNALS[fault])
        result: dict[str, Any] = {
            "system": system,
            "fault": fault,
            "rank": victim,
            "after_step": fault_step,
            "fraction_of_step": round(fraction, 3),
            "launch_s": launch_s,
            "steady_step_s": steady,
        }

        def recovered(marks: list[Mark]) -> tuple[int, float] | None:
            before = max(mark.step for mark in marks if mark.t < fault_at)
            after = [mark for mark in marks if mark.t >= fault_at]
            for step in sorted({mark.step for mark in after if mark.step > before}):
                done = {mark.rank: mark for mark in after if mark.step == step}
                if len(done) == RANKS and done[victim].pid != victim_pid:
                    return step, max(mark.t for mark in done.values())
            return None

        try:
            step, at = job.wait_for(recovered, timeout_s=90)
        except JobFailed as failure:
            return {**result, "beyond_s": None, "why": str(failure)[-500:]}
        job.wait_for(lambda marks: all_ranks_at(marks, step + 5), 6 * workload.step_timeout_s)
        marks = job.marks()
        restarted = [mark for mark in marks if mark.t >= fault_at]
        firsts = []
        for again_step in {mark.step for mark in restarted}:
            done = {mark.rank: mark for mark in restarted if mark.step == again_step}
            if len(done) == RANKS and done[victim].pid != victim_pid:
                firsts.append(max(mark.t for mark in done.values()))
        finished_before = {(mark.rank, mark.step) for mark in marks if mark.t < fault_at}
        again = {mark.step for mark in marks if mark.t >= fault_at and (mark.rank, mark.step) in finished_before}
        differences = [
            abs(mark.loss - expected[f"{mark.rank}/{mark.step}"])
            for mark in marks
            if f"{mark.rank}/{mark.step}" in expected
        ]
        return {
            **result,
            "first_s": min(firsts) - fault_at,
            "beyond_s": at - fault_at,
            "beyond_step": step,
            "steps_redone": len(again),
            "attempts_discarded": max(mark.attempt for mark in marks),
            "loss_differs_by_max": max(differences),
        }


def overhead_blocks(workload: Workload, systems: Sequence[str], pairs: int) -> list[dict[str, dict[str, float]]]:
    """All jobs at once, stopped (SIGSTOP, all their processes) but for one that computes a block of steps, in turn.

    So a pair of blocks lies within some ten seconds, on the same machine, in the same state, and nothing has to start again.
    """
    results: list[dict[str, dict[str, float]]] = []
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for system in systems:
            for job in jobs.values():
                job.pause()
            jobs[system] = stack.enter_context(workload.job(system, 10**6, checkpoint=False))
            for job in jobs.values():
                job.pause()
        for job in jobs.values():
            job.resume()
            job.wait_for(
                lambda marks: all_ranks_at(marks, WARM_UP), workload.start_timeout_s + WARM_UP * workload.step_timeout_s
            )
            job.pause()
        for number in range(pairs):
            pair = {}
            for system in systems if number % 2 else reversed(systems):
                pair[system] = block(jobs[system], workload)
            results.append(pair)
            print(f"pair {number + 1}/{pairs}: {pair}", file=sys.stderr)
        for job in jobs.values():
            job.resume()
    return results


def block(job: Job, workload: Workload) -> dict[str, float]:
    """Median step time and CPU seconds a step over `BLOCK_STEPS` steps, the first after the pause left out."""
    job.resume()
    start = max(mark.step for mark in job.marks()) + 2
    job.wait_for(lambda marks: all_ranks_at(marks, start), 2 * workload.step_timeout_s, poll_s=0.005)
    cpu_before, began = job.cpu_seconds(), time.monotonic()
    job.wait_for(
        lambda marks: all_ranks_at(marks, start + BLOCK_STEPS), BLOCK_STEPS * workload.step_timeout_s, poll_s=0.005
    )
    cpu, took = job.cpu_seconds() - cpu_before, time.monotonic() - began
    job.pause()
    times = step_seconds(job.marks(), start, start + BLOCK_STEPS)
    return {"step_s": statistics.median(times), "mean_step_s": took / BLOCK_STEPS, "cpu_s_per_step": cpu / BLOCK_STEPS}


def summary(result: dict[str, Any]) -> str:
    lines = [
        "| system | fault | n | first step of all ranks, s | recovery, s | steps redone | steady step, s | loss against the run without fault |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((run["system"], run["fault"]) for run in result["recoveries"])
    for system, fault in kinds:
        runs = [run for run in result["recoveries"] if (run["system"], run["fault"]) == (system, fault)]
        done = [run for run in runs if run["beyond_s"] is not None]
        failed = f", {len(runs) - len(done)} never recovered" if len(done) < len(runs) else ""
        differs = max((run["loss_differs_by_max"] for run in done), default=0.0)
        lines.append(
            f"| {system} | SIG{fault.upper()} | {len(runs)}{failed} | {median_range([run['first_s'] for run in done])} "
            f"| {median_range([run['beyond_s'] for run in done])} "
            f"| {median_range([run['steps_redone'] for run in done], 0)} | {median_range([run['steady_step_s'] for run in runs], 3)} "
            f"| {'bit-equal' if done and differs == 0 else f'differs by up to {differs:.1e}' if done else ''} |"
        )
    if result["overhead"]:
        lines += [
            "",
            "| rackrun / torchrun, no fault | median of ratios | 95 % interval | pairs |",
            "|---|---|---|---|",
        ]
        for key, name in (
            ("step_s", "step time (median in a block)"),
            ("mean_step_s", "step time (mean in a block)"),
            ("cpu_s_per_step", "CPU seconds a step"),
        ):
            ratios = [pair["rackrun"][key] / pair["torchrun"][key] for pair in result["overhead"]]
            low, high = bootstrap_median(ratios)
            lines.append(f"| {name} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {len(ratios)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one of each, with a small model")
    parser.add_argument("--runs", type=int, default=20, help="faults of each kind")
    parser.add_argument("--runs-of-others", type=int, default=5, help="without `rackrun` itself: they take longer")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of blocks without a fault")
    parser.add_argument("--systems", default="rackrun;torchrun;rackrun, plain script", help="separated by ;")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="", help="of the JSON file in benchmarks/results")
    args = parser.parse_args()
    workload, runs, pairs = (QUICK, 1, 1) if args.quick else (FULL, args.runs, args.pairs)
    systems = args.systems.split(";")
    fault_steps = WARM_UP + 40
    result: dict[str, Any] = {
        "machine": machine(),
        "quick": args.quick,
        "seed": args.seed,
        "recoveries": [],
        "overhead": [],
    }
    if result["machine"]["load_at_start"] > 0.5:
        print(
            f"warning: this machine is busy (load {result['machine']['load_at_start']}); the numbers will show it",
            file=sys.stderr,
        )

    expected = {system: fault_free_losses(workload, system, fault_steps) for system in systems if runs}
    rngs = {system: random.Random(args.seed) for system in systems}  # the same moments for both
    for number in range(runs):
        for system in systems:
            if number >= args.runs_of_others and system != "rackrun":
                continue
            # torchrun does not notice a stopped rank before gloo's timeout of 30 minutes.
            for fault in ("kill", "stop") if system == "rackrun" else ("kill",):
                run = recovery(workload, system, fault, rngs[system], expected[system], fault_steps)
                result["recoveries"].append(run)
                took = "never" if run["beyond_s"] is None else f"{run['beyond_s']:.2f} s"
                print(f"{number + 1}/{runs} {system} {fault}: {took}", file=sys.stderr)
    result["overhead"] = overhead_blocks(workload, ("rackrun", "torchrun"), pairs) if pairs else []

    name = args.name or ("recovery-quick" if args.quick else "recovery")
    result["table"] = summary(result)
    path = save(name, result)
    print(f"{result['table']}\n\n{result['machine']}\n{path}")
    return 1 if any(run["beyond_s"] is None for run in result["recoveries"]) else 0


if __name__ == "__main__":
    sys.exit(main())
