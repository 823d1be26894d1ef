"""The strangers' campaign says what is wrong when something is: its verdicts, its places, its draws. No job is started here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.strangers.__main__ import draw, judge, scripts
from tests.strangers.hard import HARD
from tests.strangers.inside import AFTER
from tests.strangers.job import SCRIPTS, Outcome, Setting, setting_of
from tests.strangers.places import find_places
from tests.strangers.verdict import Verdict, difference, without_faults

MOCO = SCRIPTS / "moco.py"
CRASH = (
    'Traceback (most recent call last):\n  File "moco.py", line 12, in <module>\nAttributeError: no attribute\n'
    "rackrun: stopped (exit code 1): builtins.AttributeError at moco.py:12 on rank 1. Remedy: see the traceback of that rank."
)
"""An error that nobody has foreseen, of rackrun's own perhaps."""


def said(ranks: int = 2, steps: int = 4, **changed: str) -> list[dict[str, Any]]:
    """What a script of so many ranks writes; ``changed`` maps "step.rank" to another digest."""
    rows = [(rank, step) for step in range(steps) for rank in range(ranks)]
    lines = [
        {"kind": "step", "rank": rank, "step": step, "own": {"seen": [f"{rank}", 1.0]},
         "shared": {"loss": [changed.get(f"s{step}r{rank}", f"loss{step}"), 2.0]}}
        for rank, step in rows
    ]  # fmt: skip
    end = {"kind": "end", "step": -1, "own": {}, "shared": {"model": ["m", 9.0]}}
    return lines + [end | {"rank": rank} for rank in range(ranks)]


def outcome(lines: list[dict[str, Any]], code: int | None = 0, output: str = "", struck: int = 1) -> Outcome:
    return Outcome(code, 1.0, output, lines, list(range(struck)))


def verdict_of(run: Outcome, *, spares: int = 1, script: Path = MOCO, setting: Setting | None = None) -> Verdict:
    return judge(script, setting or Setting(), spares, outcome(said(), struck=0), run)[0]


def test_the_same_said_again_is_equal() -> None:
    assert verdict_of(outcome(said() + said())) is Verdict.EQUAL


@pytest.mark.parametrize("key", ["s0r0", "s3r1"])
def test_one_other_digest_of_one_rank_in_one_step_is_wrong(key: str) -> None:
    assert verdict_of(outcome(said(2, 4, **{key: "other"}))) is Verdict.WRONG
    assert verdict_of(outcome(said() + said(2, 4, **{key: "other"}))) is Verdict.WRONG  # said once more, and otherwise


def test_a_rank_that_never_writes_its_end_is_wrong_if_the_job_says_it_is_done() -> None:
    assert verdict_of(outcome(said()[:-1])) is Verdict.WRONG
    assert verdict_of(outcome(said()[:-1], code=3)) is Verdict.NEEDLESS_END


def test_a_step_may_be_missing_on_one_rank_but_not_on_all() -> None:
    one = [line for line in said() if (line["rank"], line["step"]) != (1, 2)]
    assert verdict_of(outcome(one)) is Verdict.EQUAL
    assert verdict_of(outcome([line for line in said() if line["step"] != 2])) is Verdict.WRONG


def test_a_wrong_value_before_an_end_is_wrong_not_an_end() -> None:
    assert verdict_of(outcome(said(s1r0="other")[:-1], code=3)) is Verdict.WRONG


def test_more_lost_than_there_was_is_beyond_and_must_end_with_code_3() -> None:
    assert verdict_of(outcome(said()[:-1], code=3), spares=0) is Verdict.BEYOND
    assert verdict_of(outcome(said()[:-1], code=1), spares=0) is Verdict.NEEDLESS_END
    shrinks = Setting(shrinks=True)
    assert verdict_of(outcome(said()[:-1], code=3), spares=0, setting=shrinks) is Verdict.NEEDLESS_END


def test_who_does_not_end_is_hung_and_what_did_not_strike_proves_nothing() -> None:
    assert verdict_of(outcome(said(), code=None)) is Verdict.HUNG
    assert verdict_of(outcome(said(), struck=0)) is Verdict.MISSED


def test_a_shrunk_world_is_compared_by_what_ranks_share() -> None:
    smaller = [line | {"own": {"seen": ["other", 5.0]}} for line in said(ranks=1)]
    assert not difference(said(), smaller, exact=True, same_world=False)

    def scaled(factor: float) -> list[dict[str, Any]]:
        return [
            line | {"shared": {name: ["other bits", size * factor] for name, (_, size) in line["shared"].items()}}
            for line in smaller
        ]

    assert not difference(said(), scaled(1.0001), exact=False, same_world=False)
    assert difference(said(), scaled(1.0001), exact=True, same_world=False)
    assert difference(said(), scaled(2.0), exact=False, same_world=False)


@pytest.mark.parametrize(
    ("code", "output", "steps", "expect", "verdict"),
    [
        (0, "", 4, "equal", Verdict.EQUAL),
        (1, "at moco.py:12: no. Remedy: another.", 2, "equal", Verdict.REFUSED),
        (1, "at moco.py:12: no. Remedy: another.", 4, "equal", Verdict.BARE_REFUSAL),  # late
        (1, "it does not work", 1, "equal", Verdict.BARE_REFUSAL),
        (1, CRASH, 1, "equal", Verdict.BARE_REFUSAL),
        (0, "", 4, "said", Verdict.UNNOTICED),
        (0, "moco.py:12: not tracked. Remedy: run.track(it)", 4, "said", Verdict.NAMED),
        (0, "not tracked. Remedy: run.track(it)", 4, "said", Verdict.UNNOTICED),  # without the line
        (1, "moco.py:12: no. Remedy: another.", 1, "said", Verdict.REFUSED),
        (0, "rackrun: rank 0 lost on tray-00/0 (stalled for 1 ms)", 4, "equal", Verdict.UNPROVOKED),
        (None, "", 4, "equal", Verdict.HUNG),
    ],
)
def test_without_a_fault(code: int | None, output: str, steps: int, expect: str, verdict: Verdict) -> None:
    assert without_faults(outcome(said(steps=steps), code, output), MOCO, expect)[0] is verdict


def test_two_ranks_that_say_different_things_of_the_same_are_seen_without_a_fault() -> None:
    assert without_faults(outcome(said(s2r1="other")), MOCO, "equal")[0] is Verdict.UNSTEADY


def test_every_script_has_its_places_and_a_setting() -> None:
    names = [path.stem for path in scripts()]
    assert len(names) >= 30
    for path in scripts():
        places, setting = find_places(path), setting_of(path)
        assert setting.expect in {"equal", "said"}, path
        if not setting.plain:
            assert places.step_functions, path
            assert {"between", "before"} <= set(places.of.values()), path
            assert "update" in places.of.values(), path


def test_every_hard_case_has_its_line() -> None:
    assert len({hard.why for hard in HARD}) == len(HARD)
    for hard in HARD:
        fault = hard.fault()
        assert fault.place != "before", hard
        assert hard.rank < setting_of(SCRIPTS / f"{hard.script}.py").ranks


def test_draws_are_the_seeds_own_and_reach_every_rank_and_place() -> None:
    a_line_of = {place: line for line, place in find_places(MOCO).of.items()}
    visits = {str(line): 2 for line in a_line_of.values()}
    rows = [{"rank": rank, "unit": unit, "visits": visits} for rank in range(3) for unit in [0, 5, AFTER]]
    drawn = [draw(seed, MOCO, Setting(), rows) for seed in range(200)]
    assert drawn == [draw(seed, MOCO, Setting(), rows) for seed in range(200)]
    faults = [fault for _, row in drawn for fault in row]
    assert {fault.rank for fault in faults} == {0, 1, 2}
    assert {fault.what for fault in faults} == {"kill", "stop", "spin", "sleep", "gil"}
    assert {fault.place for fault in faults} == set(a_line_of) >= {"loader", "forward", "update", "between", "after"}
    assert all(spares >= len(row) or Setting().shrinks for spares, row in drawn)


def test_a_process_strikes_itself_at_its_line_and_once(tmp_path: Path) -> None:
    """The tracer, on a script of its own: the third visit of a line in step 2 kills; the second start does not."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "class run:\n    steps = range\n    step = staticmethod(lambda f: f)\n    elastic = staticmethod(lambda f: f)\n"
        "@run.elastic\ndef main():\n"
        "    @run.step\n    def train(step):\n        for _ in range(4):\n            x = 1\n        return x\n"
        "    for step in run.steps(4):\n        train(step)\n"
        "        with open('done', 'a') as file:\n            file.write(str(step))\n"
        "main()\n"
    )
    places = find_places(script)
    fault = {"id": 0, "what": "kill", "rank": 0, "unit": 2, "line": 11, "visit": 3, "delay_s": 0.0}
    orders = {
        "main": places.main,
        "loop_variable": places.loop_variable,
        "loop_ends": places.loop_ends,
        "profile": True,
    }
    orders |= {"step_functions": places.step_functions, "script": str(script), "out": str(tmp_path), "faults": [fault]}
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    command = [
        sys.executable,
        "-c",
        f"import tests.strangers.inside, runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
    ]
    environ = {"STRANGERS_ORDERS": str(tmp_path / "orders.json"), "RANK": "0", "PYTHONPATH": str(SCRIPTS.parents[2])}
    codes = [subprocess.run(command, env=environ, cwd=tmp_path).returncode for _ in range(2)]
    assert codes == [-9, 0]
    assert (tmp_path / "done").read_text() == "010123"
    visits = [
        row["visits"]
        for row in map(json.loads, (tmp_path / "profile.jsonl").read_text().splitlines())
        if row["unit"] == 3
    ]
    assert visits[-1]["11"] == 4
