"""What it costs to simulate a job on 100,008 GPUs (1,389 racks of 72) for 30 days, on one core.

    python benchmarks/planner.py              about 40 s on one core
    python benchmarks/planner.py --gpus 4608

The rates are those of Llama 3's cluster, and twice as many. Measured: processor time and wall time of one run, with and
without the shortcut (without it the placement's solver is asked about every loss), and that both come to the same. Reading the fleet
into arrays is done once for all runs, and shown by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from jobs import machine, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rackrun.chaos.planner.analysis.simulation_case import Case, simulate
from rackrun.chaos.planner.inputs.failures import FailureProcess
from rackrun.chaos.planner.inputs.fleet import FleetJob, board_of, fleet_of
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.inputs.published_failure_rates import preset

DAY = 86400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=100_008)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--rates", type=int, nargs="+", default=[1, 2], help="times Llama 3's")
    args = parser.parse_args()
    fleet = fleet_of(args.gpus)
    found: dict[str, Any] = {"machine": machine(), "gpus": fleet.total_gpus, "racks": fleet.racks, "days": args.days}
    busy, start = time.process_time(), time.perf_counter()
    board_of(fleet)
    found["fleet"] = {"cpu_s": time.process_time() - busy, "wall_s": time.perf_counter() - start}
    print(f"{fleet.total_gpus} GPUs in {fleet.racks} racks, {args.days:g} days")
    print(f"{'':42}  failures  breaks  events    cpu      wall     goodput  answered by")
    runs = []
    for times in args.rates:
        for spares, shortcut in ((8, True), (8, False), (0, True)):
            mtbf_s = preset("llama3").mtbf_s(fleet.gpus) / times
            tray = FailureProcess(name="tray", domain="tray", mtbf_s=mtbf_s, repair_s=4 * 3600.0)
            job = FleetJob(spares_per_rack=spares, group=8, exact=True)
            case = Case(fleet=fleet, job=job, costs=PlanCosts(), processes=(tray,), horizon_s=args.days * DAY)
            busy, start = time.process_time(), time.perf_counter()
            outcome = simulate(case, 1, shortcut=shortcut)
            cpu_s, wall_s = time.process_time() - busy, time.perf_counter() - start
            what = f"Llama 3 x {times}, {spares} spares/rack{'' if shortcut else ', all asked'}"
            rungs = ", ".join(f"{count} {name}" for name, count in outcome.rungs.items())
            print(
                f"{what:42}  {outcome.strikes:8}  {outcome.breaks:6}  {outcome.events:6}  {cpu_s:6.2f} s  {wall_s:6.2f} s  "
                f"{outcome.goodput:7.2%}  {rungs}",
                flush=True,
            )
            runs.append(
                {
                    "rate": times,
                    "spares_per_rack": spares,
                    "shortcut": shortcut,
                    "cpu_s": cpu_s,
                    "wall_s": wall_s,
                    "failures": outcome.strikes,
                    "breaks": outcome.breaks,
                    "events": outcome.events,
                    "goodput": outcome.goodput,
                    "rungs": outcome.rungs,
                }
            )
        with_it, without = runs[-3], runs[-2]
        if any(with_it[name] != without[name] for name in ("goodput", "rungs", "events")):
            print("the shortcut comes to something else than the solver", file=sys.stderr)
            return 1
    found["runs"] = runs
    save("planner", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
