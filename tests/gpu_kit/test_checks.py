"""The kit's own checks, in a dry run: what is whole is ok, and each planted defect is told as one."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import ranks
from benchmarks.gpu.jobs import compare
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.registry import Context, load, select
from benchmarks.gpu.run import Runner
from benchmarks.gpu.shared import compared

ROOT = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = {"gpus": [], "torch": "2.0+cpu", "no_gpu": "none"}
PLANTED = "tests.gpu_kit.defects"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("sys.path", [str(ROOT), *sys.path])


def played(out: Path, only: str, modules: list[str] | None = None) -> tuple[int, dict[str, Any]]:
    code = Runner(out, "dry", FACTS, modules or []).run(select(load(modules or []), "dry", only))
    lines = [json.loads(line) for line in (out / "checks.jsonl").read_text().splitlines()]
    return code, {one["id"]: one for one in lines}


def test_every_check_says_where_it_runs_and_what_is_expected() -> None:
    checks = load()
    assert len(checks) >= 60
    assert {one.section for one in checks} == set("ABCDEFGH")
    assert all(one.title and one.expected and one.limit_s >= 20 for one in checks)
    assert sum(one.limit_s for one in checks if not one.not_dry) / len(checks) < 120
    assert sum(not one.not_dry for one in checks) >= 30, "a dry run runs as much as it can"


@pytest.mark.slow
def test_registration_and_digest_pass_as_they_are(tmp_path: Path) -> None:
    code, found = played(tmp_path, "B4,B8")
    assert code == 0, found
    assert [found[one]["outcome"] for one in ("B4", "B8")] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "says"),
    [("B4", "is left"), ("B8", "flips unseen"), ("B9", "differ")],
)
def test_a_defect_of_a_primitive_is_told(tmp_path: Path, one: str, says: str) -> None:
    code, found = played(tmp_path, one, [PLANTED])
    assert code == 1
    assert found[one]["outcome"] == "fail"
    assert says in found[one]["note"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.stories
def test_a_defect_of_a_whole_job_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that keeps one of the tensors with which it began."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests/chaos/scripts")]))
    monkeypatch.setenv("PET_PRELOAD", "mutants")
    monkeypatch.setenv("RACKRUN_TEST_MUTANT", "a newcomer keeps what it began with")
    code, found = played(tmp_path, "D11")
    assert code == 1
    assert "differences" in found["D11"]["note"], found["D11"]["note"]


# -- what is compared of two runs
def a_run() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(3):
        for rank in range(2):
            ids = [10 * step + 2 * rank, 10 * step + 2 * rank + 1]
            lines.append({"what": "done", "rank": rank, "step": step, "loss": f"0x1.{step}p0", "ids": ids})
    lines.append({"what": "phase", "rank": 0, "value": "0x1.8p1"})
    return [*lines, *({"what": "end", "rank": rank, "weights": "w", "moments": "m"} for rank in range(2))]


def changed(place: int, **values: Any) -> list[dict[str, Any]]:
    lines = copy.deepcopy(a_run())
    lines[place].update(values)
    return lines


def test_equal_runs_are_equal_though_the_struck_process_left_a_line_out() -> None:
    assert compare(a_run(), a_run(), 2) == []
    assert compare(a_run(), a_run()[:3] + a_run()[4:], 2) == []


@pytest.mark.parametrize(
    ("struck", "says"),
    [
        (changed(2, loss="0x1.11p0"), "step 1 of rank 0: loss and samples"),
        (changed(3, ids=[10, 11]), "step 1 has a sample twice"),
        (changed(3, ids=[12]), "step 1 of rank 1: loss and samples"),
        (changed(6, value="nan"), "a phase was given nan"),
        (changed(7, weights="other"), "rank 0: weights differ"),
        (a_run()[:4] + a_run()[6:], "nobody has step 2"),
        (a_run()[:-1], "rank 1 has no end"),
    ],
)
def test_each_difference_is_told(struck: list[dict[str, Any]], says: str) -> None:
    assert any(says in one for one in compare(a_run(), struck, 2)), compare(a_run(), struck, 2)


def test_somebody_who_was_lost_though_nobody_struck_is_told(tmp_path: Path) -> None:
    """A rank that aborts in a recovery is replaced, and the bits are the same."""
    context = Context("dry", tmp_path, tmp_path, 60.0)
    strike = {"what": "strike", "number": 0, "rank": 1, "step": 0, "t": 0.5}
    ended = {"what": "end", "weights": "w", "moments": "m"}
    for generation, ok in ((2, True), (3, False)):
        lines = [dict(line, t=float(number)) for number, line in enumerate(a_run()[:-2])]
        lines += [strike, *(dict(ended, rank=rank, generation=generation) for rank in range(2))]
        found = compared(context, a_run(), lines, 2, strikes=1)
        assert found.ok == ok, found
    assert "3 generations after 1 strikes" in found.note


def test_a_rank_that_ends_without_an_answer_is_told_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_main", lambda _: os._exit(3))
    one = Ranks(Context("dry", tmp_path, tmp_path, 60.0, time.monotonic() + 60), "shared:ring", 1)
    one._processes.append(one._start(0))
    with pytest.raises(RuntimeError, match="rank 0 ended with 3"):
        one.answer(0)
