"""The runner of the GPU kit: whatever a check does, the others run, its line is on the disk, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import registry, report
from benchmarks.gpu.registry import load
from benchmarks.gpu.registry import select as chosen
from benchmarks.gpu.run import Runner, main

MODULE = "tests.gpu_kit.planted"
FACTS: dict[str, Any] = {"gpus": [], "torch": "2.0+cpu", "no_gpu": "none"}
ROOT = Path(__file__).resolve().parents[2]
OURS = "RACKRUN_KIT_TEST"
"""Inherited by all that a test starts: other runs of the kit beside it are not its."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(OURS, str(tmp_path))
    monkeypatch.setattr("sys.path", [str(ROOT), *sys.path])


def played(out: Path, only: str, *, mode: registry.Mode = "dry", xid: bool = False) -> tuple[int, dict[str, Any]]:
    """Exit code, and by id what was written."""
    code = Runner(out, mode, FACTS, [MODULE], xid=xid).run(chosen(load([MODULE]), mode, only))
    lines = [json.loads(line) for line in (out / "checks.jsonl").read_text().splitlines()]
    return code, {one["id"]: one for one in lines}


def left() -> list[int]:
    """Processes of this test's checks."""
    ours, found = f"{OURS}={os.environ[OURS]}".encode(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and ours in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def test_what_is_as_expected_is_ok_and_the_exit_code_is_0(tmp_path: Path) -> None:
    code, found = played(tmp_path, "A1,A4,A5")
    assert code == 0
    assert found["A1"] | {"seconds": 0} == {
        "id": "A1", "title": "all is well", "must": True, "expected": "7", "outcome": "ok", "value": 7.0,
        "unit": "things", "note": "mode dry", "seconds": 0,
    }  # fmt: skip
    assert (found["A4"]["outcome"], found["A4"]["note"]) == ("skip", "there is no moon")
    assert (found["A5"]["outcome"], found["A5"]["note"]) == ("skip", "the host has no such thing")


def test_a_defect_fails_and_the_exit_code_is_1(tmp_path: Path) -> None:
    code, found = played(tmp_path, "A1,A2")
    assert code == 1
    assert found["A2"]["outcome"] == "fail"
    assert (found["A2"]["value"], found["A2"]["note"]) == (6.0, "6 is not 7")


def test_a_figure_that_is_worse_is_told_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = played(tmp_path, "A3", mode="one")
    assert code == 0
    assert found["A3"]["outcome"] == "fail"
    assert played(tmp_path, "A3")[0] == 1, "a dry run judges no figure: there it is a defect"
    assert "worse  A3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "says"),
    [
        ("B1", "ZeroDivisionError: by nothing (planted.py:"),
        ("B2", "still running after its limit of 3 s; the end of its log: hanging"),
        ("B3", "ended by SIGSEGV"),
        ("B4", "ended with exit code 5 and no answer"),
    ],
)
def test_one_that_breaks_fails_with_a_reason_and_the_next_one_runs(tmp_path: Path, one: str, says: str) -> None:
    code, found = played(tmp_path, f"{one},G1", xid=True)
    assert code == 1
    assert found[one]["outcome"] == "fail"
    assert says in found[one]["note"]
    assert found["G1"]["value"] == "asked"
    assert not left()


def test_the_stacks_of_one_that_hangs_are_in_its_log(tmp_path: Path) -> None:
    _, found = played(tmp_path, "B2")
    log = (tmp_path / "logs.txt").read_text()
    assert log.startswith("==== B2\nhanging\n")
    assert "in hangs" in log
    assert "in hangs" in found["B2"]["note"]


def test_what_the_processes_of_a_failed_check_have_said_is_kept(tmp_path: Path) -> None:
    played(tmp_path, "B1")
    assert "==== B1.rank-0\nthe rank's last words\n" in (tmp_path / "logs.txt").read_text()


def test_processes_that_a_check_leaves_are_killed_and_counted(tmp_path: Path) -> None:
    code, found = played(tmp_path, "B5")
    assert code == 0
    assert found["B5"]["note"] == "1 processes were left, and killed"
    assert not left()


def test_an_xid_is_caused_only_if_asked_for(tmp_path: Path) -> None:
    _, found = played(tmp_path, "G", mode="one")
    assert found["G1"]["outcome"] == "skip"
    assert "--xid" in found["G1"]["note"]


def test_what_the_budget_does_not_reach_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = Runner(tmp_path, "one", FACTS, [MODULE], seconds=-1).run(chosen(load([MODULE]), "one", "A1,A3"))
    assert code == 3, "a check that must be was not reached"
    lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert [(one["id"], one["outcome"]) for one in lines] == [("A1", "not reached"), ("A3", "not reached")]
    assert "--budget-s" in lines[0]["note"]
    assert "; not reached: A1, A3" in capsys.readouterr().out


def test_a_figure_that_is_not_reached_does_not_change_the_exit_code(tmp_path: Path) -> None:
    assert Runner(tmp_path, "one", FACTS, [MODULE], seconds=-1).run(chosen(load([MODULE]), "one", "A3")) == 0


def test_one_whose_limit_was_cut_has_not_failed(tmp_path: Path) -> None:
    code = Runner(tmp_path, "one", FACTS, [MODULE], seconds=6.0).run(chosen(load([MODULE]), "one", "D1"))
    assert code == 3
    line = json.loads((tmp_path / "checks.jsonl").read_text())
    assert line["outcome"] == "not reached"
    assert "instead of 60" in line["note"]


def test_those_that_judge_no_time_run_at_the_same_time_and_no_other_beside_them(tmp_path: Path) -> None:
    """B12 and B13 wait for each other; B14 looks whether both are over."""
    runner = Runner(tmp_path, "one", FACTS, [MODULE], beside=2)
    assert runner.run(chosen(load([MODULE]), "one", "B12,B13,B14")) == 0
    lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert {one["id"]: one["outcome"] for one in lines} == {"B12": "ok", "B13": "ok", "B14": "ok"}, lines
    assert not left()


@pytest.mark.stories
def test_the_next_one_is_started_ahead_and_begins_in_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.run._CORES_FOR_MORE", 1)
    code, found = played(tmp_path, "A1,B1,B5,G1", xid=True)
    assert code == 1
    assert [found[one]["outcome"] for one in ("A1", "B1", "B5", "G1")] == ["ok", "fail", "ok", "ok"]
    assert not left()


def test_the_most_important_come_first_and_an_xid_last() -> None:
    checks = load()
    known = {one.id for one in checks}
    assert set(registry.FIRST) <= known
    assert len(set(registry.FIRST)) == len(registry.FIRST)
    order = [one.id for one in chosen(checks, "one", "")]
    assert order[:4] == ["A1", "A2", "D0", "D7"]
    assert order[-1] == "G1"
    assert sorted(order) == sorted(one.id for one in checks if one.section != "H")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_the_lines_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "import sys; from benchmarks.gpu.run import Runner; from benchmarks.gpu.registry import load, select;"
        f"sys.exit(Runner(__import__('pathlib').Path({str(tmp_path)!r}), 'dry', {FACTS!r}, [{MODULE!r}])"
        f".run(select(load([{MODULE!r}]), 'dry', 'A1,D1')))"
    )
    kit = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert kit.stdout is not None
    assert "A1" in kit.stdout.readline()
    line = json.loads((tmp_path / "checks.jsonl").read_text())
    assert line["id"] == "A1", "a line is there before the next check begins"
    _until_it_says(tmp_path / "logs" / "D1.txt", "waiting")
    kit.send_signal(number)
    said, _ = kit.communicate(timeout=30)
    assert kit.returncode == 128 + number, said
    lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert [(one["id"], one["outcome"]) for one in lines] == [("A1", "ok"), ("D1", "skip")]
    assert "interrupted by" in lines[1]["note"]
    assert not left()


def _until_it_says(path: Path, text: str) -> None:
    """The file of a process that was just started."""
    for _ in range(3000):
        if path.exists() and text in path.read_text():
            return
        select.select([], [], [], 0.01)
    raise AssertionError(f"{path} does not say {text}")


def test_checks_that_there_are_not_are_refused() -> None:
    checks = load([MODULE])
    assert [one.id for one in chosen(checks, "one", "b1, A")] == ["A1", "A2", "B1", "A3", "A4", "A5"]
    with pytest.raises(ValueError, match="no check D7"):
        chosen(checks, "one", "D7")


def test_the_document_has_the_machine_and_every_line(tmp_path: Path) -> None:
    code, found = played(tmp_path, "A1,A2")
    document = json.loads((tmp_path / "dry-cpu-torch2-0.json").read_text())
    assert document["facts"] == FACTS
    assert document["exit_code"] == code == 1
    assert document["checks"] == list(found.values())


def test_a_whole_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mode", "dry", "--from", MODULE, "--only", "A1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "1 ok, 0 failed, 0 left out" in capsys.readouterr().out
    facts = json.loads(next(tmp_path.glob("dry-*.json")).read_text())["facts"]
    assert {"torch", "nccl", "driver", "cuda", "python", "triton", "gpus"} <= facts.keys()


def test_a_gpu_mode_without_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "facts", lambda: FACTS)
    with pytest.raises(SystemExit) as refused:
        main(["--mode", "one", "--from", MODULE, "--out", str(tmp_path)])
    assert refused.value.code == 2
    assert "needs a GPU" in capsys.readouterr().err
