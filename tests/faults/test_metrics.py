"""What a job's metrics say of the copies of its state, while it runs and after a rank was lost."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rackrun.coordinator.report.run_report import read_report
from tests.faults.conftest import SCRIPT
from tests.faults.scripts.strike import Fault, faults_to_json

pytestmark = pytest.mark.slow

STEPS = 12
Samples = dict[tuple[str, str], float]
"""(name, its label's value) -> value"""


def scraped(out_dir: Path) -> Samples:
    url = json.loads((out_dir / "endpoint.json").read_text())["url"]
    token = (out_dir / "token").read_text().strip()
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name.removeprefix("rackrun_"), next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.stories
def test_a_job_shows_its_snapshots_their_copies_its_checkpoints_and_where_it_was_restored_from(
    start_rackrun: Callable[..., Any], tmp_path: Path
) -> None:
    """FSDP2 on two trays; rank 1 is lost in step 8, all go back to the end of step 6. Rank 0 waits after the last step until the metrics were read."""
    faults = [
        Fault(name="lost", place="backward", rank=1, step=8),
        Fault(name="held", place="after the loop", rank=0, then="wait", until="read"),
    ]
    marks = tmp_path / "marks"
    for folder in (marks, tmp_path / "held"):
        folder.mkdir()
    options = ["--nproc-per-node", 2, "--trays", 2, "--spares", 2, "--preload", "torch.distributed.fsdp"]
    options += ["--filler", "sh -c 'trap : TERM; while :; do sleep 0.1; done'"]
    options += ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 2]
    env = {"RACKRUN_TEST_FAULTS": faults_to_json(faults), "RACKRUN_TEST_MARKS": str(marks)}
    job = start_rackrun(["--standalone", *options, SCRIPT, "fsdp", STEPS, tmp_path / "held"], env=env)

    seen: Samples = {}
    deadline = time.monotonic() + 100
    while seen.get(("checkpoint_step", "")) != STEPS - 1:
        assert job.process.poll() is None, job.finish(0.0)
        assert time.monotonic() < deadline, f"{seen}\n{job.finish(0.0)}"
        time.sleep(0.05)
        if (marks / "held").exists():  # the last checkpoint may still be on its way
            seen = scraped(job.out_dir)
    (marks / "read").touch()
    ran = job.finish(30)
    assert ran.exit_code == 0, ran

    assert seen["step", ""] == STEPS - 1
    assert STEPS - 4 <= seen["snapshot_step", ""] <= STEPS - 1, "one after every other step"
    assert 0 <= seen["snapshot_mirrored_step", ""] <= seen["snapshot_step", ""]
    assert seen["snapshot_bytes", ""] > 4096
    assert seen["snapshot_stall_seconds_count", ""] >= 2 * 4
    assert seen["snapshot_copies_total", "made"] >= 2
    assert seen["restores_total", "own_snapshot"] == 1, seen
    assert seen["restores_total", "its_tray"] == 1, seen
    assert seen["checkpoints_total", "done"] == seen["checkpoint_write_seconds_count", ""] >= 1
    assert seen["recoveries_total", "swap"] == 1

    assert seen["filler_starts_total", ""] >= 2, "beside both spares"
    assert seen["filler_gone_seconds_count", ""] >= 1
    fillers = read_report(job.out_dir / "journal.sqlite").fillers
    assert len(fillers) >= 2
    assert sum(one.had_to_go for one in fillers) == sum(one.starts for one in fillers), (
        "all are gone at the end, and told of"
    )
