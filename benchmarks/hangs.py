"""How long until a rank that hangs is found: each kind of hang in each place, one job each, and how each job ends.

    python benchmarks/hangs.py                         all but what takes half an hour by design (about 25 minutes)
    python benchmarks/hangs.py --places step between   some of it
    python benchmarks/hangs.py --slow                  also loops that compute where nothing was observed: half an hour each

Steps take 0.05 s, a phase 0.8 s, the code between steps next to nothing, a way through ``main`` some seconds. ``first`` is the code after the first step, ``after``
that after ``main`` has returned. A cell is the time from the hang until the process that hangs is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from jobs import WORKLOADS, Job, JobFailed, machine, save

PLACES = ("step", "phase", "between", "reentry", "setup", "first", "after")
KINDS = ("sleep", "sleep with the lock", "loop", "stop", "deadlock", "system call", "loop that computes")
SLOW = dict.fromkeys(("setup", "first", "after"), ("loop that computes",))
"""Nothing was observed there, and the process is seen to work: minutes."""


def measure(place: str, kind: str, limit_s: float) -> dict[str, Any]:
    spares, ranks = (0, 4) if place == "reentry" else (2, 3)
    placement = ["--standalone", "--nproc-per-node", str(ranks + spares), "--spares", str(spares)]
    if place == "reentry":
        placement += ["--min-ranks", "2", "--policy", "swap,shrink,wait"]
    command = [
        *(sys.executable, "-m", "rackrun", *placement, "--out-dir", "{folder}/out"),
        *(str(WORKLOADS / "hanging.py"), "{folder}", place, kind),
    ]
    with Job(command) as job:
        told = job.folder / "hung"
        job.wait_for(lambda _: told.exists(), 180.0)
        hung = json.loads(told.read_text())
        try:
            job.wait_for(lambda _: gone(hung["pid"]), limit_s, poll_s=0.005)
            seconds: float | None = time.monotonic() - hung["t"]
        except JobFailed:
            seconds = None
        code = job.finish(300.0) if seconds is not None else None
        lines = [line for line in job.output().splitlines() if line.startswith("rackrun:")]
        return {"place": place, "kind": kind, "seconds": seconds, "exit_code": code, "told": lines[-4:]}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def table(cells: list[dict[str, Any]]) -> str:
    places = [place for place in PLACES if any(cell["place"] == place for cell in cells)]
    rows = ["| hang | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
    for kind in KINDS:
        found = {cell["place"]: cell for cell in cells if cell["kind"] == kind}
        shown = [
            ""
            if place not in found
            else f"{found[place]['seconds']:.1f}"
            if found[place]["seconds"] is not None
            else "not found"
            for place in places
        ]
        rows.append(f"| {kind} | " + " | ".join(shown) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", default=PLACES, choices=PLACES)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--name", default="hangs")
    arguments = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for place in arguments.places:
        for kind in arguments.kinds:
            slow = kind in SLOW.get(place, ())
            if slow and not arguments.slow:
                continue
            cell = measure(place, kind, 2000.0 if slow else 240.0)
            cells.append(cell)
            shown = "not found" if cell["seconds"] is None else f"{cell['seconds']:.2f} s"
            print(f"{place:8} {kind:20} {shown}, exit code {cell['exit_code']}", flush=True)
            for line in cell["told"]:
                print(f"    {line}", flush=True)
    print(table(cells))
    bad = [cell for cell in cells if cell["seconds"] is None or cell["exit_code"] != 0]
    save(arguments.name, {"machine": machine(), "cells": cells})
    sys.exit(os.EX_SOFTWARE if bad else 0)


if __name__ == "__main__":
    main()
