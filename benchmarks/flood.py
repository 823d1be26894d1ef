"""Recovery of a killed rank while strangers flood every listener of the job, against one without them.

    python benchmarks/flood.py              5 pairs (minutes)
    python benchmarks/flood.py --pairs 1    does it still work

Each round starts a job of 2 ranks and a warm spare, once undisturbed and once with --callers connections a listener, which say nothing,
too much, or one byte, and call again when they are hung up on. Every process may have --descriptors open files. A rank is killed; **recovery**
is what the launcher prints. **Memory** is the most that any process of the job has, when all have called. torch's TCPStore is left out: it takes in whoever comes.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.launcher.flood import Flood, listening, torchs_stores  # noqa: E402

WAIT_S = 120.0
SCRIPT = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import rackrun

@rackrun.elastic(global_batch_size=8, micro_batch_size=2)
def main(run):
    model = DDP(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader([torch.full((64,), n / 64) for n in range(64)])

    @run.step
    def train(step):
        for x in loader:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(1_000_000):
        if number == 20:
            import os
            Path(f"pid-{run.rank}").write_text(str(os.getpid()))
        time.sleep(0.02)
        train(number)
main()
"""


def until(what: str, find: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not find():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(0.02)


def once(callers: int, descriptors: int) -> tuple[float, float]:
    """Seconds of the recovery; MB of the largest process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        command = [
            sys.executable,
            "-m",
            "rackrun",
            "--standalone",
            "--nproc-per-node",
            "3",
            "--spares",
            "1",
            "--out-dir",
            "out",
            "train.py",
        ]
        with (folder / "said").open("wb") as said:
            job = subprocess.Popen(
                command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=said, stderr=said
            )
        flood = None
        try:
            resource.prlimit(job.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
            pid = folder / "pid-1"
            until("the first steps", lambda: pid.exists() and pid.read_text())
            pids = [job.pid, *(one.pid for one in psutil.Process(job.pid).children(recursive=True))]
            if callers:
                ports = set(listening(pids)) - set(torchs_stores(folder / "out", pids))
                flood = Flood(sorted(ports), callers)
                until("the flood", lambda: flood.calls > callers * len(ports))
            memory = max(psutil.Process(one).memory_info().rss for one in pids if psutil.pid_exists(one))
            os.kill(int(pid.read_text()), signal.SIGKILL)
            pattern = re.compile(r"rank 1 lost .* in ([0-9.]+) s")
            until("the recovery", lambda: pattern.search((folder / "said").read_text()))
            found = pattern.search((folder / "said").read_text())
            assert found
            return float(found[1]), memory / 1e6
        finally:
            if flood is not None:
                flood.end()
            job.terminate()
            job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--callers", type=int, default=300)
    parser.add_argument("--descriptors", type=int, default=256)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for pair in range(given.pairs):
        for kind in sorted(found, reverse=bool(pair % 2)):
            found[kind].append(once(given.callers if kind == "with" else 0, given.descriptors))
    for kind, rounds in found.items():
        seconds, memory = [one for one, _ in rounds], [one for _, one in rounds]
        print(
            f"{kind:8} recovery {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), memory {max(memory):.0f} MB"
        )


if __name__ == "__main__":
    main()
