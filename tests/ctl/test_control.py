"""``rackctl drain``, ``return``, ``swap``, ``shrink``, ``grow``, ``policy`` of a job that trains: what they print, wait for, and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.waiting import wait_until

SCRIPT = """
import torch
import rackrun

@rackrun.elastic(global_batch_size=4, micro_batch_size=2, seed=1)
def main(run):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(torch.utils.data.TensorDataset(torch.randn(64, 3)))

    @run.step
    def train(step):
        for (x,) in data:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for step in run.steps(10**9):
        train(step)

main()
"""


@pytest.mark.slow
def test_a_job_does_what_it_is_asked_until_it_is_asked_to_stop(
    start_rackrun: Callable[..., Any], rackctl: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = start_rackrun(["--standalone", "--trays", "3", "--spares", "1", "train.py"])
    job.wait_for(lambda s: s["progress"]["steps"] > 2 and s["core"]["spares"][0]["state"] == "ready", 40)
    run = ("--run", job.out_dir)

    status = json.loads(rackctl("status", job.out_dir, "--json").out)
    assert (status["running"], status["core"]["world_size"]) == (True, 2)
    assert [rank["slot"] for rank in status["core"]["ranks"]] == ["tray-00/0", "tray-01/0"]

    unknown = rackctl("drain", "tray-05", *run)
    assert unknown.code == 2
    assert "there is no tray and no slot tray-05. Remedy: is tray-0" in unknown.err

    drained = rackctl("drain", "tray-01", "--because", "its fan", *run)
    assert drained.out.splitlines() == [
        "drain of tray-01: rank 1 will leave at the next step boundary",
        "tray-01 is empty",
    ]
    assert "tray-01/0 is not used: drained: its fan" in rackctl("status", job.out_dir).out

    def seen() -> bool:
        shown = json.loads(rackctl("topology", "show", *run, "--json").out)
        return [one["trouble"] for one in shown["slots"] if one["slot"] == "tray-01/0"] == ["drained"]

    wait_until(seen, 20)  # it reads the journal, which is written in batches

    refused = rackctl("swap", 0, *run)
    assert refused.code == 1
    assert "swap of rank 0 is refused: rank 0 would have to move, and no spare is left" in refused.err

    waiting = rackctl("drain", "tray-00", "--wait-for-spares", "--no-wait", *run)
    assert waiting.out.endswith("it waits for spares\n")
    assert rackctl("return", "tray-00", *run).out == "tray-00 may be used again\n"

    assert rackctl("return", "tray-01", *run).out == "tray-01 may be used again\n"
    swapped = rackctl("swap", 1, "--with", "tray-01/0", *run)
    assert swapped.out.splitlines()[-1] == "rank 1 went from tray-02/0 to tray-01/0"

    assert rackctl("policy", *run).out == "--policy cheapest --policy-weights goodput=1,cost=0,resilience=1\n"
    bad = rackctl("policy", "swop", *run)
    assert (bad.code, "there is no rung 'swop'" in bad.err) == (2, True)
    nobody = rackctl("policy", "nowhere:choose", *run)
    assert (nobody.code, "nowhere:choose cannot be loaded" in nobody.err) == (2, True)
    (tmp_path / "chosen.py").write_text("def choose(failure, view):\n    return None\n")
    changed = rackctl("policy", "chosen:choose", "--weights", "cost=0.5", *run)
    now = "--policy chosen:choose --policy-weights goodput=1,cost=0.5,resilience=1\n"
    assert changed.out == f"from now on: {now}"
    assert rackctl("policy", *run).out == now

    both = rackctl("shrink", 1, "--to", 1, *run)
    assert both.code == 2
    shrunk = rackctl("shrink", "--to", 1, *run)
    assert shrunk.out.splitlines() == [
        "shrink to 1 ranks: rank 1 will leave at the next step boundary",
        "the world has 1 of 2 ranks, until others are asked for (rackctl grow)",
    ]
    none = rackctl("shrink", 0, *run)
    assert none.code == 2
    assert "0 ranks would be left, of 1 at the least (--min-ranks)" in none.err
    assert rackctl("grow", *run).out.splitlines()[-1] == "the world has 2 of 2 ranks"
    status = json.loads(rackctl("status", job.out_dir, "--json").out)
    seats = [rank["slot"] for rank in status["core"]["ranks"]]
    assert seats in (["tray-00/0", "tray-01/0"], ["tray-00/0", "tray-02/0"]), "whose worker was ready first"

    stopping = rackctl("stop", *run)
    assert stopping.out.startswith("stopping at the next step boundary, or after 60 s; a second rackctl stop ends")
    assert job.finish(40).exit_code == 143

    assert "ended with exit code 143" in rackctl("status", *run).out
    on_rack = json.loads(rackctl("topology", "show", *run, "--json").out)
    assert on_rack["seats"] == seats
    refused = rackctl("stop", job.out_dir)
    assert (refused.code, "has ended already" in refused.err) == (2, True)
    late = rackctl("drain", "tray-01", *run)
    assert late.code == 2
    assert "has ended already" in late.err
    report = rackctl("report", *run)
    assert report.code == 0
    assert "drain of tray-00 is called off: tray-00 was returned" in report.out


@pytest.mark.parametrize("command", ["status", "report", "stop", "close-breaker"])
def test_a_run_that_is_named_twice_is_refused(command: str, rackctl: Callable[..., Any], tmp_path: Path) -> None:
    refused = rackctl(command, tmp_path, "--run", tmp_path)
    assert (refused.code, "two runs are named" in refused.err) == (2, True)
    assert "two runs are named" not in rackctl(command, "--run", tmp_path).err
