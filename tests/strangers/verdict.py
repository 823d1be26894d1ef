"""What came of a run, by what the script itself has written: compared with what it writes without faults."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.strangers.job import Outcome

Key = tuple[Any, ...]
Said = dict[Key, set[tuple[str, float]]]
NEAR = 2e-3


class Verdict(StrEnum):
    EQUAL = "equal"
    NEAR = "near"  # of a world that has shrunk with reduction="fast": other roundings
    REFUSED = "refused"  # without a fault, in the first steps, with line and remedy
    NAMED = "named"  # a mistake that a run without faults says
    BEYOND = "beyond"  # more was lost than there was in reserve, and it stopped with a reason
    MISSED = "missed"  # a fault did not strike: proves nothing
    WRONG = "WRONG"
    NEEDLESS_END = "NEEDLESS END"
    HUNG = "HUNG"
    UNPROVOKED = "UNPROVOKED"  # a healthy rank was given up in a run without faults
    LEFT = "LEFT BEHIND"
    BARE_REFUSAL = "BARE REFUSAL"  # without a fault, and without line or remedy, or late
    UNNOTICED = "UNNOTICED"  # a mistake that trains something else, and nobody says so
    UNSTEADY = "UNSTEADY"  # two runs without faults differ: the script's fault, or the campaign's

    @property
    def good(self) -> bool:
        return self in {Verdict.EQUAL, Verdict.NEAR, Verdict.REFUSED, Verdict.NAMED, Verdict.BEYOND, Verdict.MISSED}


def table(lines: list[dict[str, Any]]) -> Said:
    said: Said = defaultdict(set)
    for line in lines:
        for name, (digest, size) in line["own"].items():
            said[line["kind"], line["step"], name, line["rank"]].add((digest, size))
        for name, (digest, size) in line["shared"].items():
            said[line["kind"], line["step"], name, line["rank"]].add((digest, size))
    return said


def shared(lines: list[dict[str, Any]]) -> Said:
    """What is the same on every rank, whoever said it."""
    return {key[:3]: values for key, values in table([line | {"own": {}, "rank": 0} for line in lines]).items()}


def inconsistency(lines: list[dict[str, Any]]) -> str:
    """Of one run: the same rank, or two ranks, said two things about the same."""
    for said in (table(lines), shared(lines)):
        for key, values in sorted(said.items(), key=str):
            if len(values) > 1:
                return f"{describe(key)}: {len(values)} different values in one run"
    return ""


def difference(reference: list[dict[str, Any]], lines: list[dict[str, Any]], *, exact: bool, same_world: bool) -> str:
    """The first thing that is not as in the reference; empty where there is none."""
    want, have = (table(reference), table(lines)) if same_world else (shared(reference), shared(lines))
    for key, values in sorted(
        have.items(), key=lambda item: (item[0][1] if item[0][1] >= 0 else 1 << 30, str(item[0]))
    ):
        if key not in want:
            return f"{describe(key)}: nobody says that without faults"
        expected = next(iter(want[key]))
        for value in values:
            near = math.isclose(value[1], expected[1], rel_tol=NEAR, abs_tol=NEAR * 1e-6)  # also of two infinities
            if value[0] != expected[0] and (exact or not near):
                return f"{describe(key)}: {value[1]:.9g} instead of {expected[1]:.9g}"
    anybody = {key[:3] for key in have}
    for key in want:
        if key not in have and (key[0] == "end" or key[:3] not in anybody) and (same_world or key[:3] not in anybody):
            return f"{describe(key)}: never said"
    return ""


def describe(key: Key) -> str:
    where = f"step {key[1]}" if key[0] == "step" else "at the end"
    return f"{key[2]} {where}" + (f" on rank {key[3]}" if len(key) > 3 else "")


REMEDY = re.compile(r"remedy|instead|run\.\w+\(|step\.\w+\(|use |track|call |move |put ", re.IGNORECASE)


GIVEN_UP = re.compile(r"^rackrun: (?:generation \d+: )?ranks? .*(?:lost|stalled|absorbed).*$", re.MULTILINE)


def names_line(output: str, script: Path) -> bool:
    said = "\n".join(line for line in output.splitlines() if not line.lstrip().startswith("warnings.warn"))
    line = re.search(rf'{re.escape(script.name)}("?,? ?line |:)\d+', said)
    return bool(line) and bool(REMEDY.search(said))


def steps_said(lines: list[dict[str, Any]]) -> int:
    return len({line["step"] for line in lines if line["kind"] == "step"})


def without_faults(outcome: Outcome, script: Path, expect: str) -> tuple[Verdict, str]:
    """Of a run in which nothing was struck."""
    tail = last_words(outcome.output)
    steps = steps_said(outcome.lines)
    named = names_line(outcome.output, script)
    foreseen = bool(re.search(r"Remedy: (?!see the traceback)", outcome.output))
    given_up = GIVEN_UP.findall(outcome.output)
    rows = [
        (outcome.code is None, Verdict.HUNG, f"without a fault: {tail}"),
        (bool(outcome.code) and named and foreseen and steps <= 3, Verdict.REFUSED, tail),
        (bool(outcome.code), Verdict.BARE_REFUSAL, f"exit code {outcome.code} after {steps} steps, no fault: {tail}"),
        (bool(given_up), Verdict.UNPROVOKED, " / ".join(given_up[:4])),
        (expect == "said" and named, Verdict.NAMED, tail),
        (expect == "said", Verdict.UNNOTICED, "exit code 0, and not a word of it"),
        (bool(outcome.left), Verdict.LEFT, "; ".join(outcome.left)),
        (bool(inconsistency(outcome.lines)), Verdict.UNSTEADY, inconsistency(outcome.lines)),
    ]
    return next(((verdict, words) for holds, verdict, words in rows if holds), (Verdict.EQUAL, ""))


def last_words(output: str) -> str:
    """The lines of an error that matter."""
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not line.lstrip().startswith(("step ", "^", "~"))
    ]
    telling = [line for line in lines if re.search(r"Error|rackrun:|Remedy|remedy|stopped|line \d+", line)]
    return " / ".join((telling or lines)[-4:])[-900:]
