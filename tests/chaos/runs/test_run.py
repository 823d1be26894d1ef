"""Whole jobs with faults, and what is said of them. A job stands where it is to be struck, so that no fault comes too late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.delay_collective import DelayCollective
from rackrun.chaos.faults.hangs.freeze_tray import FreezeTray
from rackrun.chaos.faults.hangs.hold_gil import HoldGil
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.hangs.slow_down import Slow
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.preempt_tray import Preempt
from rackrun.chaos.faults.processes.raise_exception import Raise
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import Exactly, Last, NeighbourOf, One, Several, Target
from rackrun.chaos.plan.definition import AtStep, Inject, Par, Part, Plan, Seq, parts_of, read_plan
from rackrun.chaos.runs.reference_run import ReferenceRun, run_reference
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.chaos.testbed.host_placement import hosts_needed
from rackrun.chaos.testbed.machine.processes import marked
from rackrun.chaos.testbed.network.hosts import hosts_here
from rackrun.errors import UsageError
from tests.chaos.report.test_report_trace import check_trace

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "tiny.py"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "chaos"
STEPS, HOLD = 12, 6
WAIT_S = 100.0
RANK = One(Subjects.RANK)
OPTIONS = ("--nproc-per-node", "3", "--spares", "1")
CHECKPOINTS = ("--checkpoint-dir", "{out}/checkpoints", "--checkpoint-every", "2")


def tiny(*options: str, hold: int | str = HOLD, strikes: int | str = 1) -> list[str]:
    return [*(options or OPTIONS), str(SCRIPT), str(STEPS), str(hold), "{out}", str(strikes)]


def at_hold(fault: Fault, target: Target = RANK) -> Inject:
    return Inject(fault=fault, target=target, when=AtStep(step=HOLD - 1))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `tiny`."""
    folder = tmp_path_factory.mktemp("without") / "reference"
    run_reference(tiny(), folder)
    return folder


@pytest.fixture
def strike(tmp_path: Path, reference: Path) -> Callable[..., Summary]:
    """``strike(part, expect="survives") -> Summary``, of `tiny`."""

    def run(part: Part, expect: str = "survives") -> Summary:
        plan = msgspec.convert({"plan": msgspec.to_builtins(part), "expect": expect, "seed": 3}, Plan)
        summary = run_plan(plan, tiny(), out=tmp_path / "out", reference=reference)
        print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), file=sys.stderr)
        print((tmp_path / "out" / "faulted" / "stderr.txt").read_text(), file=sys.stderr)
        return summary

    return run


def verdicts(summary: Summary) -> dict[str, bool | None]:
    return {verdict.oracle: verdict.holds for verdict in summary.verdicts if verdict.holds is not True}


def test_a_job_that_loses_a_rank_is_the_job_without_faults(strike: Callable[..., Summary], tmp_path: Path) -> None:
    summary = strike(at_hold(Kill()))
    assert summary.holds is True
    assert [(one.fault, one.step, one.took) for one in summary.strikes] == [("kill", HOLD - 1, True)]
    assert len(summary.recoveries) == 1
    assert summary.steps == STEPS
    history = [json.loads(line) for line in (tmp_path / "out" / "history.jsonl").read_text().splitlines()]
    harness = [one["what"] for one in history if one["by"] == "harness" and one["what"] not in ("committed", "placed")]
    assert harness == ["started", "strike", "begun", "confirmed", "ended"]
    job = [one["what"] for one in history if one["by"] == "job"]
    assert [job[0], *job[-3:]] == ["noticed", "planned", "resumed", "recovered"]
    assert summary.strikes[0].first_step == HOLD
    assert summary.strikes[0].recover_s is not None
    check_trace(tmp_path / "out" / "trace.json")
    assert (tmp_path / "out" / "report.html").exists()
    resolved = read_plan(tmp_path / "out" / "resolved.json").plan
    assert isinstance(resolved, Par)
    assert [part.target for part in resolved.parts if isinstance(part, Inject)] == [
        Exactly(Subjects.RANK, (summary.strikes[0].whom[0].removeprefix("rank "),))
    ]
    assert "resolved.json" in (tmp_path / "out" / "repro.sh").read_text()


@pytest.mark.stories
def test_the_canary_must_fail_and_does(reference: Path, tmp_path: Path) -> None:
    plan = read_plan(EXAMPLES / "canary.yaml")
    summary = run_plan(plan, tiny(hold=7), out=tmp_path / "out", reference=ReferenceRun(reference, tiny()))
    assert summary.holds is False
    assert verdicts(summary)["weights"] is False
    assert {verdict.oracle: verdict.holds for verdict in summary.verdicts}["strikes"] is True


@pytest.mark.stories
def test_a_strike_without_a_target_makes_the_run_unknown(strike: Callable[..., Summary]) -> None:
    nobody, somebody = at_hold(Kill(), Last(Subjects.SPARE)), at_hold(Raise())
    summary = strike(Seq(parts=(nobody, somebody)))
    assert summary.holds is None
    assert verdicts(summary) == {"strikes": None}


EACH: dict[str, tuple[Fault, Subjects]] = {
    "a rank has a segmentation fault": (Kill(signal="SEGV"), Subjects.RANK),
    "a rank raises": (Raise(), Subjects.RANK),
    "a rank crashes in a gate": (CrashAt(point="gate.before"), Subjects.RANK),
    "a rank stands still": (Pause(for_s=2.0), Subjects.RANK),
    "a rank holds the GIL": (HoldGil(for_s=0.5), Subjects.RANK),
    "a rank is late": (DelayCollective(for_s=0.5), Subjects.RANK),
    "a rank is slow": (Slow(for_s=1.0), Subjects.RANK),
    "an agent is killed": (Kill(), Subjects.AGENT),
    "a tray stands still": (Pause(for_s=2.0), Subjects.TRAY),
    "a tray is frozen": (FreezeTray(for_s=4.0), Subjects.TRAY),
    "a tray is preempted": (Preempt(notice_s=0.0), Subjects.TRAY),
    "the coordinator stands still": (Pause(for_s=2.0), Subjects.COORDINATOR),
}


@pytest.mark.stories
@pytest.mark.parametrize("name", EACH)
def test_each_fault_is_survived(name: str, tmp_path: Path) -> None:
    fault, kind = EACH[name]
    trays = (
        ("--trays", "3", "--nproc-per-node", "1", "--spares", "1") if kind in (Subjects.AGENT, Subjects.TRAY) else ()
    )
    summary = run_plan(Plan(plan=at_hold(fault, One(kind))), tiny(*trays), out=tmp_path / "out")
    print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), file=sys.stderr)
    print((tmp_path / "out" / "faulted" / "stderr.txt").read_text(), file=sys.stderr)
    assert summary.holds is True


@pytest.mark.stories
def test_the_record_of_a_run_strikes_the_same_again(strike: Callable[..., Summary], tmp_path: Path) -> None:
    first = strike(at_hold(Kill()))
    record = read_plan(tmp_path / "out" / "resolved.json")
    again = run_plan(record, tiny(), out=tmp_path / "again")
    assert again.holds is True
    assert [one.whom for one in again.strikes] == [one.whom for one in first.strikes]


@pytest.mark.stories
def test_a_survivor_that_crashes_in_the_recovery_is_survived(tmp_path: Path) -> None:
    armed = Inject(fault=CrashAt(point="plan.after"), target=RANK, when=AtStep(step=2))
    killed = at_hold(Kill(), NeighbourOf(Last(Subjects.RANK)))
    options = ("--nproc-per-node", "4", "--spares", "2")
    summary = run_plan(Plan(plan=Par(parts=(armed, killed))), tiny(*options, strikes=2), out=tmp_path / "out")
    assert summary.holds is True
    assert [one.took for one in summary.strikes] == [True, True]


@pytest.mark.stories
def test_a_flipped_bit_of_a_gradient_is_not_called_the_same_training(strike: Callable[..., Summary]) -> None:
    """Whether rackrun finds it or not: the oracles do."""
    armed = Inject(fault=FlipBit(of="gradients"), target=RANK, when=AtStep(step=HOLD - 1))
    assert strike(armed).holds is False


@pytest.mark.stories
def test_a_job_whose_launcher_is_killed_ends_and_leaves_nothing(tmp_path: Path) -> None:
    kill = Inject(fault=Kill(), target=One(Subjects.COORDINATOR), when=AtStep(step=HOLD - 1))
    summary = run_plan(Plan(plan=kill, expect="stops"), tiny(), out=tmp_path / "out")
    assert summary.holds is True


@pytest.mark.stories
def test_a_job_that_ends_before_its_plan_makes_the_run_unknown(strike: Callable[..., Summary]) -> None:
    late = Inject(fault=Kill(), target=RANK, when=AtStep(step=STEPS + 50))
    summary = strike(Seq(parts=(at_hold(Kill()), late)))
    assert summary.holds is None
    assert verdicts(summary) == {"strikes": None}


@pytest.mark.stories
@pytest.mark.parametrize(("text", "said"), [("", "committed no step"), ("raise SystemExit(5)", "exit code")])
def test_a_script_that_ends_without_a_step_is_refused(text: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(text)
    with pytest.raises(UsageError, match=said):
        run_plan(Plan(plan=at_hold(Kill())), ["--nproc-per-node", "2", str(script)], out=tmp_path / "out")


@pytest.mark.stories
def test_a_harness_that_is_killed_leaves_nothing_of_its_job(tmp_path: Path, reference: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(
        "plan: {do: inject, when: {at: step, step: 2}, fault: {fault: pause}, target: {who: one, of: coordinator}}"
    )
    command = [sys.executable, "-m", "rackrun.ctl", "chaos", "run", str(plan), "--out", str(out)]
    harness = subprocess.Popen(
        [*command, "--reference", str(reference), "--", *tiny()], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    history = out / "history.jsonl"
    deadline = time.monotonic() + WAIT_S
    while not (history.exists() and '"confirmed"' in history.read_text()):
        assert harness.poll() is None, harness.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    undo = out / "faulted" / "undo"
    records = [json.loads(path.read_text()) for path in undo.glob("*.json")]
    mark = next(record["mark"] for record in records if "mark" in record)
    assert marked(mark)
    os.kill(harness.pid, signal.SIGKILL)
    harness.communicate()  # the watcher holds its stderr until it has ended
    assert not marked(mark)
    assert not list(undo.iterdir())


# -- before anything is started
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "no script"),
        (["--nproc-per-node", "3"], "no script"),
        (["--nproc-per-node", "3", "--spares", "1", "nowhere.py"], "there is no script nowhere.py"),
        (["--out-dir", "x", "train.py"], "--out-dir"),
        (["--checkpoint-dir", "x", "train.py"], "{out}/checkpoints"),
        (["--checkpoint-dir=x", "train.py"], "{out}/checkpoints"),
    ],
)
def test_commands_that_cannot_be_compared_are_refused(command: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        run_plan(Plan(plan=at_hold(Kill())), command, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_reference_of_another_command_is_refused(tmp_path: Path, reference: Path) -> None:
    with pytest.raises(UsageError, match="another command"):
        run_plan(Plan(plan=at_hold(Kill())), tiny("--spares", "2"), out=tmp_path / "out", reference=reference)


def test_a_plan_whose_end_is_certain_and_another_is_refused(tmp_path: Path) -> None:
    """Nothing is started: `rackrun.chaos.plan.survivability` says what is certain."""
    with pytest.raises(UsageError, match="expects that the job stops"):
        run_plan(Plan(plan=at_hold(Kill()), expect="stops"), tiny(), out=tmp_path / "out")
    with pytest.raises(UsageError, match="expects that the job survives"):
        run_plan(Plan(plan=at_hold(Kill(), One(Subjects.COORDINATOR))), tiny(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plan_that_means_nothing_is_refused_however_it_was_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot strike a tray"):
        run_plan(Plan(plan=at_hold(CrashAt(point="gate.before"), One(Subjects.TRAY))), tiny(), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Exactly(Subjects.RANK, ("7",)), "never has a rank 7: its ranks are 0, 1"),
        (Exactly(Subjects.TRAY, ("tray-03",)), "never has a tray tray-03"),
        (Several(Subjects.RANK, 3), "never has 3 ranks"),
    ],
)
def test_a_target_that_the_job_never_has_is_refused(target: Target, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        run_plan(Plan(plan=at_hold(Kill(), target)), tiny(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_folder_of_an_earlier_run_is_not_used_again(reference: Path) -> None:
    with pytest.raises(UsageError, match="earlier run"):
        run_plan(Plan(plan=at_hold(Kill())), tiny(), out=reference)


def test_a_folder_or_a_command_that_the_reports_could_not_name_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    strange = os.fsdecode(b"caf\xe9")
    with pytest.raises(UsageError, match=r"caf\\udce9 is no UTF-8"):
        run_plan(Plan(plan=at_hold(Kill())), tiny(), out=tmp_path / strange)
    with pytest.raises(UsageError, match=r"caf\\udce9 is no UTF-8"):
        run_plan(Plan(plan=at_hold(Kill())), [*tiny(), strange], out=tmp_path / "out")
    assert not [*tmp_path.iterdir()]


# -- the plans that are shipped
SHIPPED = {
    "rank_killed": ("--nproc-per-node", "3", "--spares", "1"),
    "spare_killed": ("--nproc-per-node", "4", "--spares", "2"),
    "tray_lost": ("--trays", "3", "--nproc-per-node", "2", "--spares", "2"),
    "hang": ("--nproc-per-node", "3", "--spares", "1"),
    "kill_in_recovery": ("--nproc-per-node", "4", "--spares", "2"),
    "gpu_fails": ("--rack", str(EXAMPLES.parent / "racks" / "five-trays.yaml"), "--spares", "1"),
    "tray_returns": ("--trays", "4", "--spares", "1", "--max-restarts", "0"),
    "tray_preempted": ("--trays", "5", "--spares", "2"),
    "two_of_each": ("--trays", "4", "--spares", "1"),
    "disk_full": (*OPTIONS, *CHECKPOINTS),
    "disk_stands_still": (*OPTIONS, *CHECKPOINTS),
    "tray_frozen": ("--trays", "3", "--nproc-per-node", "2", "--spares", "2"),
    "no_descriptors": ("--trays", "3", "--nproc-per-node", "1", "--spares", "1"),
    "clocks_jump": OPTIONS,
    "tray_cut_off": ("--trays", "3", "--nproc-per-node", "1", "--spares", "1", "--lease", "5"),
    "cut_from_peers": ("--trays", "3", "--nproc-per-node", "1", "--spares", "1"),
    "half_open": ("--trays", "3", "--nproc-per-node", "2", "--spares", "3", "--lease", "5"),
}
WAITS = {
    "gpu_fails": {"TINY_STRIKES": "2!", "TINY_UNTIL": "FenceWorker"},
    "tray_preempted": {"TINY_UNTIL": "PauseWorkers"},
}
"""A driver is asked now and then, and who gets notice leaves at the end of a step."""


def test_every_shipped_plan_is_known_here_and_names_itself() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == SHIPPED.keys() | {"canary"}
    assert all(read_plan(EXAMPLES / f"{name}.yaml").name for name in SHIPPED)


@pytest.mark.stories
@pytest.mark.timeout(400)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_is_survived(name: str, tmp_path: Path) -> None:
    plan = read_plan(EXAMPLES / f"{name}.yaml")
    if hosts_needed(plan) and (why := hosts_here()):
        pytest.skip(", ".join(why))
    strikes = sum(isinstance(part, Inject) for part in parts_of(plan.plan))
    holds, counts = ("5,7", f"1,{strikes}") if name == "tray_preempted" else ("7", str(strikes))
    command = tiny(*SHIPPED[name], hold=holds, strikes=counts)
    summary = run_plan(plan, command, out=tmp_path / "out", env=WAITS.get(name))
    print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), file=sys.stderr)
    print((tmp_path / "out" / "faulted" / "stderr.txt").read_text(), file=sys.stderr)
    assert summary.holds is True
    assert len(summary.strikes) == strikes
