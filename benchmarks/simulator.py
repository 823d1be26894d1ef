"""The coordinator's own core in virtual time: many drawn jobs and faults, with all invariants checked; and what its events cost.

    python benchmarks/simulator.py                  50,000 seeds on 2 processes (about ten minutes), then the core's speed
    python benchmarks/simulator.py --seeds 0:1000   does it still work

It ends with 1 where a seed found something.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

from jobs import machine, save

from rackrun.chaos.simulator.base.coverage_marks import MARKS
from rackrun.chaos.simulator.core_benchmark import measure
from rackrun.chaos.simulator.fuzzing.fuzz import Tally, sweep

RANKS = (64, 4_000, 20_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:50000", metavar="A:B", help="from A up to, but without, B")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    first, _, end = args.seeds.partition(":")
    seeds, total, began = range(int(first), int(end)), Tally(), time.monotonic()
    for _, tally in sweep([seeds], args.jobs):
        total.merge(tally)
        for seed, what in tally.failed.items():
            print(f"seed {seed}: {what}", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{total.seeds} seeds in {seconds:.0f} s, {total.core_events} core events; failed: {len(total.failed)}",
        flush=True,
    )
    costs = []
    for ranks in RANKS:
        for cost in measure(ranks):
            print(cost, flush=True)
            costs.append(dataclasses.asdict(cost))
    found = {
        "machine": machine(),
        "seeds": [seeds.start, seeds.stop],
        "jobs": args.jobs,
        "seconds": round(seconds, 1),
        "core_events": total.core_events,
        "exits": dict(sorted(total.exits.items())),
        "failed": {str(seed): what for seed, what in sorted(total.failed.items())},
        "marks": dict(sorted(total.marks.items())),
        "never": [mark for mark in MARKS if not total.marks[mark]],
        "core": costs,
    }
    print(f"-> {save('simulator', found)}")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
