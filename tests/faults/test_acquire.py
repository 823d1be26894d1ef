"""No spare is left, a tray is killed, and another rack is got: the same training, and nothing of the rack is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rackrun.coordinator.report.run_report import read_report
from tests.faults.resized import Story, assert_nothing_is_lost_or_used_twice
from tests.faults.scripts.strike import Fault
from tests.faults.trained import Trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]
TRAY_LOST = Fault(name="agent", place="backward", rank=3, step=5, then="AGENT")
PROVIDERS = "tests.faults.scripts.providers"


def notices(trained: Trained) -> str:
    return "\n".join(one.text for one in read_report(trained.ran.out_dir / "journal.sqlite").notices)


@pytest.mark.stories
def test_a_rack_comes_while_all_stand_still(train: Train, reference: Reference) -> None:
    options = ["--provider", "local", "--policy", "swap,acquire-wait", "--max-restarts", 0]
    trained = train("ddp", [TRAY_LOST], spares=0, trays=2, options=options)
    trained.unheard = frozenset({2, 3})
    trained.assert_same_training(reference("ddp"), [TRAY_LOST])
    (recovery,) = trained.recoveries
    assert recovery["rungs"] == ["acquire", "swap"], trained
    assert {lost["to"] for lost in recovery["lost"]} == {"rack-1-00/0", "rack-1-00/1"}, trained


@pytest.mark.stories
def test_a_rack_comes_for_shards_too(train: Train, reference: Reference) -> None:
    """Their only copies are the mirrors on the tray that is left."""
    options = ["--provider", "local", "--policy", "swap,acquire-wait", "--max-restarts", 0]
    trained = train("fsdp", [TRAY_LOST], spares=0, trays=2, options=options)
    trained.unheard = frozenset({2, 3})
    trained.assert_same_training(reference("fsdp"), [TRAY_LOST])
    assert [recovery["rungs"] for recovery in trained.recoveries] == [["acquire", "swap"]], trained


@pytest.mark.stories
@pytest.mark.parametrize(
    ("provider", "told"),
    [
        ("Hangs", "rack 1 came to nothing: it did not come within 2 s (--acquire-timeout)"),
        ("Dies", "rack 1 came to nothing: the provider failed: the provider has ended its process"),
        ("Breaks", "rack 1 came to nothing: it is of no use: its workers fail (rack-1-00/"),
    ],
)
def test_with_a_provider_of_which_nothing_comes_the_job_goes_on_with_the_next_rung_and_says_why(
    provider: str, told: str, story: Callable[..., Trained]
) -> None:
    def change(story: Story) -> None:
        kill_agent(story)
        story.go_on(2)

    timeout_s = 2 if provider == "Hangs" else 600
    options = [*TWO_TRAYS, "--policy", "swap,acquire-wait,shrink", "--provider", f"{PROVIDERS}:{provider}"]
    trained = story("ddp", 4, 30, "exact", change, options=[*options, "--acquire-timeout", timeout_s])
    (recovery,) = trained.recoveries
    assert (recovery["rungs"], recovery["world_size"]) == (["acquire", "shrink"], 2), trained
    assert told in notices(trained), notices(trained)


TWO_TRAYS = ["--trays", 2, "--nproc-per-node", 2, "--max-restarts", 0]


def kill_agent(story: Story) -> None:
    """Of the last rank's tray."""
    server, agent, *_ = psutil.Process(story.pid(story.slots()[-1])).parents()
    assert server.pid != story.job.process.pid != agent.pid
    os.kill(agent.pid, signal.SIGKILL)


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_it_is_trained_on_until_the_rack_has_come_and_then_by_all(mode: str, story: Callable[..., Trained]) -> None:
    def change(story: Story) -> None:
        kill_agent(story)
        story.go_on(2)
        for slot in ("rack-1-00-0", "rack-1-00-1"):
            story.let_come(slot)
        story.go_on(4)

    steps = 30
    reference = story(mode, 4, steps, "exact", lambda story: None, options=TWO_TRAYS)
    options = [*TWO_TRAYS, "--provider", "local", "--policy", "swap,acquire-train"]
    trained = story(mode, 4, steps, "exact", change, options=options)
    assert trained.sizes[:2] == [4, 2], trained
    assert trained.sizes[-1] == 4, trained
    assert trained.recoveries[0]["rungs"] == ["acquire"], trained
    assert trained.recoveries[0]["predicted_gpu_s"] > 0, trained
    assert trained.recoveries[0]["measured_gpu_s"] > 0, trained
    assert trained.gates == reference.gates, trained
    assert trained.held == reference.held, trained
    assert_nothing_is_lost_or_used_twice(reference, steps)
    assert_same_samples(trained, reference)


def assert_same_samples(trained: Trained, reference: Trained) -> None:
    """The killed agent may have had rows of its ranks to tell that nobody has heard of; the gates tell of their samples too."""
    ledger = read_report(trained.ran.out_dir / "journal.sqlite").ledger
    assert not ledger.doubled, trained
    assert not ledger.differing, trained
    assert all(one.endswith(("rank 2", "rank 3", "rank 2, 3")) for one in ledger.missing), ledger.missing
    for step, by_rank in reference.samples.items():
        expected = {sample for ids in by_rank.values() for sample in ids}
        assert {sample for ids in trained.samples[step].values() for sample in ids} <= expected, step


@pytest.mark.stories
def test_when_the_process_of_the_provider_is_killed_its_rack_is_lost_and_another_one_is_got(
    train: Train, reference: Reference
) -> None:
    """It is what a rented agent has above it where others have the launcher."""
    killed = Fault(name="provider", place="backward", rank=3, step=8, then="LAUNCHER", after="agent")
    options = ["--provider", "local", "--policy", "swap,acquire-wait", "--max-restarts", 0]
    trained = train("ddp", [TRAY_LOST, killed], spares=0, trays=2, options=options)
    trained.unheard = frozenset({2, 3})
    trained.assert_same_training(reference("ddp"), [TRAY_LOST, killed])
    assert [recovery["rungs"] for recovery in trained.recoveries] == [["acquire", "swap"]] * 2, trained
    assert {lost["to"] for lost in trained.recoveries[-1]["lost"]} == {"rack-2-00/0", "rack-2-00/1"}, trained


@pytest.mark.stories
def test_nothing_of_a_rack_is_left_when_the_launcher_is_killed(train: Train, tmp_path: Path) -> None:
    killed = Fault(name="launcher", place="backward", rank=0, step=8, then="LAUNCHER", after="agent")
    options = ["--provider", "local", "--policy", "swap,acquire-wait", "--max-restarts", 0]
    trained = train("ddp", [TRAY_LOST, killed], spares=0, trays=2, options=options)
    assert trained.ran.exit_code == -signal.SIGKILL, trained
    assert "launcher" in trained.struck, trained
    assert not trained.ran.left_behind, trained
