"""Workers that run out of memory, fill the disk, or print without end: an end with a reason, or no harm at all."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.waiting import wait_until

pytestmark = pytest.mark.slow

PRINTS = """
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "1":
    line, endless = b"x" * (2**20 - 1) + b"\\n", b"y" * 2**26
    for number in range(1024):
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.write(endless)
    sys.stdout.flush()
Path(f"printed-{os.environ['RANK']}").touch()
while not Path("go").exists():
    time.sleep(0.01)
"""

TRAINS = """
import os, resource, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import rackrun

def runs_out_of_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    try:
        torch.ones(2**28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def fills_the_disk_and_dies():
    with open(os.path.join(sys.argv[2], "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)

@rackrun.elastic(global_batch_size=8, micro_batch_size=2)
def main(run):
    torch.set_num_threads(1)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)))

    @run.step
    def train_step(step):
        for (batch,) in data:
            step.backward(model(batch).pow(2).mean())
        if run.rank == 1 and int(step) == 4:
            if sys.argv[1] == "disk":
                fills_the_disk_and_dies()
            elif sys.argv[1] == "always" or not Path("mark").exists():
                Path("mark").touch()
                runs_out_of_memory()
        optimizer.step()
        optimizer.zero_grad()

    for step in run.steps(10):
        train_step(step)

main()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(TRAINS)
    return "train.py"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="to the console", marks=pytest.mark.soak),
        pytest.param(["--tee", "3"], id="and to a file", marks=pytest.mark.soak),
    ],
)
def test_a_gibibyte_of_output_takes_no_memory(
    options: list[str], start_rackrun: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "stdout.txt").symlink_to("/dev/null")
    logs = tmp_path / "logs"
    job = start_rackrun(["--standalone", "--nproc-per-node", "2", "--log-dir", logs, *options, "prints.py"])
    wait_until(lambda: len(list(tmp_path.glob("printed-*"))) == 2, 90)
    launcher_and_agent = job.pids()[:2]
    peaks = [_peak_mib(pid) for pid in launcher_and_agent]
    (tmp_path / "go").touch()
    ran = job.finish(60)
    assert ran.exit_code == 0, ran
    assert max(peaks) < 600, f"peak resident memory, MiB: {peaks}"  # 350 of it is torch itself
    for file in logs.rglob("*.log"):
        assert "1" not in file.parent.name or file.stat().st_size in (0, 2**30 + 2**26)
        file.unlink()


def test_a_rank_that_runs_out_of_memory_once_is_replaced(run_rackrun: Callable[..., Any], script: str) -> None:
    ran = run_rackrun(["--standalone", "--nproc-per-node", "3", "--spares", "1", script, "once"])
    assert ran.exit_code == 0, ran
    assert "rank 1 lost on tray-00/1 (RuntimeError)" in ran.stderr, ran
    assert "Cannot allocate memory" in ran.stderr, ran


@pytest.mark.stories
def test_a_rank_that_always_does_ends_the_job_with_its_traceback(run_rackrun: Callable[..., Any], script: str) -> None:
    """The spare fails at the same step in the same way: not the hardware's."""
    ran = run_rackrun(["--standalone", "--nproc-per-node", "4", "--spares", "2", script, "always"])
    assert ran.exit_code == 1, ran
    assert "the script failed on rank 1: RuntimeError" in ran.stderr
    assert "torch.ones(2**28)" in ran.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The run's ``--out-dir``, on a file system of 2 MiB. The launcher's own output goes elsewhere."""
    out_dir = tmp_path / "run-0"
    out_dir.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", out_dir], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount: {mounted.stderr.strip()}")
    for name in ("stdout.txt", "stderr.txt"):
        (out_dir / name).symlink_to(tmp_path / name)
    yield out_dir
    subprocess.run(["umount", out_dir], check=True)


def test_a_full_disk_ends_the_job_with_its_reason(
    run_rackrun: Callable[..., Any], small_disk: Path, script: str
) -> None:
    """A generation that cannot be written down is not announced."""
    ran = run_rackrun(["--standalone", "--nproc-per-node", "3", "--spares", "1", script, "disk", str(small_disk)])
    assert ran.exit_code == 3, ran
    assert "could not be persisted" in ran.stderr, ran
    assert "free disk space" in ran.stderr, ran


def _peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) // 1024
