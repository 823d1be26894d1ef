"""A GPU gets worse at once and better slowly; what is said of one is never said of another."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from rackrun.protocol.gpu_health import SEVERITY, GpuVerdict, Health, Response
from rackrun.topology.gpu_driver.kernel_messages import KernelXid, parse_kernel_line
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, TrayReading, XidEvent
from rackrun.topology.health.tray_health import GpuRepaired, HealthPolicy, TrayHealth
from tests.topology.readings import FABRIC, ROWS, down, gpu, tray

MINUTE, HOUR = 60_000, 3_600_000
BLIND = NvmlUnavailable(why="hanging", what="NVML does not answer.", remedy="reboot.")


def machine(**policy: int) -> TrayHealth:
    """Of a tray that was read once and is well."""
    health = TrayHealth(HealthPolicy(**policy))
    assert health.handle(0, tray()) == []
    return health


def one(verdicts: list[GpuVerdict]) -> GpuVerdict:
    (verdict,) = verdicts
    return verdict


def line(text: str) -> KernelXid:
    found = parse_kernel_line(f"NVRM: Xid (PCI:0009:01:00): {text}")
    assert found is not None
    return found


# -- errors
def test_an_xid_79_fences_its_gpu_at_once() -> None:
    verdict = one(machine().handle(5, XidEvent(xid=79, index=2, uuid="GPU-2")))
    assert (verdict.index, verdict.uuid, verdict.health, verdict.response) == (2, "GPU-2", Health.LOST, Response.FENCE)
    assert "FALLEN_OFF_THE_BUS" in str(verdict)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=GpuVerdict) == verdict, "it goes over the wire"


def test_a_fatal_149_of_the_kernel_log_fences_its_gpu_and_speaks_of_the_fabric() -> None:
    said = line("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0)")
    verdict = one(machine().handle(5, said))
    assert (verdict.index, verdict.health, verdict.response, verdict.fabric) == (1, Health.RESET, Response.FENCE, True)
    assert "link 8" in str(verdict)
    assert "kernel log" in str(verdict)


def test_the_recovery_action_read_with_the_xid_decides() -> None:
    verdict = one(machine().handle(5, XidEvent(xid=95, index=0, live=4)))
    assert (verdict.health, verdict.response) == (Health.DEGRADED, Response.SWAP)


def test_an_announced_recovery_action_counts_until_the_driver_is_asked() -> None:
    health = machine()
    verdict = one(
        health.handle(5, line("154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"))
    )
    assert (verdict.health, verdict.scope) == (Health.REBOOT, "tray")
    calm = machine()
    assert calm.handle(5, line("154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)")) == []


def test_an_announcement_is_about_what_comes_with_it() -> None:
    health = machine()
    drain = line("154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")
    assert one(health.handle(5, drain)).health is Health.DEGRADED
    assert health.handle(6, line("95, Uncontained ECC error")) == [], "drain and reset is what it wants for it"
    assert health.handle(7, tray()) == [], "a reading: from here on it is known better"
    assert one(health.handle(8, line("95, Uncontained ECC error"))).health is Health.RESET
    earlier = machine()
    earlier.handle(5, line("154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)"))
    assert one(earlier.handle(6, line("95, Uncontained ECC error"))).health is Health.RESET, (
        "that was about another error"
    )


@pytest.mark.parametrize("xid", [43, 45, 63, 92])
def test_what_the_catalogue_ignores_changes_nothing(xid: int) -> None:
    assert machine().handle(5, XidEvent(xid=xid, index=0)) == []


def test_a_failed_process_is_started_again_on_its_gpu_and_the_third_in_an_hour_takes_its_tray() -> None:
    health = machine()
    for at in (10, 20 * MINUTE):
        verdict = one(health.handle(at, XidEvent(xid=31, index=3)))
        assert (verdict.health, verdict.response) == (Health.APP, Response.RESTART)
        assert health.health(3) is Health.OK
    verdict = one(health.handle(40 * MINUTE, XidEvent(xid=13, index=3)))
    assert (verdict.health, verdict.response, verdict.scope) == (Health.DEGRADED, Response.SWAP, "tray")
    assert "3 processes failed on it within 60 minutes" in str(verdict)


def test_failed_processes_are_counted_per_gpu_and_within_an_hour() -> None:
    health = machine()
    for number, index in enumerate([0, 1, 2, 3, 0, 1, 2, 3]):
        assert one(health.handle((1 + number) * MINUTE, XidEvent(xid=31, index=index))).health is Health.APP
    late = machine()
    for number in range(6):
        assert one(late.handle(number * 31 * MINUTE, XidEvent(xid=31, index=0))).response is Response.RESTART


def test_both_sources_of_one_failure_count_once() -> None:
    health = machine()
    assert len(health.handle(10, XidEvent(xid=31, index=1))) == 1
    assert health.handle(12, line("31, pid=1, MMU Fault")) == []
    assert health.handle(13, line("31, pid=1, MMU Fault")) == []


def test_an_error_of_a_device_that_is_not_here_is_kept_aside() -> None:
    health = machine()
    stray = XidEvent(xid=79, uuid="GPU-of-another-tray", bdf="0000ffff:01:00.0")
    assert health.handle(5, stray) == []
    assert health.strays == [stray]
    assert TrayHealth().handle(5, XidEvent(xid=79, index=0)) == [], "nothing was read yet"


def test_what_an_xid_said_stays_until_the_gpu_is_repaired() -> None:
    health = machine()
    health.handle(5, XidEvent(xid=119, index=1))
    for at in range(10, 2 * HOUR, MINUTE):
        assert health.handle(at, tray()) == []
    assert health.health(1) is Health.RESET
    verdict = one(health.handle(3 * HOUR, GpuRepaired(index=1)))
    assert (verdict.health, verdict.response) == (Health.OK, Response.LEAVE)
    assert health.handle(3 * HOUR + 1, GpuRepaired(index=1)) == [], "it is well already"


# -- readings
def test_a_pending_row_asks_for_a_swap_before_the_gpu_dies() -> None:
    verdict = one(machine().handle(5, tray(gpu(1, remapped=replace(ROWS, pending=True)))))
    assert (verdict.index, verdict.health, verdict.response) == (1, Health.DEGRADED, Response.SWAP)


@pytest.mark.parametrize(
    ("action", "health", "response", "scope"),
    [
        (1, Health.RESET, Response.FENCE, "gpu"), (2, Health.REBOOT, Response.FENCE, "tray"),
        (3, Health.DRAIN_P2P, Response.FENCE, "peers"), (4, Health.DEGRADED, Response.SWAP, "gpu"),
        (5, Health.FABRIC, Response.FENCE, "tray"), (6, Health.UNKNOWN, Response.SWAP, "tray"),
        (7, Health.UNKNOWN, Response.SWAP, "tray"),
    ],
)  # fmt: skip
def test_each_recovery_action_has_its_response(action: int, health: Health, response: Response, scope: str) -> None:
    verdict = one(machine().handle(5, tray(gpu(0, recovery_action=action))))
    assert (verdict.health, verdict.response, verdict.scope) == (health, response, scope)


def test_the_same_news_is_told_once_and_worse_news_at_once() -> None:
    health = machine()
    worn = gpu(1, remapped=replace(ROWS, pending=True))
    assert len(health.handle(5, tray(worn))) == 1
    assert health.handle(6, tray(worn)) == []
    verdict = one(health.handle(7, tray(replace(worn, recovery_action=1))))
    assert verdict.health is Health.RESET
    assert len(verdict.evidence) == 2, "what was known before is said as well"


def test_a_gpu_is_better_only_after_a_calm_time() -> None:
    health = machine(calm_ms=1000)
    health.handle(5, tray(gpu(1, links=down(3))))
    assert health.handle(10, tray()) == []
    assert health.handle(1009, tray()) == []
    assert health.health(1) is Health.DEGRADED
    assert one(health.handle(1010, tray())).health is Health.OK


def test_time_in_which_nobody_looked_was_not_calm() -> None:
    health = machine(calm_ms=1000)
    health.handle(5, tray(gpu(1, links=down(3))))
    health.handle(10, tray())
    assert health.handle(20, BLIND) == []
    assert health.blind == BLIND
    assert health.handle(5000, tray()) == []
    assert health.blind is None
    assert one(health.handle(6000, tray())).health is Health.OK


def test_what_flaps_stays_bad() -> None:
    health = machine(calm_ms=1000, flaps_max=3)
    at, told = 0, []
    for _ in range(10):
        for reading in (tray(gpu(1, links=down(3))), tray(), tray()):
            at += 1000
            told += health.handle(at, reading)
    assert [verdict.health for verdict in told] == [Health.DEGRADED, Health.OK] * 3 + [Health.DEGRADED]
    assert health.health(1) is Health.DEGRADED


def test_what_passes_by_itself_counts_when_it_lasts() -> None:
    recovering = tray(gpu(2, fabric=replace(FABRIC, mask=0x1A6)))
    health = machine(passing_ms=1000)
    assert health.handle(10, recovering) == []
    assert health.handle(900, tray()) == []
    assert health.handle(1000, recovering) == [], "it began anew"
    verdict = one(health.handle(2000, recovering))
    assert (verdict.health, verdict.fabric) == (Health.DEGRADED, True)


def test_a_fabric_that_falls_back_is_told_even_if_it_was_late_to_complete() -> None:
    health = TrayHealth()
    late = gpu(0, fabric=replace(FABRIC, state=2), links=down(4))
    assert health.handle(0, tray(late)) == [], "it has lost nothing: preflight is what keeps it out"
    assert health.handle(5, tray(late)) == []
    assert health.handle(10, tray()) == []
    verdict = one(health.handle(20, tray(late)))
    assert (verdict.health, verdict.response) == (Health.FABRIC, Response.FENCE)


def test_a_gpu_that_is_no_longer_listed_is_lost() -> None:
    health = machine()
    whole = tray()
    verdict = one(health.handle(5, TrayReading(driver=whole.driver, gpus=whole.gpus[:3])))
    assert (verdict.index, verdict.health) == (3, Health.LOST)


def test_a_gpu_that_comes_back_with_another_uuid_begins_anew() -> None:
    health = machine()
    health.handle(5, XidEvent(xid=79, index=2))
    verdict = one(health.handle(HOUR, tray(gpu(2, uuid="GPU-new"))))
    assert (verdict.uuid, verdict.health) == ("GPU-new", Health.OK)
    assert health.handle(HOUR + 5, XidEvent(xid=79, uuid="GPU-2")) == [], "the old one is not here any more"


def test_a_lost_gpu_is_still_known_by_its_name() -> None:
    verdict = one(machine().handle(5, tray(gpu(1, uuid="", bdf="", verdict="lost", fabric=None, links=None))))
    assert (verdict.uuid, verdict.health) == ("GPU-1", Health.LOST)


# -- properties
def test_over_random_histories() -> None:
    """Worse is told at once, nothing is told twice, only the GPU that is spoken of changes, and the same history gives
    the same verdicts."""
    for seed in range(40):
        live_through_a_random_history(seed)


def live_through_a_random_history(seed: int) -> None:
    order = random.Random(seed)
    history: list[tuple[int, TrayReading | XidEvent | GpuRepaired | NvmlUnavailable]] = [(0, tray())]
    for _ in range(80):
        at = history[-1][0] + order.choice([1, 100, 5_000, 90_000])
        changed = gpu(
            order.randrange(4),
            links=order.choice([down(), down(5)]),
            recovery_action=order.choice([0, 0, 0, 1, 2, 4]),
            remapped=replace(ROWS, pending=order.random() < 0.2),
        )
        said: Any = order.choice(
            [tray(), tray(changed), XidEvent(xid=order.choice([13, 45, 63, 79, 95, 149]), index=order.randrange(4)),
             GpuRepaired(index=order.randrange(4)), BLIND]
        )  # fmt: skip
        history.append((at, said))
    health, again = TrayHealth(), TrayHealth()
    shown = dict.fromkeys(range(4), Health.OK)
    for at, said in history:
        verdicts = health.handle(at, said)
        assert verdicts == again.handle(at, said)
        for verdict in verdicts:
            if verdict.health is Health.APP:
                assert shown[verdict.index] is Health.OK
                continue
            assert verdict.health is not shown[verdict.index] or verdict.scope == "tray"
            shown[verdict.index] = verdict.health
            assert verdict.evidence or verdict.health is Health.OK
        if isinstance(said, XidEvent | GpuRepaired):
            assert {verdict.index for verdict in verdicts} <= {said.index}
        assert shown == {index: health.health(index) for index in range(4)}, "nothing changes without being told"
        if isinstance(said, TrayReading):
            for one_gpu in said.gpus:
                if one_gpu.recovery_action == 1:
                    assert SEVERITY[health.health(one_gpu.index)] >= SEVERITY[Health.RESET]
