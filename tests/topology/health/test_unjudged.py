"""What of a tray's GPUs is not judged: by RACKRUN_HEALTH, or because it has no peer to use it with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rackrun.agent.gpus.gpu_verdicts import GpuVerdicts
from rackrun.errors import UsageError
from rackrun.protocol.events import DeviceJudged
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import TrayId
from rackrun.topology.gpu_driver.readings import Fabric, Platform, RemappedRows, TrayReading, XidEvent
from rackrun.topology.health.ignored_checks import Part, ignored_by, is_lone, without
from rackrun.topology.model.racks import CliqueId
from tests.topology.readings import CLIQUE, gpu, tray

TRAY = TrayId("tray-00")
HOSTS_FABRIC = Fabric(state=3)
"""Registered, in no domain of several hosts: an HGX board."""
ALL_DOWN = (0,) * 18
GUEST = replace(gpu(0, fabric=HOSTS_FABRIC, links=ALL_DOWN))
"""One GPU of a board of eight, given to a guest: its NVLinks lead to what the guest has not."""


def alone(one: object = GUEST) -> TrayReading:
    return TrayReading(driver="580.65.06", gpus=(one,))  # type: ignore[arg-type]


def judge(
    reading: TrayReading, *, slots: int = 1, ignored: tuple[Part, ...] = (), named: CliqueId | None = None
) -> tuple[GpuVerdicts, list[Health]]:
    found = GpuVerdicts(TRAY, slots, {0: named} if named else None, ignored)
    found.begin([one.index for one in reading.gpus][:slots])
    events = found.handle(0, reading)
    return found, [event.verdict.health for event in events if isinstance(event, DeviceJudged)]


# -- a GPU without a peer
def test_the_only_gpu_of_a_guest_is_fit_though_its_links_lead_nowhere() -> None:
    found, verdicts = judge(alone())
    assert (verdicts, found.unfit) == ([], {0: ()})
    assert found.unjudged == "fabric, links (its only GPU has no NVLink peer)"


def test_the_same_links_are_judged_where_a_second_gpu_is_in_use() -> None:
    pair = TrayReading(driver="580.65.06", gpus=(GUEST, gpu(1, fabric=HOSTS_FABRIC)))
    found, verdicts = judge(pair, slots=2)
    assert verdicts == [Health.DEGRADED]
    assert found.unfit[0][0].startswith("GPU 0: NVLinks 0, 1, 2")
    assert found.unjudged == ""


def test_one_worker_on_a_host_of_several_gpus_has_no_peer_either() -> None:
    found, verdicts = judge(TrayReading(driver="580.65.06", gpus=(GUEST, gpu(1, fabric=HOSTS_FABRIC))))
    assert (verdicts, found.unfit) == ([], {0: ()})


def test_a_gpu_in_a_domain_of_several_hosts_has_peers_elsewhere() -> None:
    found, _ = judge(alone(gpu(0, links=ALL_DOWN)))
    assert found.unfit[0]
    placed = Platform(chassis="1825024170029", slot=1, tray=0, host=1, module=1)
    late = gpu(0, fabric=Fabric(state=2), platform=placed)
    assert judge(alone(late))[0].unfit[0] == ("GPU 0: its fabric registration is in progress, not completed",)
    assert judge(alone(), named=CLIQUE)[0].unfit[0], "the rack file names its clique"


def test_all_else_is_judged_of_it_as_ever() -> None:
    failed = RemappedRows(correctable=0, uncorrectable=1, pending=False, failed=True)
    found, verdicts = judge(alone(replace(GUEST, remapped=failed)))
    assert verdicts == [Health.DEGRADED]
    assert "a memory row failed" in found.unfit[0][0]
    (event,) = judge(alone())[0].handle(5, XidEvent(xid=79, index=0))
    assert isinstance(event, DeviceJudged)
    assert event.verdict.health is Health.LOST


def test_a_link_that_goes_down_later_says_nothing_either() -> None:
    found, _ = judge(alone(replace(GUEST, links=(1,) * 18)))
    assert found.handle(5, alone()) == []


def test_who_is_lone_is_asked_of_those_with_a_slot() -> None:
    assert is_lone(alone(), (0,))
    assert not is_lone(alone(), ())
    assert not is_lone(alone(), (3,)), "one that the driver does not list"
    assert not is_lone(tray(), (0, 1))
    assert not is_lone(alone(gpu(0)), (0,)), "its fabric is of several hosts"


# -- as the user says
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()), ("  ", ()), ("ignore:links", ("links",)), ("ignore:fabric", ("fabric",)),
        ("ignore:links,fabric", ("fabric", "links")), (" ignore: fabric , links ", ("fabric", "links")),
    ],
)  # fmt: skip
def test_the_variable_names_what_is_ignored(text: str, parts: tuple[str, ...]) -> None:
    assert ignored_by({"RACKRUN_HEALTH": text}) == parts


def test_nothing_is_ignored_where_it_is_not_set() -> None:
    assert ignored_by({}) == ()


@pytest.mark.parametrize(
    "text", ["1", "off", "links", "ignore", "ignore:", "ignore:all", "ignore:links,", "IGNORE:links", "judge:links"]
)
def test_what_is_not_understood_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(UsageError, match=r"RACKRUN_HEALTH=.* is not understood.*ignore:fabric,links"):
        ignored_by({"RACKRUN_HEALTH": text})


def test_ignored_links_keep_nobody_out_and_a_fabric_is_judged_still() -> None:
    whole = tray(gpu(1, links=ALL_DOWN), gpu(2, fabric=Fabric(state=2)))
    found, verdicts = judge(whole, slots=4, ignored=("links",))
    assert verdicts == []
    assert [slot for slot, why in found.unfit.items() if why] == [2]
    assert found.unjudged == "links (RACKRUN_HEALTH)"


def test_an_ignored_fabric_keeps_nobody_out_of_a_clique_that_all_others_have_joined() -> None:
    found, verdicts = judge(tray(gpu(2, fabric=Fabric(state=0))), slots=4, ignored=("fabric",))
    assert (verdicts, [why for why in found.unfit.values() if why]) == ([], [])
    assert found.handle(5, tray(gpu(1, fabric=Fabric(state=2)))) == []


def test_of_what_is_ignored_nothing_is_left_in_a_reading() -> None:
    assert without(tray(), ()) == tray()
    bare = without(tray(), ("fabric", "links"))
    assert {(one.fabric, one.links) for one in bare.gpus} == {(None, None)}
    assert [replace(one, fabric=gpu(0).fabric, links=gpu(0).links) for one in bare.gpus] == list(tray().gpus)
