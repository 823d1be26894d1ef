"""Check that the arenas fit before anything is allocated: a typed error with the figures, not an OOM kill in step 100.

For each of its ranks a host holds ``slots`` images, and ``slots`` times what the rank keeps for others (`Redundancy`).
All of it must fit under every ceiling: the control group of this process and each parent group, what the kernel says is
available, and the file system of the arena directory (a tmpfs has a size of its own).

Pages of a tmpfs are charged to the control group that touches them first, so plan in the process that will allocate
(the agent), not in another container. A limit may sit on a parent group. Page cache counts as used although the kernel
can reclaim it, so its inactive part is counted as free. An arena that exists already (a restarted agent) has been
charged: pass its size as ``held_bytes``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Protocol

from rackrun.checkpoint.base.digest import CHUNK_BYTES
from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.redundancy.shard_placement import Redundancy
from rackrun.checkpoint.redundancy.stripe_set import StripeSet

__all__ = ["Ceiling", "MemoryPlan", "ceilings", "with_spare_room"]

_PAGE = 4096
_SPARE_ROOM = 64
_UNLIMITED = 2**60  # control groups of version 1 express "no limit" as a number near 2**63


def with_spare_room(size: int) -> int:
    """Return how much memory to allocate for images of ``size`` bytes: 1/64 more, because plain state grows a little."""
    return size + size // _SPARE_ROOM


@dataclass(frozen=True)
class Ceiling:
    """One bound on memory, in bytes: a control group, the host, or a file system."""

    name: str
    total: int
    free: int
    remedy: str
    """How a user raises the bound."""


class FileSystemSize(Protocol):
    """The fields of `os.statvfs_result` that are read here."""

    @property
    def f_frsize(self) -> int: ...
    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bavail(self) -> int: ...


@dataclass(frozen=True)
class MemoryPlan:
    """What one host needs, against its ceilings. All sizes are in bytes."""

    local_ranks: int
    shard_bytes: int
    """The largest image of any rank."""
    redundancy: Redundancy
    ceilings: tuple[Ceiling, ...]
    slots: int = 2
    kept: Fraction | None = None
    """How many shards a rank keeps for others: `ShardPlacement.kept`, whose sets may be smaller than asked for.

    None: as asked.
    """
    held_bytes: int = 0
    """What arenas of this job on this host take already."""
    usable: float = 0.9
    """The share of the free memory that arenas may take, above 0 and up to 1."""

    def __post_init__(self) -> None:
        if self.local_ranks < 1 or self.shard_bytes < 0 or self.held_bytes < 0 or not 0 < self.usable <= 1:
            raise MemoryPlanError(
                f"memory cannot be planned for {self.local_ranks} ranks of {self.shard_bytes} bytes, with {self.held_bytes} bytes held "
                f"and a usable share of {self.usable}.",
                remedy="Give 1 or more ranks, sizes from 0, and a usable share above 0 and up to 1.",
            )
        if self.slots < 2:
            raise MemoryPlanError(
                f"an arena with {self.slots} slot(s) would write over its only image.",
                remedy="Use 2 or more.",
            )

    @property
    def own_bytes(self) -> int:
        """Bytes for the images of the local ranks."""
        return self.local_ranks * (2 * _PAGE + self.slots * _slot_bytes(self.shard_bytes))

    @property
    def kept_bytes(self) -> int:
        """Bytes for copies or parity kept for other ranks, in an arena of its own on each rank."""
        kept = self.redundancy.kept() if self.kept is None else self.kept
        if not kept:
            return 0
        if self.redundancy.in_sets:
            lost = self.redundancy.parity
            members = int(lost / kept) + lost
            each = _pages(StripeSet(tuple(range(members)), lost).kept_bytes(self.shard_bytes))
        else:
            each = ceil(kept) * _slot_bytes(self.shard_bytes)
        return self.local_ranks * (2 * _PAGE + self.slots * each)

    @property
    def needed_bytes(self) -> int:
        return self.own_bytes + self.kept_bytes

    def room(self, ceiling: Ceiling) -> int:
        """Return how many bytes arenas may take under a ceiling, including what they hold already."""
        return self.held_bytes + int(ceiling.free * self.usable)

    @property
    def tightest(self) -> Ceiling | None:
        return min(self.ceilings, key=self.room, default=None)

    @property
    def fits(self) -> bool:
        return self.tightest is None or self.needed_bytes <= self.room(self.tightest)

    def check(self) -> MemoryPlan:
        """Return the plan itself when it fits.

        Otherwise raise `MemoryPlanError` with the figures, and with a smaller plan that fits.
        """
        tightest = self.tightest
        if tightest is None or self.fits:
            return self
        lesser = next((plan for plan in self._lesser() if plan.fits), None)
        instead = ""
        if lesser:
            warning = " and protects nothing" if lesser.redundancy.kind == "local" != self.redundancy.kind else ""
            instead = f"{lesser._terms()} fits with {_amount(lesser.needed_bytes)}{warning}; or: "
        raise MemoryPlanError(
            f"the arenas of {self.local_ranks} rank(s) on this host need {_amount(self.needed_bytes)} ({self._terms()}, "
            f"shards of {_amount(self.shard_bytes)}), {_amount(self.needed_bytes - self.room(tightest))} more than the "
            f"{_amount(self.room(tightest))} that {tightest.name} leaves ({_amount(tightest.free)} free of "
            f"{_amount(tightest.total)}, {self.usable:.0%} usable).",
            remedy=f"{instead}{tightest.remedy}, put fewer ranks on a host, or shard the state over more ranks.",
        )

    def table(self) -> str:
        """Return the plan as text, one line for each ceiling."""
        times = self.needed_bytes / (self.local_ranks * self.shard_bytes) if self.shard_bytes else 0.0
        lines = [
            f"{self.local_ranks} rank(s) on this host, {self._terms()}, shards of {_amount(self.shard_bytes)}",
            f"  {'own images':40} {_amount(self.own_bytes):>10}",
            f"  {'kept for others':40} {_amount(self.kept_bytes):>10}",
            f"  {'together':40} {_amount(self.needed_bytes):>10}  {times:.2f} times the state",
            f"  {'ceiling':40} {'total':>10} {'free':>10} {'for arenas':>10}",
        ]
        for ceiling in sorted(self.ceilings, key=self.room):
            amounts = " ".join(f"{_amount(n):>10}" for n in (ceiling.total, ceiling.free, self.room(ceiling)))
            short = "" if self.needed_bytes <= self.room(ceiling) else "  too little"
            lines.append(f"  {ceiling.name:40} {amounts}{short}")
        if not self.ceilings:
            lines.append("  none known")
        return "\n".join(lines)

    def _lesser(self) -> Iterator[MemoryPlan]:
        """Yield smaller plans that could be used instead, the best protected first."""
        sizes = [size for size in (8, 16, 32) if self.redundancy.kind == "mirror" or size > self.redundancy.width]
        weaker = (
            [Redundancy.xor(size, self.redundancy.across) for size in sizes] if self.redundancy.kind != "local" else []
        )
        if self.slots > 2:
            yield replace(self, slots=2)
        for redundancy in (*weaker, Redundancy.local()):
            yield replace(self, slots=2, redundancy=redundancy, kept=None)

    def _terms(self) -> str:
        return f"{self.redundancy}, {self.slots} slots"


def ceilings(
    arena_dir: Path | None,
    *,
    proc: Path = Path("/proc"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    statvfs: Callable[[Path], FileSystemSize] = os.statvfs,
) -> tuple[Ceiling, ...]:
    """Return all that bounds arenas in ``arena_dir`` (None: in memfds) when this process allocates them.

    Raises `MemoryPlanError` when a bound cannot be read.
    """
    folder = () if arena_dir is None else _file_system(arena_dir, statvfs)
    return (*_control_groups(proc, cgroup_root), _available(proc), *folder)


def _available(proc: Path) -> Ceiling:
    sizes = _table(proc / "meminfo")
    if "MemAvailable" not in sizes or "MemTotal" not in sizes:
        raise MemoryPlanError(f"{proc / 'meminfo'} does not say what is available.", remedy="Is /proc mounted?")
    remedy = "end what else uses memory here"
    return Ceiling("the host's memory", 1024 * sizes["MemTotal"], 1024 * sizes["MemAvailable"], remedy)


def _file_system(arena_dir: Path, statvfs: Callable[[Path], FileSystemSize]) -> Iterator[Ceiling]:
    there = arena_dir
    try:
        there = next(path for path in (arena_dir, *arena_dir.absolute().parents) if path.exists())
        size = statvfs(there)
    except OSError as error:
        raise MemoryPlanError(
            f"cannot measure {there}: {error.strerror}.", remedy="Use another arena directory."
        ) from error
    if size.f_blocks:  # a tmpfs without a size has 0 blocks, and only memory bounds it
        remedy = "give its file system more room (of a container: its shared memory size)"
        yield Ceiling(f"{arena_dir}", size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize, remedy)


def _control_groups(proc: Path, root: Path) -> Iterator[Ceiling]:
    """Yield the limits of this process's control group and its parents, innermost first.

    Control groups of version 2 are read, or else those of version 1.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0" and not controllers:
            yield from _limits(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits(
                root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits(base: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[Ceiling]:
    """Yield the limits of a group and its parents.

    In a container the path may be the host's while the container's own group is mounted at ``base``, so groups that do
    not exist there are skipped.
    """
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        group = base.joinpath(*parts[:depth])
        limit, used = _number(group / limit_file), _number(group / usage_file)
        if limit is None or limit >= _UNLIMITED or used is None:
            continue
        cached = _table(group / "memory.stat").get(reclaimable, 0)
        name = f"control group /{'/'.join(parts[:depth])}"
        yield Ceiling(name, limit, max(0, limit - used + cached), f"raise {limit_file} of it")


def _number(path: Path) -> int | None:
    """Read a number of bytes. None when there is no such file, or no limit. Raises `MemoryPlanError` for other text."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    if text == "max":
        return None
    if not (text.isascii() and text.isdigit()):
        raise MemoryPlanError(f"{path} says {text[:40]!r}, which is no number of bytes.", remedy="Please report it.")
    return int(text)


def _table(path: Path) -> dict[str, int]:
    """Read ``name value`` lines, as in memory.stat and /proc/meminfo; skip other lines.

    Empty when there is no such file.
    """
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isascii() and row[1].isdigit()}


def _slot_bytes(payload: int) -> int:
    """Return the size of an arena's slot: two headers, a CRC32C for each chunk, and the payload, in whole pages."""
    chunks = -(-payload // CHUNK_BYTES)
    return 2 * _PAGE + _pages(4 * chunks) + _pages(payload)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _amount(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
