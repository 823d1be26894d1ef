"""Readings of a worker's process from /proc, made a few times a second, and only when its time is running out."""

from __future__ import annotations

import contextlib
import os
import time

from rackrun.agent.host import proc
from rackrun.agent.workers.hang_detector import ActivityTotals

__all__ = ["frozen", "read_signs", "where_in_kernel"]

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_FREEZERS = ("do_freezer_trap", "__refrigerator", "freezer_trap")


def read_signs(pid: int) -> ActivityTotals:
    """Read the signs of a process and all its descendants. What cannot be read counts as nothing."""
    below = proc.descendants_now(pid)
    below_ns = sum(_cpu_ns(one) for one in below)
    io_bytes = sum(_io_bytes(one) for one in (pid, *below))
    fields, waits_ns = _stat_fields(pid), _waits_ns(pid)
    reaped_ns = _TICK_NS * sum(int(field) for field in fields[13:15])
    return ActivityTotals(
        time.monotonic_ns(),
        below_ns + _cpu_ns(pid),
        waits_ns,
        io_bytes,
        _wakes(pid),
        fields[:1] == [b"D"],
        main=pid,
        others_ns=below_ns + reaped_ns + sum(ran for thread, (ran, _) in waits_ns.items() if thread != pid),
    )


def frozen(pid: int) -> bool:
    """Return whether the process's control group is frozen, so that none of its threads run."""
    if _read(f"/proc/{pid}/wchan").strip() in _FREEZERS:
        return True
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "freezer":
            return _read(f"/sys/fs/cgroup/freezer{path}/freezer.state").strip() == "FROZEN"
        if not controllers and any(
            "frozen 1" in _read(f"{root}{path}/cgroup.events") for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        ):
            return True
    return False


def where_in_kernel(pid: int) -> str:
    """Return where the main thread is in the kernel, if that is visible: ``asleep in hrtimer_nanosleep (system call
    230)``."""
    state = (_stat_fields(pid)[:1] or [b"?"])[0].decode()
    call, wchan = _read(f"/proc/{pid}/syscall").split(maxsplit=1)[:1], _read(f"/proc/{pid}/wchan").strip()
    if state == "R" or call == ["running"]:
        return "running"
    told = f"asleep in {wchan}" if wchan not in ("", "0") else f"in state {state}"
    return f"{told} (system call {call[0]})" if call else told


def _cpu_ns(pid: int) -> int:
    """Return the processor time of all threads of a process, and of the children that it has waited for, in
    nanoseconds."""
    return _TICK_NS * sum(int(field) for field in _stat_fields(pid)[11:15])


def _waits_ns(pid: int) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            fields = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
            if len(fields) == 3:
                found[int(thread)] = int(fields[0]), int(fields[1])
    return found


def _io_bytes(pid: int) -> int:
    counts = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar"))


def _wakes(pid: int) -> int:
    for line in _read(f"/proc/{pid}/task/{pid}/status").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return 0


def _stat_fields(pid: int) -> list[bytes]:
    """From its state on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return []
    return line[line.rindex(b")") + 2 :].split()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
