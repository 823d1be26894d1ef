"""What a reading says against a GPU in use, and against one that is to be used."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rackrun.protocol.gpu_health import SEVERITY, Health, Response, response_to
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, RemappedRows, fabric_faults, normal_bdf
from rackrun.topology.health.findings import against, preflight
from rackrun.topology.model.racks import CliqueId
from tests.topology.readings import CLIQUE, FABRIC, ROWS, down, gpu, tray

AGAINST: list[tuple[dict[str, Any], Health, str]] = [
    ({"verdict": "lost"}, Health.LOST, "lost"),
    ({"verdict": "reset_required"}, Health.RESET, "requires a reset"),
    ({"failing": ("nvmlDeviceGetUUID fails with code 999",)}, Health.DEGRADED, "twice in a row"),
    ({"recovery_action": 1}, Health.RESET, "recovery action 1"),
    ({"recovery_action": 2}, Health.REBOOT, "recovery action 2"),
    ({"recovery_action": 3}, Health.DRAIN_P2P, "recovery action 3"),
    ({"recovery_action": 4}, Health.DEGRADED, "recovery action 4"),
    ({"recovery_action": 5}, Health.FABRIC, "recovery action 5"),
    ({"recovery_action": 6}, Health.UNKNOWN, "recovery action 6"),
    ({"remapped": replace(ROWS, pending=True)}, Health.DEGRADED, "waits for a reset"),
    ({"remapped": replace(ROWS, failed=True)}, Health.DEGRADED, "none is left"),
    ({"sram_threshold": True}, Health.DEGRADED, "SRAM"),
    ({"links": down(7)}, Health.DEGRADED, "NVLink 7 down"),
    ({"links": down(0, 17)}, Health.DEGRADED, "NVLinks 0, 17 down"),
    ({"links": (3, *down()[1:])}, Health.DEGRADED, "NVLink 0 down"),
    ({"fabric": replace(FABRIC, mask=0x1A9)}, Health.DEGRADED, "degraded bandwidth"),
    ({"fabric": replace(FABRIC, mask=0x19A)}, Health.DEGRADED, "route unhealthy"),
    ({"fabric": replace(FABRIC, mask=0x5AA)}, Health.DEGRADED, "too few NVLinks"),
    ({"fabric": replace(FABRIC, mask=0x21AA)}, Health.DEGRADED, "no partition"),
    ({"fabric": replace(FABRIC, summary=2)}, Health.DEGRADED, "unhealthy"),
    ({"fabric": replace(FABRIC, summary=3)}, Health.DEGRADED, "limited capacity"),
    ({"fabric": replace(FABRIC, state=2)}, Health.FABRIC, "fell back to in progress"),
    ({"fabric": replace(FABRIC, clique=1)}, Health.FABRIC, "moved from clique"),
]


@pytest.mark.parametrize(("changed", "health", "what"), AGAINST, ids=[what for _, _, what in AGAINST])
def test_each_fact_has_its_class(changed: dict[str, Any], health: Health, what: str) -> None:
    (finding,) = against(gpu(**changed), gpu())
    assert finding.health is health
    assert what in finding.what


def test_a_healthy_gpu_has_nothing_against_it() -> None:
    assert against(gpu(), gpu()) == ()
    assert against(gpu(links=(1, 2, *(1,) * 16)), gpu()) == (), "a link that sleeps wakes up by itself"
    assert against(gpu(remapped=RemappedRows(correctable=2, uncorrectable=1, pending=False, failed=False))) == ()


def test_what_is_unknown_is_never_unhealthy() -> None:
    bare = gpu(fabric=None, links=None, remapped=None, recovery_action=None, sram_threshold=None, slowdown=None)
    assert against(bare, gpu()) == ()
    assert preflight(tray(bare), [0]) == ()


def test_a_registration_that_failed_joins_nothing() -> None:
    assert FABRIC.joined == CLIQUE
    for failed in (replace(FABRIC, status=999), replace(FABRIC, state=2), replace(FABRIC, domain="")):
        assert failed.joined is None


def test_links_without_a_fabric_count_only_when_they_were_up() -> None:
    card = gpu(fabric=None, links=(0, 0, 1, 1))
    assert against(card, card) == ()
    assert "NVLink 3" in against(gpu(fabric=None, links=(0, 0, 1, 0)), card)[0].what


def test_the_fabric_manager_may_be_gone_while_traffic_flows() -> None:
    alone = gpu(fabric=replace(FABRIC, mask=0x81AA))
    assert fabric_faults(0x81AA) == (("fabric manager disconnected", False),)
    assert against(alone, gpu()) == ()
    assert preflight(tray(alone), [0]) == ("GPU 0: fabric: fabric manager disconnected",)


@pytest.mark.parametrize(("mask", "what"), [(0x1A6, "route recovery"), (0x16A, "access timeout recovery")])
def test_what_passes_is_told_apart(mask: int, what: str) -> None:
    ((found, passing),) = fabric_faults(mask)
    assert what in found
    assert passing


def test_the_published_healthy_mask_has_no_fault() -> None:
    assert fabric_faults(0x1AA) == ()
    assert fabric_faults(0) == ()


# -- preflight
SPARE: list[tuple[dict[str, Any], str]] = [
    *((changed, what) for changed, health, what in AGAINST if health is not Health.FABRIC),
    ({"recovery_action": 5}, "recovery action 5"),
    ({"fabric": replace(FABRIC, state=2)}, "in progress, not completed"),
    ({"fabric": replace(FABRIC, state=1)}, "not started, not completed"),
    ({"fabric": replace(FABRIC, status=999)}, "ended with code 999"),
    ({"fabric": replace(FABRIC, clique=1)}, "not in"),
    ({"fabric": replace(FABRIC, domain="", clique=0)}, "in no NVLink domain"),
    ({"fabric": replace(FABRIC, state=0, domain="", mask=0)}, "in no fabric"),
    ({"fabric": None}, "in no fabric"),
    ({"links": (1,) * 17}, "17 NVLinks are up, not 18"),
    ({"fabric": replace(FABRIC, mask=0x1A6)}, "route recovery"),
]


@pytest.mark.parametrize(("changed", "what"), SPARE, ids=[what for _, what in SPARE])
def test_a_spare_with_anything_against_it_may_not_be_used(changed: dict[str, Any], what: str) -> None:
    reasons = preflight(tray(gpu(2, **changed)), [0, 1, 2, 3], clique=CLIQUE, links=18)
    assert len(reasons) == 1, reasons
    assert what in reasons[0]
    assert reasons[0].startswith("GPU 2: ")
    assert preflight(tray(gpu(2, **changed)), [0, 1, 3], clique=CLIQUE, links=18) == (), (
        "the others are none of its business"
    )


def test_a_healthy_spare_may_be_used() -> None:
    assert preflight(tray(), range(4), clique=CLIQUE, links=18) == ()


def test_within_one_host_nobody_asks_for_the_fabric_of_several() -> None:
    alone = gpu(fabric=replace(FABRIC, state=1, domain="", clique=0, mask=0, summary=0))
    assert preflight(tray(alone), [0], clique=CliqueId("host:a", 0)) == ()
    assert preflight(tray(alone), [0]) == ("GPU 0: its fabric registration is not started, not completed",)


def test_a_spare_that_cannot_be_read_may_not_be_used() -> None:
    hung = NvmlUnavailable(why="hanging", what="NVML does not answer.", remedy="reboot.")
    assert preflight(hung, [0]) == ("nothing can be read of this tray: NVML does not answer.",)
    assert preflight(tray(), [7]) == ("GPU 7: the driver does not list it",)


# -- small things
def test_every_class_has_a_response_and_worse_ones_ask_for_more() -> None:
    order = [Response.LEAVE, Response.RESTART, Response.SWAP, Response.FENCE]
    asked = [order.index(response_to(health)[0]) for health in sorted(Health, key=SEVERITY.__getitem__)]
    assert asked == sorted(asked)


@pytest.mark.parametrize(
    "text", ["PCI:0008:9b:00", "0008:9B:00", "00000008:9b:00.0", "8:9b:0.0", " 0008:9b:00.0 "]
)  # fmt: skip
def test_a_pci_address_has_one_form(text: str) -> None:
    assert normal_bdf(text) == "00000008:9b:00.0"


@pytest.mark.parametrize("text", ["", "GPU-1", "0008:9b", "0008:9b:00.9", "123456789:00:00.0", "0008:9b:00\n1"])
def test_what_is_no_pci_address_has_none(text: str) -> None:
    assert not normal_bdf(text)
