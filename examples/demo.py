"""Trains the same small GPT twice, kills a rank in the second run, and compares everything.

make demo
python examples/demo.py --fault stop --seed 7        # SIGSTOP instead of SIGKILL, at another moment
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANKS, SPARES, VICTIM = 4, 1, 2
STEP_LINE = re.compile(r"^step (\d+) ")


@dataclass
class Run:
    """What is known of a run once it is over."""

    exit_code: int = -1
    step_at: dict[int, float] = field(default_factory=dict)
    """When the launcher printed each step."""
    fault_at: float | None = None
    gates: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(step, phase) -> what the world agreed on when it committed it; the loss over the global batch is its first float64."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """step -> ids of the samples that were delivered in the committed attempt, over all ranks, sorted."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    """sha256 of each rank's final weights."""
    kept: list[int] = field(default_factory=list)
    """Ranks that had the same process at the end as at the beginning."""
    first_of_new_world: int | None = None
    """The first step that the world with the spare in it committed."""


def worker_pid(out_dir: Path, launcher: int, rank: int) -> int:
    """The process that is ``rank`` now."""
    endpoint = json.loads((out_dir / "endpoint.json").read_text())
    token = (out_dir / "token").read_text().strip()
    request = urllib.request.Request(f"{endpoint['url']}/api/status", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        ranks = json.load(answer)["core"]["ranks"]
    slot = next(view["slot"] for view in ranks if view["rank"] == rank)
    page = f"/memfd:rackrun-page-{slot} "  # each worker maps one heartbeat page, its own
    for pid in descendants(launcher):
        pages = {line[line.index("/memfd:") :] + " " for line in maps(pid) if "/memfd:rackrun-page-" in line}
        if len(pages) == 1 and page in pages.pop() and os.getsid(pid) == pid:
            return pid
    raise RuntimeError(f"no process holds the heartbeat page of {slot}")


def maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def train(
    title: str, folder: Path, arguments: Sequence[str], fault: signal.Signals | None, fault_step: int, fraction: float
) -> Run:
    """One run of the example; the fault comes ``fraction`` of a step after ``fault_step`` was committed."""
    print(f"\n== {title}", flush=True)
    folder.mkdir()
    out_dir, weights = folder / "run", folder / "weights.json"
    command = [
        *(sys.executable, "-m", "rackrun", "--standalone", "--nproc-per-node", str(RANKS + SPARES)),
        *("--spares", str(SPARES), "--ledger", "ids", "--out-dir", str(out_dir)),
        *(str(HERE / "train_gpt.py"), "--save", str(weights), *arguments),
    ]
    run = Run()
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def strike(pid: int) -> None:
        time.sleep(fraction * step_seconds(run))
        assert fault is not None
        run.fault_at = time.monotonic()
        os.kill(pid, fault)
        print(f"   -- {fault.name} to rank {VICTIM} (process {pid}), in step {fault_step + 1}", flush=True)

    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = STEP_LINE.match(line)
            step = int(found[1]) if found else -1
            if found:
                new = step not in run.step_at
                run.step_at.setdefault(step, time.monotonic())
                if new and step == fault_step and fault is not None:
                    threading.Thread(target=strike, args=[worker_pid(out_dir, process.pid, VICTIM)]).start()
            if not found or step % 10 == 0 or "val_loss" in line or abs(step - fault_step) <= 2:
                print(f"   {line}", end="", flush=True)
        run.exit_code = process.wait()
        read_journal(out_dir / "journal.sqlite", run)
        if weights.exists():
            run.weights = json.loads(weights.read_text())["weights_sha256"]
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends everything that it started
            process.wait()
    return run


def step_seconds(run: Run) -> float:
    return statistics.median(later - earlier for earlier, later in pairwise(sorted(run.step_at.values())))


def read_journal(path: Path, run: Run) -> None:
    with sqlite3.connect(path) as journal:
        for step, phase, gate in journal.execute("SELECT step, phase, gate FROM units ORDER BY generation, rank"):
            run.gates[step, phase] = gate[:8]
        bodies = journal.execute("SELECT body FROM recoveries ORDER BY generation")
        run.recoveries = [json.loads(body) for (body,) in bodies]
        if run.recoveries:
            query = "SELECT min(step) FROM (SELECT step FROM units GROUP BY step HAVING min(generation) >= ?)"
            (run.first_of_new_world,) = journal.execute(query, [run.recoveries[-1]["generation"]]).fetchone()
        resumes = journal.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id")
        worlds = [json.loads(body)["plan"]["members"] for (body,) in resumes]
        run.kept = [
            a["rank"] for a, b in zip(worlds[0], worlds[-1], strict=False) if a["incarnation"] == b["incarnation"]
        ]
        of_rank: dict[tuple[int, int], bytes] = {}
        for step, rank, ids in journal.execute(
            "SELECT step, rank, ids FROM ledger WHERE phase = 0 ORDER BY generation"
        ):
            of_rank[step, rank] = ids
        for (step, _), ids in of_rank.items():
            run.samples.setdefault(step, []).extend(struct.unpack(f"<{len(ids) // 8}q", ids))
        for ids in run.samples.values():
            ids.sort()


def waterfall(recovery: dict[str, Any]) -> str:
    """The stages of a recovery, on the coordinator's clock, which starts when it hears of the fault."""
    stages = (
        ("broken", "break_ms"),
        ("parked", "parked_ms"),
        ("planned", "plan_ms"),
        ("resumed", "resumed_ms"),
        ("committed", "committed_ms"),
    )
    at = [
        f"{name} at {recovery[key] - recovery['fault_ms']:.0f} ms"
        for name, key in stages
        if recovery.get(key) is not None
    ]
    return f"{recovery['kind']}: noticed, {', '.join(at)}"


def compare(calm: Run, hit: Run, steps: int) -> bool:
    """Print what is the same; True when everything is."""
    losses = sum(calm.gates.get((step, 0), b"?") == hit.gates.get((step, 0)) for step in range(steps))
    weights = sum(a == b for a, b in zip(calm.weights, hit.weights, strict=False))
    once = [step for step in range(steps) if calm.samples.get(step) and calm.samples[step] == hit.samples.get(step)]
    total = sum(len(ids) for ids in hit.samples.values())
    distinct = len({sample for ids in hit.samples.values() for sample in ids})
    print(f"   losses     {losses} of {steps} steps equal, bit for bit")
    print(
        f"   weights    {weights} of {RANKS} ranks equal, bit for bit"
        + (f" (sha256 {hit.weights[0][:16]}...)" if hit.weights else "")
    )
    verdict = "none lost, none twice" if total == distinct and len(once) == steps else "NOT the same"
    print(
        f"   samples    {total} counted, {distinct} different, in {len(once)} of {steps} steps the same ones: {verdict}"
    )
    return losses == steps and weights == RANKS and len(once) == steps and total == distinct


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", choices=["kill", "stop"], default="kill")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10_000), help="of the moment of the fault"
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="FSDP2: no rank has a replica, so recovery goes through snapshots"
    )
    parser.add_argument("--keep", action="store_true", help="keep both runs' directories, for rackctl report")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    fault_step, fraction = rng.randrange(args.steps // 3, 2 * args.steps // 3), rng.random()
    fault = signal.SIGKILL if args.fault == "kill" else signal.SIGSTOP
    arguments = ["--steps", str(args.steps), *(["--fsdp"] if args.fsdp else [])]

    print(
        f"A small GPT on the source text of Python's standard library: {RANKS} ranks, {SPARES} warm spare, {args.steps} steps."
    )
    folder = Path(tempfile.mkdtemp(prefix="rackrun-demo-"))
    try:
        calm = train("1. without a fault", folder / "calm", arguments, None, -10, 0.0)
        title = f"2. the same again; rank {VICTIM} gets a {fault.name} at a random moment (--seed {args.seed})"
        hit = train(title, folder / "hit", arguments, fault, fault_step, fraction)
    finally:
        if args.keep:
            print(f"\nkept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)

    print("\n== 3. compared")
    same = compare(calm, hit, args.steps)
    if hit.fault_at is not None and hit.first_of_new_world in hit.step_at:
        took = hit.step_at[hit.first_of_new_world] - hit.fault_at
        print(
            f"   recovery   {took:.2f} s from the signal to the first step of the new world, step {hit.first_of_new_world} "
            f"(a step alone takes {step_seconds(calm):.2f} s)"
        )
    for recovery in hit.recoveries:
        print(f"   how        {waterfall(recovery)}")
    kept = f"ranks {', '.join(map(str, hit.kept))} kept theirs" if hit.kept else "NOT one was kept"
    print(f"   processes  {kept}")
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    if same and hit.kept == others and calm.exit_code == hit.exit_code == 0:
        print("\nThe same run, as if nothing had happened.")
        return 0
    print(f"\nNOT as promised (exit codes {calm.exit_code} and {hit.exit_code}).")
    return 1


if __name__ == "__main__":
    sys.exit(main())
