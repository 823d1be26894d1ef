"""The same kill plan against the same script, under rackrun and under torchrun: one table.

    python benchmarks/compare_torchrun.py            five seeds (about five minutes on 2 cores)
    python benchmarks/compare_torchrun.py --seeds 1  does it still work

Four ranks; rackrun has one warm spare, torchrun its own restart (``--max-restarts 3``) and the script's checkpoint every 10 steps. One rank gets a SIGKILL
in the middle of a step that the seed draws. The smaller the model, the less of a restart is the model's: here nearly all of it is the launcher's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jobs import machine, save

from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.targets import One
from rackrun.chaos.plan.definition import AtStep, Inject, Plan
from rackrun.chaos.runs.run_plan import run_plan
from rackrun.chaos.runs.torchrun import TorchrunComparison, compare, run_outside, steps_of_run

SCRIPT = str(Path(__file__).resolve().parents[1] / "examples" / "chaos" / "either.py")
STEPS, EVERY = 60, 10


def plan_of(seed: int) -> Plan:
    draw = stream(seed, "compare")
    when = AtStep(step=draw.randint(15, 40), plus_s=round(0.05 * draw.random(), 3))
    return Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK), when=when), seed=seed)


def under_rackrun(seed: int, out: Path) -> tuple[TorchrunComparison, float]:
    command = ["--nproc-per-node", "5", "--spares", "1", SCRIPT, str(STEPS), "{out}"]
    summary = run_plan(plan_of(seed), command, out=out)
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    began_s = next(one["wall_s"] for one in history if one["what"] == "started")
    struck = [began_s + one["at_s"] for one in history if one["what"] == "begun"]
    found = compare(steps_of_run(out / "reference" / "run"), steps_of_run(out / "faulted" / "run"), struck)
    return found, summary.seconds - summary.reference_seconds


def under_torchrun(seed: int, out: Path) -> tuple[TorchrunComparison, float]:
    command = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "3", SCRIPT, str(STEPS), "{out}", str(EVERY)]
    found = run_outside(plan_of(seed), command, out=out)
    return found, found.seconds - found.reference_seconds


def row(system: str, runs: Sequence[dict[str, Any]]) -> str:
    good = [seconds for run in runs for seconds in run["good_step_s"]]
    waited = f"{statistics.median(good):.2f}" if None not in good else "never, once or more"
    again = statistics.median(run["steps_again"] for run in runs)
    same = "yes" if all(run["same_losses"] for run in runs) else "no"
    twice, longer = max(run["samples_twice"] for run in runs), statistics.median(run["longer_s"] for run in runs)
    return f"| {system} | {len(runs)} | {again:g} | {waited} | {longer:.1f} | {same} | {twice} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    result: dict[str, Any] = {"machine": machine(), "steps": STEPS, "checkpoint_every": EVERY, "runs": {}}
    for seed in seeds:
        for system, run in (("rackrun", under_rackrun), ("torchrun", under_torchrun)):
            with tempfile.TemporaryDirectory(prefix="rackrun-bench-") as folder:
                found, longer_s = run(seed, Path(folder) / "out")
            told = {key: getattr(found, key) for key in TorchrunComparison.__struct_fields__}
            result["runs"].setdefault(system, []).append({"seed": seed, "longer_s": round(longer_s, 3), **told})
            print(msgspec.json.encode({system: told}).decode(), flush=True)
    print(f"-> {save('compare_torchrun', result)}\n")
    print(
        "| system | runs | finished steps computed again | next good step after, s | run longer by, s | same losses | samples twice |"
    )
    print("|---|---|---|---|---|---|---|")
    for system, runs in result["runs"].items():
        print(row(system, runs))


if __name__ == "__main__":
    main()
