"""Each fault is one module with a complete row of `FAULTS`, and hardly anybody else knows which faults there are."""

from __future__ import annotations

import ast
import functools
import importlib
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import rackrun.chaos
from rackrun.chaos.faults.fault_row import HookPlace, HookVisit, Need, StrikeCost
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Subjects, name_of
from rackrun.chaos.faults.table.fault_table import FAULTS
from rackrun.chaos.faults.table.validate import nonsense_of
from rackrun.chaos.plan.definition import kind_of
from rackrun.chaos.simulator.fuzzing.draw_job import DISK, FAMILIES, FEW

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_A_MODEL = {"duplicate", "exhaust_descriptors", "gpu_fails"}
SCENARIOS = {
    "chaos/plan/shrink_plan.py",
    "chaos/runs/draw_run.py",
    "chaos/runs/soak.py",
    "chaos/simulator/fuzzing/draw_corruption.py",
    "chaos/simulator/fuzzing/draw_job.py",
    "chaos/simulator/fuzzing/draw_long.py",
}
"""Modules that choose single faults for a situation of their own. A new fault changes none of them."""
PARTS = {
    "DiskFails": {"chaos/inprocess/file_faults.py"},
    "Link": {
        "chaos/injectors/job_tools.py",
        "chaos/injectors/network/link_faults.py",
        "chaos/testbed/network/link_proxy.py",
    },
}
"""Fault -> the modules that are handed the value itself, in a process of the job or of the harness."""

every_fault = pytest.mark.parametrize("kind", FAULTS, ids=name_of)


class AbleMachine:
    """A machine that can do anything."""

    def without_driver(self) -> Complaint | None:
        return None

    def without_hosts(self) -> Complaint | None:
        return None

    def has_private_files(self) -> bool:
        return True

    def can_limit_memory(self) -> bool:
        return True

    def clock_problem(self) -> str:
        return ""

    def how_slowed(self) -> str:
        return "somehow"


def kinds_below(base: type[BaseFault]) -> Iterator[type[BaseFault]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds_below(kind)


def test_every_class_of_a_fault_has_a_row_in_a_module_of_its_own() -> None:
    assert set(kinds_below(BaseFault)) == set(FAULTS)
    assert len({kind.__module__ for kind in FAULTS}) == len(FAULTS)
    for kind, row in FAULTS.items():
        assert kind.__module__.startswith("rackrun.chaos.faults.")
        assert importlib.import_module(kind.__module__).ROW is row
        assert getattr(rackrun.chaos, kind.__name__) is kind


@every_fault
def test_a_row_is_complete(kind: type[BaseFault]) -> None:
    row, machine = FAULTS[kind], AbleMachine()
    assert type(row.example) is kind
    assert row.refusal(row.example, kind.strikes[0], machine) is None
    assert row.how if isinstance(row.how, str) else row.how(machine)
    assert (row.simulate is None) == (name_of(kind) in WITHOUT_A_MODEL)
    assert {row.cost(row.example, one) for one in kind.strikes} <= {*StrikeCost}
    assert row.needs(row.example) <= {*Need}
    assert isinstance(row.justifies_loss(row.example, 0.1, True), bool)
    if row.inside is not None:
        visits = [HookVisit(place, next(iter(row.points(row.example)), ""), 1) for place in HookPlace]
        assert sum(row.inside.due(row.example, visit) for visit in visits) == 1


@every_fault
def test_what_a_row_draws_is_of_its_kind_and_makes_sense(kind: type[BaseFault]) -> None:
    row, draw = FAULTS[kind], random.Random(7)
    variants = [row.draw(draw) for _ in range(50)]
    variants += [one for make in row.in_fuzz.values() for one in make(draw, 1.0)]
    for fault, target in variants:
        assert type(fault) is kind
        assert kind_of(target) in kind.strikes
        assert nonsense_of(fault, target) is None
    assert row.in_fuzz.keys() <= {*FAMILIES, DISK, *FEW}
    assert {type(one) for one in row.in_any_script(draw)} <= {kind}
    assert Subjects.RANK in kind.strikes or not row.in_any_script(draw)


@every_fault
def test_what_is_simpler_comes_to_an_end(kind: type[BaseFault]) -> None:
    row = FAULTS[kind]
    found = [row.example]
    while more := list(row.simpler(found[-1])):
        assert more[0] not in found
        found.append(more[0])
        assert len(found) < 20


@functools.cache
def importers() -> dict[tuple[str, str], set[str]]:
    """Module and name of a class -> the files of the chaos package that import it."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in (ROOT / "chaos").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[node.module, alias.name].add(str(path.relative_to(ROOT)))
    return found


@every_fault
def test_nobody_else_in_the_product_names_a_fault(kind: type[BaseFault]) -> None:
    named = importers()[kind.__module__, kind.__name__]
    assert named - {"chaos/__init__.py"} - SCENARIOS == PARTS.get(kind.__name__, set())
