"""A campaign goes on where it ended, and tells what each of its seeds came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.chaos.base.job_layout import JobLayout
from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.targets import One
from rackrun.chaos.plan.definition import AtStep, Inject, Plan
from rackrun.chaos.plan.survivability import Label
from rackrun.chaos.runs.campaign import TallyHeader, TallyLine, read_tally, run_campaign
from rackrun.chaos.runs.draw_run import DrawnRun
from rackrun.errors import UsageError

SMALL = Path(__file__).resolve().parents[3] / "examples" / "chaos" / "small.py"
COMMAND = [str(SMALL), "{wrap}", "{reduction}", "40", "{out}"]


def line(seed: int, **changes: Any) -> TallyLine:
    fields = {
        "label": "survivable",
        "holds": True,
        "faults": ("kill", "pause"),
        "struck": 2,
        "layout": "1x4-1 ddp fast",
    }
    told = {"recoveries": 1, "steps": 24, "seconds": 5.0, "because": "exit code 0"}
    return TallyLine(seed=seed, **{**fields, **told, **changes})


@pytest.fixture
def tally(tmp_path: Path) -> Path:
    """Of three seeds, one of them wrong, one unknown."""
    path = tmp_path / "tally.jsonl"
    lines = [line(0), line(1, holds=False, wrong={"losses": "step 3"}), line(2, holds=None, label="beyond")]
    head = TallyHeader(command=tuple(COMMAND))
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (head, *lines)))
    return path


def test_what_the_tally_has_is_not_run_again(tally: Path, tmp_path: Path) -> None:
    before = tally.read_bytes()
    sums = run_campaign(range(3), COMMAND, tally=tally)
    assert tally.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tally.jsonl"]
    assert (sums.seeds, sums.faults, sums.seconds) == (3, 6, 15.0)
    assert sums.families() == ["hang", "process", "all"]
    assert {key: count for key, count in sums.runs.items() if key[0] == "hang"} == {
        ("hang", "survivable", True): 1,
        ("hang", "survivable", False): 1,
        ("hang", "beyond", None): 1,
    }
    assert [one.seed for one in sums.wrong] == [1, 2]


def test_no_seed_is_begun_when_the_time_is_over(tally: Path) -> None:
    assert run_campaign(range(10), COMMAND, tally=tally, limit_s=0.0).seeds == 3


def test_half_a_line_of_who_was_ended_is_not_read_and_cut_off(tally: Path) -> None:
    before = tally.read_bytes()
    tally.write_bytes(before + b'{"seed":7,"la')
    assert run_campaign(range(3), COMMAND, tally=tally).seeds == 3
    assert tally.read_bytes() == before


def test_the_tally_of_another_campaign_is_refused(tally: Path) -> None:
    with pytest.raises(UsageError, match="another campaign"):
        run_campaign(range(3), ["other.py"], tally=tally)
    tally.write_text("something else\n")
    with pytest.raises(UsageError, match="is not a file of campaign results"):
        read_tally(tally)


@pytest.mark.parametrize("word", ["--spares", "--nproc_per_node=4", "--checkpoint-dir"])
def test_what_the_campaign_draws_is_not_given(word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"the campaign chooses {word} at random"):
        run_campaign(range(1), [word, *COMMAND], tally=tmp_path / "tally.jsonl")


@pytest.mark.slow
@pytest.mark.stories
@pytest.mark.timeout(600)
def test_seeds_share_a_run_without_faults_and_what_fails_is_kept(tmp_path: Path) -> None:
    tally = tmp_path / "tally.jsonl"

    def draw(seed: int) -> DrawnRun:
        """Seed 1 flips a bit, which nobody was asked to see. Both compute the same, with and without a checkpoint."""
        fault = FlipBit(of="parameters") if seed else Kill()
        plan = Plan(plan=Inject(fault=fault, target=One(Subjects.RANK), when=AtStep(step=4)), seed=seed)
        layout = JobLayout(slots=3, spares=1, checkpoints=bool(seed), starts_over=bool(seed))
        return DrawnRun(layout, "ddp", "fast", plan, Label.SURVIVABLE, "", ("flip_bit" if seed else "kill",))

    told: list[str] = []
    sums = run_campaign(range(2), COMMAND, tally=tally, tell=told.append, draw=draw)
    print(*told, sep="\n")
    assert sorted((one.seed, one.holds, one.steps) for one in read_tally(tally)) == [(0, True, 40), (1, False, 40)]
    runs = Path(f"{tally}.runs")
    assert sorted(path.name for path in runs.iterdir()) == ["references", "seed-000001"]
    assert [path.name for path in (runs / "references").iterdir()] == ["2-ddp-fast"]
    assert json.loads((runs / "seed-000001" / "resolved.json").read_text())["plan"]
    assert [one.seed for one in sums.wrong] == [1]
