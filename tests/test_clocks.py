"""How long something takes, and until when somebody is believed, is never told by a clock that people and NTP set.

Wall clocks (`time.time`, `datetime.now`) are for names, for the age of files, for what people read, and for telling checkpoints of two runs apart. Whoever needs one is
named here, with why. A deadline, a lease or a duration by one of them is wrong by hours whenever the clock is set, and no test of a moment shows it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / "rackrun" / name for name in ("agent", "coordinator", "core", "ctl", "launch", "link", "worker")]
FOLDERS += [ROOT / "checkpoint", ROOT / "topology"]

WALL: dict[str, int] = {
    "rackrun/coordinator/journal/journal_writer.py": 3,  # beside the monotonic time of each row, so that people can read it
    "rackrun/coordinator/sinks/sink_host.py": 1,  # beside each value, so that loggers can show it
    "rackrun/ctl/ckpt/ckpt_commands.py": 9,  # the age of files
    "rackrun/agent/host/tensor_files.py": 1,  # the same
    "rackrun/worker/snapshots/durable_checkpoints.py": 1,  # the same
    "checkpoint/manager/save_handle.py": 1,  # the same
    "rackrun/launch/run/run_directory.py": 1,  # a run's name
    "rackrun/worker/snapshots/resumption.py": 1,  # between runs: a quarantine outlives a process
    "checkpoint/manager/manager.py": 1,  # the same
    "checkpoint/dcp/dcp_storage.py": 2,  # when it was written, in its manifest; the age of files
}
"""How often each of them asks, at the most."""
_OF_TIME = ("time", "time_ns")
_OF_DATETIME = ("now", "utcnow", "today")


def wall_clocks(tree: ast.AST) -> Iterator[int]:
    """Lines on which a wall clock is asked, or handed on to be asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
            if (
                (module == "time" and name in _OF_TIME)
                or (module in ("datetime", "date") and name in _OF_DATETIME)
                or (module == "time" and name in ("CLOCK_REALTIME", "localtime", "gmtime"))
            ):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for name in node.names if name.name in _OF_TIME)


def test_durations_and_leases_are_never_by_a_wall_clock() -> None:
    found: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in folder.rglob("*.py"):
            asked = len(list(wall_clocks(ast.parse(path.read_text()))))
            if asked:
                found[str(path.relative_to(ROOT))] += asked
    more = {name: count for name, count in found.items() if count > WALL.get(name, 0)}
    assert not more, f"by a wall clock: {more}; use time.monotonic, or say in WALL why it has to be one"


def test_what_asks_a_wall_clock_is_seen_whatever_it_is_called() -> None:
    for text in (
        "time.time()",
        "lease_ends = time.time_ns() + 1",
        "f(clock=time.time)",
        "from time import time",
        "datetime.now(UTC)",
    ):
        assert list(wall_clocks(ast.parse(text))), text
    assert not list(wall_clocks(ast.parse("time.monotonic() + loop.time()")))
