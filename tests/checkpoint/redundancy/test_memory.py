"""Whether the arenas fit is known before anything is allocated, from figures that are read, not guessed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.arena.memory_plan import Ceiling, MemoryPlan, ceilings
from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.redundancy.shard_placement import Labels, Redundancy, place
from rackrun.checkpoint.redundancy.stripe_set import ParityError

GB = 10**9
MIRROR, XOR, LOCAL = Redundancy.mirror(2, "tray"), Redundancy.xor(8, "tray"), Redundancy.local()


@dataclass
class FileSystem:
    f_frsize: int = 4096
    f_blocks: int = 1000
    f_bavail: int = 500


def plan(redundancy: Redundancy, free: int, *, slots: int = 2, ranks: int = 4, shard: int = 10 * GB) -> MemoryPlan:
    ceiling = Ceiling("the host's memory", 2 * free, free, "end what else uses memory here")
    return MemoryPlan(ranks, shard, redundancy, (ceiling,), slots=slots)


# -- what is needed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redundancy", "times"),
    [
        (LOCAL, 2.0),
        (MIRROR, 4.0),
        (Redundancy.mirror(3), 6.0),
        (XOR, 2.286),
        (Redundancy.xor(18), 2.118),
        (Redundancy.rs(8, 2), 2.5),
    ],
)
def test_the_need_in_times_the_state_is_the_known_one(redundancy: Redundancy, times: float) -> None:
    assert plan(redundancy, GB).needed_bytes / (4 * 10 * GB) == pytest.approx(times, abs=0.001)


def test_the_plan_of_the_placement_counts_not_what_was_asked_for() -> None:
    """Four trays cannot make sets of eight: parity is a third of a shard rather than a seventh."""
    placement = place({rank: Labels(tray=f"t{rank}") for rank in range(4)}, XOR)
    asked = plan(XOR, GB)
    got = replace(asked, kept=placement.kept())
    assert got.kept_bytes / asked.kept_bytes == pytest.approx(7 / 3, rel=1e-5)
    assert replace(plan(MIRROR, GB), kept=Fraction(0)).kept_bytes == 0, "data parallelism has the copies"


@given(
    st.integers(0, 2**40),
    st.integers(2, 4),
    st.sampled_from([LOCAL, MIRROR, XOR, Redundancy.xor(100), Redundancy.rs(7, 3)]),
)
def test_the_need_is_never_less_than_the_images_and_little_more(shard: int, slots: int, redundancy: Redundancy) -> None:
    needed = plan(redundancy, GB, slots=slots, shard=shard)
    images = 4 * slots * shard
    assert images <= needed.own_bytes <= images * 1.0001 + 4 * (slots + 1) * 4 * 4096
    kept = images * redundancy.kept()
    assert kept <= needed.kept_bytes <= kept * 1.0001 + 4 * (slots + 1) * 8 * 4096


# -- fits, or not ------------------------------------------------------------------------------------------------------


def test_a_plan_that_fits_is_handed_on() -> None:
    fitting = plan(XOR, 200 * GB)
    assert fitting.check() is fitting


def test_what_does_not_fit_is_refused_with_the_figures_and_a_remedy() -> None:
    with pytest.raises(MemoryPlanError) as refusal:
        plan(MIRROR, 120 * GB).check()
    assert str(refusal.value) == (
        'the arenas of 4 rank(s) on this host need 160.0 GB (mirror(copies=2, across="tray"), 2 slots, shards of 10.0 GB),'
        " 52.0 GB more than the 108.0 GB that the host's memory leaves (120.0 GB free of 240.0 GB, 90% usable). Remedy: "
        'xor(set_size=8, across="tray"), 2 slots fits with 91.4 GB; or: end what else uses memory here, put fewer ranks on a'
        " host, or shard the state over more ranks."
    )


@pytest.mark.parametrize(
    ("asked", "free", "offered"),
    [
        (plan(MIRROR, 180 * GB, slots=3), 180, 'mirror(copies=2, across="tray"), 2 slots fits'),
        (plan(MIRROR, 102 * GB), 102, 'xor(set_size=8, across="tray"), 2 slots fits'),
        (plan(XOR, 99 * GB), 99, 'xor(set_size=16, across="tray"), 2 slots fits'),
        (plan(XOR, 90 * GB), 90, "local(), 2 slots fits with 80.0 GB and protects nothing"),
        (plan(LOCAL, 88 * GB), 88, "Remedy: end what else"),
        (plan(XOR, 50 * GB), 50, "Remedy: end what else"),
    ],
)
def test_the_best_protected_plan_that_fits_is_offered(asked: MemoryPlan, free: int, offered: str) -> None:
    with pytest.raises(MemoryPlanError) as refusal:
        asked.check()
    assert offered in str(refusal.value)


def test_the_tightest_ceiling_decides() -> None:
    wide = Ceiling("the host's memory", 900 * GB, 800 * GB, "buy more")
    narrow = Ceiling("/dev/shm", 64 * 2**20, 64 * 2**20, "give its file system more room")
    with pytest.raises(MemoryPlanError, match=r"60\.4 MB that /dev/shm leaves.*Remedy: give its file system more room"):
        MemoryPlan(1, GB, LOCAL, (wide, narrow)).check()
    MemoryPlan(1, GB, LOCAL, (wide,)).check()
    assert MemoryPlan(1, GB, LOCAL, ()).check().fits, "no ceiling is known"


def test_arenas_that_exist_are_not_asked_for_again() -> None:
    """A restarted agent: its arenas have used up what was free."""
    full = plan(XOR, 5 * GB)
    assert not full.fits
    assert replace(full, held_bytes=full.needed_bytes).fits


@given(st.integers(1, 300 * GB), st.sampled_from([LOCAL, MIRROR, XOR]))
def test_fits_and_check_say_the_same(free: int, redundancy: Redundancy) -> None:
    asked = plan(redundancy, free)
    assert asked.fits == (asked.needed_bytes <= int(0.9 * free))
    if asked.fits:
        assert asked.check() is asked
    else:
        with pytest.raises(MemoryPlanError):
            asked.check()


def test_one_slot_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="would write over its only image"):
        plan(XOR, GB, slots=1)


@pytest.mark.parametrize(
    "change", [{"local_ranks": 0}, {"shard_bytes": -1}, {"held_bytes": -1}, {"usable": 0.0}, {"usable": 1.1}]
)
def test_figures_that_mean_nothing_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MemoryPlanError, match="Remedy"):
        replace(plan(XOR, GB), **change)


def test_the_table_shows_the_need_and_every_ceiling_the_tightest_first() -> None:
    ceiling = Ceiling("control group /job", 100 * GB, 80 * GB, "raise memory.max of it")
    asked = plan(XOR, 200 * GB)
    assert replace(asked, ceilings=(*asked.ceilings, ceiling)).table() == (
        '4 rank(s) on this host, xor(set_size=8, across="tray"), 2 slots, shards of 10.0 GB\n'
        "  own images                                  80.0 GB\n"
        "  kept for others                             11.4 GB\n"
        "  together                                    91.4 GB  2.29 times the state\n"
        "  ceiling                                       total       free for arenas\n"
        "  control group /job                         100.0 GB    80.0 GB    72.0 GB  too little\n"
        "  the host's memory                          400.0 GB   200.0 GB   180.0 GB"
    )
    assert MemoryPlan(1, 0, LOCAL, ()).table().endswith("none known")


# -- what bounds this process ------------------------------------------------------------------------------------------


class Host:
    """A /proc and a /sys/fs/cgroup of our own."""

    def __init__(self, root: Path, groups: str) -> None:
        self.proc, self.cgroup, self.arenas = root / "proc", root / "cgroup", root / "shm"
        self.write(self.proc / "self/cgroup", groups)
        self.write(
            self.proc / "meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   700 kB\nHugePages_Total: 0\n"
        )
        self.cgroup.mkdir()
        self.arenas.mkdir()

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, **files: object) -> None:
        for name, value in files.items():
            self.write(self.cgroup / path / name.replace("__", "."), f"{value}\n")

    def ceilings(self, file_system: FileSystem | None = None) -> dict[str, tuple[int, int]]:
        found = ceilings(
            self.arenas, proc=self.proc, cgroup_root=self.cgroup, statvfs=lambda _: file_system or FileSystem()
        )
        return {ceiling.name: (ceiling.total, ceiling.free) for ceiling in found}


def test_the_limit_of_a_parent_counts(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/slice/job/rank\n")
    host.group("slice/job/rank", memory__max="max", memory__current=5000)
    host.group("slice/job", memory__max=9000, memory__current=6000)
    host.group("slice", memory__max=20000, memory__current=19000)
    assert host.ceilings() == {
        "control group /slice/job": (9000, 3000),
        "control group /slice": (20000, 1000),
        "the host's memory": (1024000, 716800),
        str(host.arenas): (4096000, 2048000),
    }


def test_page_cache_that_is_not_in_use_counts_as_free_and_a_tmpfs_does_not(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/job\n")
    host.group(
        "job",
        memory__max=9000,
        memory__current=8000,
        memory__stat="anon 100\nshmem 5000\ninactive_file 700\nactive_file 900",
    )
    assert host.ceilings()["control group /job"] == (9000, 1700)


def test_a_group_that_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/job\n")
    host.group("job", memory__max=9000, memory__current=9500)
    assert host.ceilings()["control group /job"] == (9000, 0)


@pytest.mark.parametrize("path", ["/", "/a/path/of/the/host", "/../../elsewhere"])
def test_in_a_container_its_own_group_is_at_the_mount(tmp_path: Path, path: str) -> None:
    host = Host(tmp_path, f"0::{path}\n")
    host.group("", memory__max=9000, memory__current=1000)
    assert host.ceilings()["control group /"] == (9000, 8000)


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    host = Host(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    host.group(
        "memory/job", memory__limit_in_bytes=9000, memory__usage_in_bytes=4000, memory__stat="total_inactive_file 10"
    )
    host.group("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=4000)
    assert host.ceilings()["control group /job"] == (9000, 5010)
    assert "control group /" not in host.ceilings()


def test_a_host_without_control_groups_is_bounded_by_its_memory(tmp_path: Path) -> None:
    host = Host(tmp_path, "")
    (host.proc / "self/cgroup").unlink()
    assert list(host.ceilings()) == ["the host's memory", str(host.arenas)]


def test_a_file_system_without_a_size_is_no_ceiling(tmp_path: Path) -> None:
    assert str(tmp_path / "shm") not in Host(tmp_path, "").ceilings(FileSystem(f_blocks=0))


def test_an_arena_directory_that_is_yet_to_be_made_is_measured_at_its_parent(tmp_path: Path) -> None:
    host = Host(tmp_path, "")
    measured: list[Path] = []

    def measure(path: Path) -> FileSystem:
        measured.append(path)
        return FileSystem()

    ceilings(
        host.arenas / "job" / "x",
        proc=host.proc,
        cgroup_root=host.cgroup,
        statvfs=measure,
    )
    assert measured == [host.arenas]


def test_figures_that_cannot_be_read_are_a_refusal_not_a_guess(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/job\n")
    host.group("job", memory__max="plenty", memory__current=1)
    with pytest.raises(MemoryPlanError, match="'plenty', which is no number of bytes"):
        host.ceilings()
    host.group("job", memory__max="max")
    host.write(host.proc / "meminfo", "MemTotal: 1 kB\n")
    with pytest.raises(MemoryPlanError, match="does not say what is available"):
        host.ceilings()

    def broken(path: Path) -> FileSystem:
        raise OSError(5, "Input/output error")

    host.write(host.proc / "meminfo", "MemTotal: 1 kB\nMemAvailable: 1 kB\n")
    with pytest.raises(MemoryPlanError, match=r"cannot measure .*shm: Input/output error"):
        ceilings(host.arenas, proc=host.proc, cgroup_root=host.cgroup, statvfs=broken)


def test_this_host_has_figures(tmp_path: Path) -> None:
    found = ceilings(tmp_path)
    assert any(ceiling.name == "the host's memory" for ceiling in found)
    assert all(ceiling.total > 0 and ceiling.free >= 0 for ceiling in found)
    disk = next(ceiling for ceiling in found if ceiling.name == str(tmp_path))
    assert disk.total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_a_shard_beyond_all_reason_is_refused() -> None:
    with pytest.raises(ParityError, match=r"its length must be 0 to 2\*\*46"):
        _ = plan(XOR, GB, shard=2**47).kept_bytes
