"""NVML through its real binding and a library that plays it: what is read, and what is made of every failure."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.chaos.testbed.fake_nvml.fake_driver import CALLS, build
from rackrun.topology.gpu_driver.nvml_layout import as_ranges, parse_fabric, parse_platform
from rackrun.topology.gpu_driver.nvml_watch import NvmlWatch, read_once
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, TrayReading, XidEvent
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.discover import discover
from rackrun.topology.sources.partial_topology import PartialTopology, merge
from tests.topology.conftest import Fake

MakeFake = Callable[..., Fake]
DEADLINE_S = 100.0


def reading_of(env: dict[str, str]) -> TrayReading:
    reading = read_once(env=env, timeout_s=DEADLINE_S)
    assert isinstance(reading, TrayReading), reading
    return reading


# -- what is read
def test_trays_find_themselves_and_together_they_are_the_rack(fake: MakeFake) -> None:
    of = fake("two-gb200-nvl72")
    names = ["rack-00-tray-03", "rack-00-tray-17", "rack-01-tray-03"]
    found = [discover(name, env=of.env(name), timeout_s=DEADLINE_S) for name in names]
    assert all(isinstance(one, PartialTopology) and not one.notes for one in found), found
    topology = merge(one for one in found if isinstance(one, PartialTopology))
    assert {rack.serial: [tray.index for tray in rack.trays] for rack in topology.racks} == {
        "1825024170029": [3, 17], "1825024170030": [3],
    }  # fmt: skip
    for name in names:
        for index in range(4):
            seat, told = topology.by_slot[f"{name}/{index}"], of.topology.by_slot[f"{name}/{index}"]
            assert seat.clique == told.clique
            for field in ("uuid", "numa", "cpus", "module_id"):
                assert getattr(seat.gpu, field) == getattr(told.gpu, field)
            assert seat.gpu.bdf == f"{index + 1:08x}:01:00.0"


def test_a_host_of_its_own_nvswitches_is_in_no_clique_of_several(fake: MakeFake) -> None:
    of = fake("hgx-h100")
    found = discover("a", env=of.env("tray-02"), timeout_s=DEADLINE_S)
    assert isinstance(found, PartialTopology)
    topology = merge([found])
    assert len(topology.seats) == 8
    assert {seat.clique for seat in topology.seats} == {CliqueId("host:a", 0)}


def test_all_facts_of_a_gpu_are_read(fake: MakeFake) -> None:
    of = fake()
    at = of.tray("tray-05").gpu[2]
    at.fabric_mask, at.recovery_action, at.clock_reasons, at.ecc_uncorrected, at.sram_threshold = (
        0x1A9,
        4,
        0x4 | 0x40,
        7,
        1,
    )
    at.remapped[:] = [1, 2, 1, 0]
    at.link_state[17], at.link_state[3] = 0, 3
    at.serial = b"1650000000001"
    reading = reading_of(of.env("tray-05"))
    assert reading.driver_branch == 580
    gpu = reading.gpus[2]
    assert gpu.serial == "1650000000001"
    assert gpu.fabric is not None
    assert (gpu.fabric.mask, gpu.fabric.summary, gpu.fabric.joined) == (
        0x1A9,
        1,
        of.topology.by_slot["tray-05/2"].clique,
    )
    assert (gpu.recovery_action, gpu.slowdown, gpu.ecc_uncorrected, gpu.sram_threshold) == (4, 0x40, 7, True)
    assert gpu.remapped is not None
    assert (gpu.remapped.correctable, gpu.remapped.uncorrectable, gpu.remapped.pending, gpu.remapped.failed) == (
        1,
        2,
        True,
        False,
    )
    assert gpu.links == (1, 1, 1, 3, *(1,) * 13, 0)
    assert gpu.platform is not None
    assert (gpu.platform.chassis, gpu.platform.tray, gpu.platform.module) == ("1825024170029", 5, 3)
    assert (gpu.unknown, gpu.refused, gpu.failing, gpu.verdict) == ((), (), (), "")


def test_binary_platform_fields_are_read_as_bytes(fake: MakeFake) -> None:
    """The binding decodes them as UTF-8, and cuts them at the first zero."""
    of = fake()
    platform = of.tray("tray-00").gpu[0].platform
    platform.guid[:] = [0xFF, 0x00, 0xC3, 0x28, 1, 2, 3, 4] + [0] * 8
    platform.tray, platform.slot, platform.chassis = 0xFE, 0x80, b"18250241700299\xff"
    found = reading_of(of.env("tray-00")).gpus[0].platform
    assert found is not None
    assert (found.guid, found.tray, found.slot, found.chassis) == (
        "ff00c32801020304",
        0xFE,
        0x80,
        "18250241700299\\xff",
    )


def test_the_layouts_are_those_of_the_header() -> None:
    fabric = parse_fabric(
        bytes.fromhex(
            "28000003" + "4f2c9a1e7d0b4a5e9c3f1b8e6d2a7c90" + "00000000fe7f000003ababab" + "aa010000" + "01cdcdcd"
        )
    )
    assert fabric.joined == CliqueId("4f2c9a1e-7d0b-4a5e-9c3f-1b8e6d2a7c90", 32766)
    assert (fabric.mask, fabric.summary) == (0x1AA, 1)
    older = parse_fabric(bytes.fromhex("24000002" + "00" * 16 + "00000000" + "00000000" + "03000000" + "aa010000"))
    assert (older.domain, older.joined, older.summary) == ("", None, None)
    platform = parse_platform(
        bytes.fromhex("2c000002" + "0102030405060708" + "00" * 8)
        + b"1825024170029\0\0\0"
        + bytes([22, 12, 1, 1, 3, 0, 0, 0])
    )
    assert (platform.chassis, platform.slot, platform.tray, platform.module) == ("1825024170029", 22, 12, 3)


@pytest.mark.parametrize(
    ("words", "text"),
    [([0xFFFFFFFFFFFFFFFF, 0xFF], "0-71"), ([1 << 63, 1], "63-64"), ([0b1011], "0-1,3"), ([0, 0], ""), ([], "")],
)
def test_a_mask_of_cores_is_written_as_ranges(words: list[int], text: str) -> None:
    assert as_ranges(words) == text


# -- what is made of failures
@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NOT_READY"])
def test_what_a_gpu_does_not_have_is_unknown(error: str, fake: MakeFake) -> None:
    of = fake()
    for call in CALLS:
        if call not in {"identity", "links"}:
            of.tray("tray-00").fail(1, call, error)
    gpu = reading_of(of.env("tray-00")).gpus[1]
    assert set(gpu.unknown) == {
        "fabric", "platform", "remapped", "slowdown", "recovery_action", "ecc_uncorrected", "sram_threshold", "numa", "cpus", "serial",
    }  # fmt: skip
    assert (gpu.fabric, gpu.platform, gpu.remapped, gpu.recovery_action, gpu.cpus, gpu.numa) == (None,) * 4 + ("", None)
    assert gpu.links == (1,) * 18, "an older call knows them as well"
    assert (gpu.refused, gpu.failing, gpu.verdict) == ((), (), "")


def test_a_lack_of_permission_is_said_and_other_failures_are_tried_twice(fake: MakeFake) -> None:
    of = fake()
    tray = of.tray("tray-00")
    tray.fail(0, "remapped", "NO_PERMISSION")
    tray.fail(1, "remapped", "UNKNOWN")
    tray.fail(2, "links", "NOT_SUPPORTED")
    tray.fail(3, "remapped", "UNKNOWN", once=True)
    found = discover("tray-00", env=of.env("tray-00"), timeout_s=DEADLINE_S)
    assert isinstance(found, PartialTopology)
    assert found.notes == ("GPU 0: no permission to read remapped",)
    tray.fail(3, "remapped", "UNKNOWN", once=True)
    gpus = reading_of(of.env("tray-00")).gpus
    assert gpus[0].refused == ("remapped",)
    assert gpus[1].failing == ("nvmlDeviceGetRemappedRows fails with code 999",)
    assert gpus[2].links == (1,) * 18
    assert gpus[3].remapped is not None
    assert gpus[3].failing == ()


def test_a_driver_that_knows_version_2_of_the_fabric_only_is_asked_for_that(fake: MakeFake) -> None:
    of = fake()
    of.tray("tray-00").fabric_version = 2
    fabric = reading_of(of.env("tray-00")).gpus[0].fabric
    assert fabric is not None
    assert fabric.joined == of.topology.by_slot["tray-00/0"].clique
    assert fabric.summary is None
    of.tray("tray-00").fabric_version = 1
    assert reading_of(of.env("tray-00")).gpus[0].fabric is None


def test_an_old_driver_lacks_functions_and_nothing_else(fake: MakeFake, tmp_path: Path) -> None:
    of = fake()
    old = build(tmp_path / "old", without=["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetPlatformInfo"])
    gpu = reading_of(of.env("tray-00", old)).gpus[0]
    assert set(gpu.unknown) == {"fabric", "platform", "serial"}
    assert gpu.links == (1,) * 18
    ancient = build(tmp_path / "ancient", without=["nvmlDeviceGetCount_v2"])
    answer = read_once(env=of.env("tray-00", ancient), timeout_s=DEADLINE_S)
    assert isinstance(answer, NvmlUnavailable)
    assert answer.why == "too_old"


def test_without_nvml_the_answer_says_why(fake: MakeFake, tmp_path: Path) -> None:
    of = fake()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libnvidia-ml.so.1").touch()  # found first, and no library: as if there were none
    of.tray("tray-01").init_result = 4
    of.tray("tray-02").init_result = 999
    whys = {}
    for name, env in {
        "missing": of.env("tray-00", broken),
        "no_driver": {**of.env("tray-00"), "FAKE_NVML_STATE": "/nowhere"},
        "no_permission": of.env("tray-01"),
        "failed": of.env("tray-02"),
    }.items():
        answer = discover("x", env=env, timeout_s=DEADLINE_S)
        assert isinstance(answer, NvmlUnavailable), answer
        assert answer.remedy
        whys[name] = answer.why
    assert all(name == why for name, why in whys.items()), whys


def test_a_gpu_that_is_lost_from_the_start_is_left_out_and_said(fake: MakeFake) -> None:
    of = fake()
    of.tray("tray-00").fail_all(1, "GPU_IS_LOST")
    of.tray("tray-00").fail_all(3, "RESET_REQUIRED")
    found = discover("tray-00", env=of.env("tray-00"), timeout_s=DEADLINE_S)
    assert isinstance(found, PartialTopology)
    assert [gpu.index for gpu in found.trays[0].gpus] == [0, 2]
    assert found.notes == ("GPU 1 is lost and left out", "GPU 3 is reset_required and left out")


# -- a driver that hangs, and one that takes its caller with it
def test_a_driver_that_hangs_is_given_up_in_time(fake: MakeFake) -> None:
    of = fake()
    of.tray("tray-00").hang = 1
    answer = discover("x", env=of.env("tray-00"), timeout_s=0.5)
    assert isinstance(answer, NvmlUnavailable)
    assert answer.why == "hanging"


def test_a_watch_ends_with_a_reason_when_the_driver_begins_to_hang(fake: MakeFake) -> None:
    of = fake()
    with NvmlWatch(period_ms=50, patience_ms=400, env=of.env("tray-00")) as watch:
        assert isinstance(watch.next(DEADLINE_S), TrayReading)
        of.tray("tray-00").hang = 1
        while isinstance(answer := watch.next(DEADLINE_S), TrayReading):
            pass
        assert isinstance(answer, NvmlUnavailable)
        assert answer.why == "hanging"
        assert watch.next(0) == answer


def test_a_watch_ends_with_a_reason_when_its_process_dies(fake: MakeFake) -> None:
    of = fake()
    with NvmlWatch(env=of.env("tray-00")) as watch:
        assert isinstance(watch.next(DEADLINE_S), TrayReading)
        os.kill(watch.pid, signal.SIGKILL)
        while isinstance(answer := watch.next(DEADLINE_S), TrayReading):
            pass
        assert isinstance(answer, NvmlUnavailable)
        assert answer.why == "crashed"
        assert "SIGKILL" in answer.what


def test_a_watch_that_is_looked_at_late_is_not_taken_for_one_that_hangs(fake: MakeFake) -> None:
    of = fake()
    with NvmlWatch(period_ms=50, patience_ms=0, env=of.env("tray-00")) as watch:
        readable = select.poll()
        readable.register(watch.fileno(), select.POLLIN)
        assert readable.poll(DEADLINE_S * 1000)
        assert isinstance(watch.next(0), TrayReading)
        assert readable.poll(DEADLINE_S * 1000), "the next one: its time is over by now"
        assert isinstance(watch.next(0), TrayReading), "what lies there counts, however late"


def test_a_watch_does_not_outlive_its_parent(fake: MakeFake) -> None:
    """Not even when something that the parent forked still holds its standard input open."""
    of = fake()
    script = (
        "import os, signal; from rackrun.topology.gpu_driver.nvml_watch import NvmlWatch; watch = NvmlWatch(period_ms=50);"
        "watch.next(20); holder = os.fork(); holder or signal.pause();"
        "print(watch.pid, holder, flush=True); input(); os._exit(0)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **of.env("tray-00")}, text=True,
    )  # fmt: skip
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid, holder = map(int, parent.stdout.readline().split())
    child = os.pidfd_open(pid)
    try:
        parent.stdin.write("\n")
        parent.stdin.flush()
        parent.wait(DEADLINE_S)
        poll = select.poll()
        poll.register(child, select.POLLIN)
        assert poll.poll(DEADLINE_S * 1000), "it still runs"
    finally:
        os.kill(holder, signal.SIGKILL)
        os.close(child)
        parent.stdin.close()
        parent.stdout.close()


# -- watching
def test_xids_are_told_with_the_recovery_action_and_readings_follow(fake: MakeFake) -> None:
    of = fake()
    tray = of.tray("tray-07")
    tray.xid(1, 13)  # before anybody listened
    with NvmlWatch(period_ms=100, env=of.env("tray-07")) as watch:
        assert isinstance(watch.next(DEADLINE_S), TrayReading)
        tray.gpu[2].recovery_action = 2
        tray.xid(2, 79)
        tray.xid(0, 31)
        told: list[XidEvent] = []
        while len(told) < 2:
            message = watch.next(DEADLINE_S)
            assert message is not None
            told += [message] if isinstance(message, XidEvent) else []
        uuids = [gpu.uuid for gpu in of.topology.trays["tray-07"][1].gpus]
        assert [(event.xid, event.index, event.uuid, event.live) for event in told] == [
            (79, 2, uuids[2], 2),
            (31, 0, uuids[0], 0),
        ]
        reading = watch.next(DEADLINE_S)
        assert isinstance(reading, TrayReading)
        assert reading.gpus[2].recovery_action == 2


def test_a_gpu_that_is_lost_while_it_is_watched_keeps_its_name(fake: MakeFake) -> None:
    of = fake()
    with NvmlWatch(period_ms=50, env=of.env("tray-00")) as watch:
        assert isinstance(watch.next(DEADLINE_S), TrayReading)
        of.tray("tray-00").fail_all(1, "GPU_IS_LOST")
        while isinstance(reading := watch.next(DEADLINE_S), TrayReading) and not reading.gpus[1].verdict:
            pass
        assert isinstance(reading, TrayReading)
        gpu = reading.gpus[1]
        assert (gpu.verdict, gpu.uuid) == ("lost", of.topology.trays["tray-00"][1].gpus[1].uuid)


def test_one_lost_gpu_does_not_make_the_others_deaf(fake: MakeFake) -> None:
    of = fake()
    with NvmlWatch(period_ms=50, env=of.env("tray-00")) as watch:
        assert isinstance(watch.next(DEADLINE_S), TrayReading)
        of.tray("tray-00").fail_all(1, "GPU_IS_LOST")
        seen = 0
        while seen < 3:  # by then it listens to the others only
            reading = watch.next(DEADLINE_S)
            assert isinstance(reading, TrayReading)
            seen += bool(reading.gpus[1].verdict)
        of.tray("tray-00").xid(3, 31)
        while isinstance(event := watch.next(DEADLINE_S), TrayReading):
            assert event.events
        assert isinstance(event, XidEvent)
        assert (event.xid, event.index) == (31, 3)
        of.tray("tray-00").fail_all(1, None)
        while not isinstance(reading := watch.next(DEADLINE_S), TrayReading) or reading.gpus[1].verdict:
            pass
        of.tray("tray-00").xid(1, 13)
        while isinstance(event := watch.next(DEADLINE_S), TrayReading):
            pass
        assert isinstance(event, XidEvent), "one that came back is listened to again"
        assert (event.xid, event.index) == (13, 1)


def test_without_events_the_readings_still_come(fake: MakeFake) -> None:
    of = fake()
    for index in range(4):
        of.tray("tray-00").fail(index, "events", "NOT_SUPPORTED")
    with NvmlWatch(period_ms=50, env=of.env("tray-00")) as watch:
        for _ in range(3):
            reading = watch.next(DEADLINE_S)
            assert isinstance(reading, TrayReading)
            assert not reading.events


def test_each_tray_of_a_rack_sees_its_own_gpus(fake: MakeFake) -> None:
    of = fake()
    of.tray("tray-01").gpu[0].recovery_action = 1
    one, other = (reading_of(of.env(name)) for name in ("tray-01", "tray-02"))
    assert [gpu.recovery_action for gpu in one.gpus] == [1, 0, 0, 0]
    assert [gpu.recovery_action for gpu in other.gpus] == [0, 0, 0, 0]
    assert not {gpu.uuid for gpu in one.gpus} & {gpu.uuid for gpu in other.gpus}
