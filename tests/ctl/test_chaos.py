"""``rackctl chaos``: its options, and what it refuses before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.chaos.cli import chaos_commands
from rackrun.chaos.runs.campaign import TallySums
from rackrun.checkpoint.base.errors import CheckpointError
from tests.chaos.recorded import write_run
from tests.chaos.report.test_report import line_of, write_tally
from tests.ctl.conftest import Said

Rackctl = Callable[..., Said]


def write(folder: Path, fault: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(f"plan: {{do: inject, fault: {{fault: {fault}}}, target: {{who: one, of: tray}}}}")
    return path


def test_the_doctor_says_what_can_be_and_why_not_the_rest(rackctl: Rackctl) -> None:
    said = rackctl("chaos", "doctor", "--json")
    assert said.code == 0
    found = {one["fault"]: one for one in said.json}
    assert found["kill"]["can"]
    assert all(one["can"] or one["remedy"] for one in found.values())
    assert "kill" in rackctl("chaos", "doctor").out


def test_a_plan_that_cannot_be_read_is_bad_usage(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("chaos", "run", tmp_path / "none.yaml", "--", "train.py")
    assert said.code == 2
    assert "none.yaml" in said.err
    assert rackctl("chaos", "run", write(tmp_path, "earthquake"), "--", "train.py").code == 2


def test_a_fault_that_a_real_job_cannot_have_is_refused_before_the_start(rackctl: Rackctl, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = rackctl(
        "chaos", "run", write(tmp_path, "slow, share: 1.5"), "--out", out, "--", "--nproc-per-node", "2", "train.py"
    )
    assert said.code == 2
    assert "no slowness" in said.err
    assert not out.exists()


def test_it_is_listed_with_the_other_commands(rackctl: Rackctl) -> None:
    assert "chaos" in rackctl("--help").out
    assert "doctor" in rackctl("chaos", "--help").out


def test_a_report_is_made_again_and_told_in_a_line_in_markdown_or_for_machines(
    rackctl: Rackctl, tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out")
    said = rackctl("chaos", "report", out)
    assert said.code == 0
    assert said.out.startswith("chaos true; ranks are killed, seed 3; 1 strike (kill)")
    assert "report.html" in said.out
    page = (out / "report.html").read_bytes()
    assert rackctl("chaos", "report", out, "--line").out.count("\n") == 1
    assert rackctl("chaos", "report", out, "--markdown").out == (out / "report.md").read_text()
    assert rackctl("chaos", "report", out, "--json").json["strikes"][0]["first_step"] == 7
    assert (out / "report.html").read_bytes() == page


def test_of_a_tally_there_is_one_page(rackctl: Rackctl, tmp_path: Path) -> None:
    tally = write_tally(tmp_path / "tally.jsonl", line_of(1))
    assert rackctl("chaos", "report", tally, "--line").out == "chaos: 1 runs, 2 faults: 1 true\n"
    assert (tmp_path / "tally.jsonl.html").exists()


def test_what_is_no_run_has_no_report(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("chaos", "report", tmp_path)
    assert said.code == 2
    assert "no run with faults" in said.err


def test_the_schema_is_a_json_schema_that_knows_every_fault(rackctl: Rackctl) -> None:
    said = rackctl("chaos", "schema")
    assert said.code == 0
    assert said.json["$ref"]
    for name in ("kill", "disk_full", "flip_flop", "neighbour_of"):
        assert f'"{name}"' in said.out


def test_an_unknown_fault_is_answered_with_those_that_there_are(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("chaos", "run", write(tmp_path, "pauze"), "--", "train.py")
    assert said.code == 2
    assert "did you mean pause? There are: kill, raise," in said.err


def test_a_plan_that_nobody_has_run_cannot_be_reduced_without_its_command(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("chaos", "reduce", write(tmp_path, "kill"))
    assert said.code == 2
    assert "no summary.json beside" in said.err
    assert "after --" in said.err


def test_repeats_below_one_prove_nothing(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("chaos", "reduce", write(tmp_path, "kill"), "--repeats", "0", "--", "train.py")
    assert said.code == 2
    assert "0 repeats prove nothing" in said.err


RUN = ("chaos", "run", Path(__file__).parents[2] / "examples" / "chaos" / "rank_killed.yaml", "--", "train.py")


@pytest.mark.parametrize("error", [RuntimeError("it broke"), CheckpointError("it broke"), OSError("it broke")])
def test_a_harness_that_fails_has_no_verdict(
    error: Exception, rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 would say that the job was not as it must be, and 3 that nobody knows."""

    def fails(*_args: object, **_more: object) -> None:
        raise error

    monkeypatch.setattr(chaos_commands, "run_plan", fails)
    said = rackctl(*RUN)
    assert said.code == 70
    assert "it broke" in said.err
    assert "report" in said.err


def test_who_is_interrupted_says_what_there_is(
    rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_args: object, sums: TallySums | None = None, **_more: object) -> None:
        if sums is not None:
            sums.add(line_of(7))
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos_commands, "run_plan", interrupted)
    monkeypatch.setattr(chaos_commands, "run_campaign", interrupted)
    said = rackctl(*RUN)
    assert said.code == 130
    assert "interrupted; there is no verdict, and what there is lies in " in said.err
    tally = write_tally(tmp_path / "tally.jsonl")
    campaign = rackctl("chaos", "campaign", "--seeds", "0:9", "--tally", tally, "--", "train.py")
    assert campaign.code == 130
    assert "the same command goes on from there" in campaign.err.replace("\n", " ")
    assert "1 runs" in campaign.out


@pytest.mark.parametrize(("option", "value"), [("--seeds", "x"), ("--seeds", "5:5"), ("--flags", "nothing")])
def test_a_campaign_whose_options_are_no_good_is_refused_before_anything_is_printed(
    rackctl: Rackctl, tmp_path: Path, option: str, value: str
) -> None:
    options = {"--seeds": "0:9", "--tally": tmp_path / "tally.jsonl"} | {option: value}
    said = rackctl("chaos", "campaign", *(word for pair in options.items() for word in pair), "--", "train.py")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"rackctl: error: {option} ")
