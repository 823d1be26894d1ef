"""Imports point downwards only.

::

    errors <- protocol, pages <- topology, checkpoint <- core <- link <- coordinator, agent, worker <- frameworks <- launch <- launcher, ctl

`rackrun.chaos` may import all of it, and nothing imports `rackrun.chaos`. Inside each of these the rooms, the folders with modules, stand on
floors: a room may import from the floors below it. Imports inside functions and under ``TYPE_CHECKING`` count as well: a type that points
upwards is a design that points upwards.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rackrun"

# Unit -> height. A module belongs to the longest of these names that its own begins with; within one unit imports are
# free, and units of the same height do not see each other.
HEIGHT = {
    "rackrun.errors": 0,
    "rackrun.version": 0,
    "rackrun.protocol": 1,
    "rackrun.pages": 1,
    "rackrun.topology": 2,
    "rackrun.checkpoint": 2,
    "rackrun.core": 3,
    "rackrun.link": 4,
    "rackrun.coordinator": 5,
    "rackrun.agent": 5,
    "rackrun.worker": 5,
    "rackrun.frameworks": 6,
    "rackrun": 7,  # what `import rackrun` gives to the user
    "rackrun.launch": 8,
    "rackrun.launcher": 9,
    "rackrun.ctl": 9,
    "rackrun.__main__": 10,
    "rackrun.chaos": 11,
}

TOP = "(top)"
"""The room of the modules that lie in the package's own folder."""

# Unit -> its floors, from the ground up, with the rooms of each.
FLOORS = {
    "rackrun.topology": [f"{TOP} model", "gpu_driver placement", "drawing health sources"],
    "rackrun.checkpoint": [
        "base",
        "commit durable.storage host_memory redundancy",
        "image",
        "arena durable",
        "dcp manager",
        f"{TOP} offline",
    ],
    "rackrun.core": [
        f"{TOP} members policy",
        "generation placement",
        "faults resize stragglers",
        "recovery",
        "lifecycle requests",
        "machine",
    ],
    "rackrun.link": ["process", TOP],
    "rackrun.coordinator": [f"{TOP} observe user_code", "journal sinks", "report shell", "server"],
    "rackrun.agent": ["host", "gpus worker_start workers", "fillers snapshots", "tray", TOP],
    "rackrun.worker": [
        f"{TOP} batch device tensors",
        "communicators membership.decisions torch_compat.data_parallel",
        "torch_compat",
        "state.objects",
        "membership state",
        "restore steps.undo",
        "steps",
        "data",
        "process",
        "exact script snapshots",
        "integrity",
        "loop",
    ],
    "rackrun.frameworks": [TOP, "accelerate lightning.base megatron titan", "hf lightning.state", "lightning"],
    "rackrun.launch": [f"{TOP} options", "run"],
    "rackrun.ctl": ["ckpt", TOP],
    "rackrun.chaos": [
        "base testbed.fake_nvml",
        "faults planner.inputs simulator.base testbed.machine",
        "faults.data faults.hangs faults.hardware faults.network faults.processes faults.storage",
        "faults.table",
        "inprocess plan planner.model planner.swap_model testbed.network",
        "planner.analysis simulator.cluster testbed",
        "evidence injectors.common planner simulator.fuzzing",
        "injectors.network injectors.processes injectors.resources oracles.behaviour oracles.training report.analysis simulator",
        "injectors oracles report",
        "runs",
        f"{TOP} cli",
    ],
}
FLOOR = {unit: {room: n for n, rooms in enumerate(floors) for room in rooms.split()} for unit, floors in FLOORS.items()}


class Import(NamedTuple):
    importer: str
    imported: str
    where: str


def unit_of(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in HEIGHT:
            return name
    raise AssertionError(f"{module} is not of rackrun")


def room_of(module: str) -> str:
    """The folder that it lies in, below its unit's."""
    package = module if ROOT.joinpath(*module.split(".")).is_dir() else module.rpartition(".")[0]
    return package.removeprefix(unit_of(module)).lstrip(".") or TOP


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def sources() -> Iterator[tuple[str, Path]]:
    """(module name, file) of all of rackrun, the symlinked folders under their rackrun names."""
    folders = [PACKAGE]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(module: str, path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: relative import"
            base = node.module or ""
            below = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else base for name in below]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "rackrun":
                yield Import(module, name, where)


def violation(found: Import) -> str | None:
    importer, imported = unit_of(found.importer), unit_of(found.imported)
    if importer == imported:
        return _violation_between_rooms(found, importer)
    if HEIGHT[imported] < HEIGHT[importer]:
        return None
    return f"{found.where}: {found.importer} ({importer}) imports {found.imported} ({imported}), which is not below it"


def _violation_between_rooms(found: Import, unit: str) -> str | None:
    importer, imported = room_of(found.importer), room_of(found.imported)
    if importer == imported or unit not in FLOOR or FLOOR[unit][imported] < FLOOR[unit][importer]:
        return None
    return f"{found.where}: {found.importer} imports {found.imported}: the room {imported} is not below {importer} in {unit}"


ALL = list(sources())


def test_imports_point_downwards() -> None:
    wrong = [story for module, path in ALL for found in imports_of(module, path) if (story := violation(found))]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_symlinked_folders_are_seen() -> None:
    units = {unit_of(name) for name, _ in ALL}
    assert {"rackrun.topology", "rackrun.checkpoint", "rackrun.chaos"} <= units


def test_every_room_has_a_floor_and_few_modules() -> None:
    rooms: dict[tuple[str, str], list[str]] = {}
    for name, path in ALL:
        if unit_of(name) in FLOOR and path.name != "__init__.py":
            rooms.setdefault((unit_of(name), room_of(name)), []).append(name)
    assert {(unit, room) for unit in FLOOR for room in FLOOR[unit]} >= rooms.keys()
    assert {room: len(modules) for room, modules in rooms.items() if len(modules) > 14} == {}


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("rackrun.agent.main", "rackrun.link.heartbeat_page", True),
        ("rackrun.core.machine.job", "rackrun.protocol.events", True),
        ("rackrun.protocol.events", "rackrun.core.machine.job", False),
        ("rackrun.protocol.wire", "rackrun.protocol.ids", True),
        ("rackrun.worker.loop.run", "rackrun.agent.main", False),
        ("rackrun.core.recovery.fencing", "rackrun.core.members.rack", True),
        ("rackrun.core.members.rack", "rackrun.core.recovery.fencing", False),
        ("rackrun.core.faults.triage", "rackrun.core.resize.resizing", False),
        ("rackrun.agent.host.proc", "rackrun.agent.main", False),
        ("rackrun.ctl.main", "rackrun.chaos.plan.definition", False),
        ("rackrun.chaos.simulator", "rackrun.core.machine.job", True),
        ("rackrun.link.heartbeat_page", "rackrun.worker", False),
        ("rackrun.worker.loop.run", "rackrun", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert (violation(Import(importer, imported, "x.py:1")) is None) == allowed


def test_the_page_of_state_machines_is_that_of_the_code() -> None:
    check = [sys.executable, str(ROOT / "tools" / "state_machines.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0


def test_the_page_of_rooms_is_that_of_the_code() -> None:
    assert subprocess.run([sys.executable, ROOT / "tools" / "rooms.py", "--check"], check=False).returncode == 0


def test_nothing_below_names_chaos() -> None:
    """An import that no import statement shows. ``rackctl`` finds its commands as anybody's, by an entry point."""
    named = [
        module for module, path in ALL if '"rackrun.chaos' in path.read_text() and unit_of(module) != "rackrun.chaos"
    ]
    assert named == []


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    bare = {"topology", "checkpoint", "chaos"}
    for _, path in ALL:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not bare & {name.split(".")[0] for name in names}, f"{path}: {names}"
