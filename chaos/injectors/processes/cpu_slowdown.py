"""Give processes less processor time: by a cgroup quota where one can be set, else by stopping and waking them in
turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import rackrun
from rackrun.chaos.injectors.common.injection import StrikeOutcome
from rackrun.chaos.testbed.machine.cgroups import home_of, new_name, room_for
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import Continue, EndProcess, RemoveGroup, UndoLog

__all__ = ["ByQuota", "ByTurns", "quota_here"]

PERIOD_US = 50_000
_OLD, _NEW = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), "cpu.max"


class ByQuota:
    """The processes together get ``share`` of a processor, by the quota of a cgroup."""

    def __init__(self, processes: Sequence[Process], share: float, undo: UndoLog, above: Path) -> None:
        self._processes, self._undo = processes, undo
        self._path = above / new_name()
        self._record = undo.record(RemoveGroup(str(self._path), str(home_of(processes[0].pid, above))))
        self._path.mkdir()
        quota = str(round(share * PERIOD_US))
        if (self._path / _OLD[0]).exists():
            (self._path / _OLD[1]).write_text(str(PERIOD_US))
            (self._path / _OLD[0]).write_text(quota)
        else:
            (self._path / _NEW).write_text(f"{quota} {PERIOD_US}")
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                (self._path / "cgroup.procs").write_text(str(process.pid))

    def outcome(self) -> StrikeOutcome | None:
        inside = set((self._path / "cgroup.procs").read_text().split())
        missing = [process.pid for process in self._processes if str(process.pid) not in inside]
        return StrikeOutcome(
            not missing, f"{self._path.name}: {', '.join(sorted(inside))}" + f", not {missing}" * bool(missing)
        )

    def take_back(self) -> None:
        self._undo.heal(self._record)


class ByTurns:
    """Each process is stopped for the rest of every period, so that it runs for ``share`` of the time.

    This is coarser than a quota, and a stopped process can be seen to be stopped.
    """

    def __init__(self, processes: Sequence[Process], share: float, undo: UndoLog) -> None:
        self._undo, self._processes = undo, processes
        root = str(Path(rackrun.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        names = [f"{process.pid}:{process.started}" for process in processes]
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "rackrun.chaos.injectors.processes.duty_cycle", str(share), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        own = Process.of(self._helper.pid)
        assert own is not None, "not reaped yet"
        # Healed from the last to the first: the process that stops them has ended before they are woken.
        self._records = [undo.record(Continue(tuple(processes))), undo.record(EndProcess(own))]
        assert self._helper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._helper.stdin.write(b"go\n")
            self._helper.stdin.flush()

    def outcome(self) -> StrikeOutcome | None:
        assert self._helper.stdout is not None
        began = self._helper.stdout.readline() == b"stopped\n"
        return StrikeOutcome(
            began, f"in turns, by process {self._helper.pid}" if began else "nobody was there to be stopped"
        )

    def take_back(self) -> None:
        for number in reversed(self._records):
            self._undo.heal(number)
        self._helper.communicate()


def quota_here(pid: int) -> Path | None:
    """Return the cgroup below which one with a quota can be made for process ``pid``; None if that is not possible
    here."""
    return room_for(pid, "cpu", _OLD, (_NEW,))
