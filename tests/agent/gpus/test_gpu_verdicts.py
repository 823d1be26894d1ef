"""Which GPU is whose, and what the coordinator is told of it. Pure."""

from __future__ import annotations

import msgspec
import pytest

from rackrun.agent.gpus.gpu_verdicts import GpuVerdicts, cliques_of
from rackrun.agent.gpus.tray_description import by_driver, is_of, named_cliques, reconciled
from rackrun.agent.gpus.visible_gpus import visible_gpus
from rackrun.protocol.events import DeviceChecked, DeviceJudged
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import TrayId
from rackrun.topology.gpu_driver.kernel_messages import KernelXid
from rackrun.topology.gpu_driver.readings import Fabric, NvmlUnavailable, Platform, TrayReading, XidEvent
from rackrun.topology.model.errors import SourcesDisagree
from rackrun.topology.model.racks import CliqueId, Topology
from rackrun.topology.sources.partial_topology import merge, partial_of_tray
from tests.topology.conftest import EXAMPLES
from tests.topology.readings import CLIQUE, FABRIC, down, gpu, tray

TRAY = TrayId("tray-00")
BLIND = NvmlUnavailable(why="hanging", what="NVML does not answer.", remedy="wait.")
PLACE = Platform(chassis="1825024170029", slot=1, tray=0, host=1, module=1)
REGISTERING = Fabric(state=2)


def judge(reading: TrayReading | None = None, gpus: tuple[int, ...] = (0, 1, 2, 3), slots: int = 4) -> GpuVerdicts:
    """One that has begun, with this reading."""
    found = GpuVerdicts(TRAY, slots)
    found.begin(gpus)
    if reading is not None:
        found.handle(0, reading)
    return found


# -- which GPU is whose
@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, (0, 1, 2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, (3, 1)),
        ({"CUDA_VISIBLE_DEVICES": " 2 , 0 "}, (2, 0)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0"}, (2, 0)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, (0,)),
        ({"CUDA_VISIBLE_DEVICES": "0,7"}, (0,)),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5c9c8a8e"}, ()),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, (0, 1, 2, 3)),
    ],
)
def test_a_slot_is_the_gpu_that_its_worker_sees(environment: dict[str, str], gpus: tuple[int, ...]) -> None:
    assert visible_gpus(tray(), environment, 4).gpus == gpus


def test_there_are_no_more_slots_than_workers() -> None:
    assert visible_gpus(tray(), {}, 2).gpus == (0, 1)


def test_where_nobody_can_say_which_gpu_is_whose_nobody_is_blamed() -> None:
    mixed = tray(gpu(0, name="H100"), gpu(1, name="A100"))
    assert visible_gpus(mixed, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, 4).gpus == ()
    assert visible_gpus(mixed, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "GPU-1"}, 4).gpus == (1,)
    for environment in ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, {"CUDA_VISIBLE_DEVICES": "1,1"}):
        assert visible_gpus(tray(), environment, 4).note


# -- what is told
def test_a_healthy_tray_says_nothing() -> None:
    assert judge().handle(0, tray()) == []


def test_a_verdict_names_the_slot_and_not_the_drivers_index() -> None:
    events = judge(tray(), gpus=(3, 1)).handle(5, XidEvent(xid=79, index=3))
    assert [(event.tray, event.verdict.index, event.verdict.health) for event in events] == [(TRAY, 0, Health.LOST)]  # type: ignore[union-attr]


def test_a_gpu_without_a_slot_is_nobodys_business() -> None:
    found = judge(tray(), gpus=(3, 1))
    assert found.handle(5, XidEvent(xid=79, index=0)) == []
    assert found.handle(9, tray(gpu(2, recovery_action=2))) == []


def test_a_slot_is_checked_when_the_answer_changes_and_only_then() -> None:
    found = judge(tray())
    one_down = tray(gpu(2, links=down(11)))
    judged, checked = found.handle(5, one_down)
    assert isinstance(judged, DeviceJudged)
    assert judged.verdict.health is Health.DEGRADED
    assert checked == DeviceChecked(tray=TRAY, index=2, unfit=("GPU 2: NVLink 11 down",))
    assert found.handle(10, one_down) == []
    assert found.handle(15, tray()) == [DeviceChecked(tray=TRAY, index=2, unfit=())]  # the verdict waits for calm


def test_the_kernels_log_is_heard_by_the_address_on_the_bus() -> None:
    (event,) = judge(tray()).handle(5, KernelXid(xid=79, bdf="00000009:01:00.0", text=""))
    assert isinstance(event, DeviceJudged)
    assert (event.verdict.index, event.verdict.evidence[0].source) == (1, "kernel log")


def test_silence_is_against_every_slot_that_has_a_gpu() -> None:
    found = judge(tray(), gpus=(0, 1), slots=4)
    assert [event.index for event in found.handle(5, BLIND)] == [0, 1]  # type: ignore[union-attr]
    assert found.unfit[0] == ("nothing can be read of this tray: NVML does not answer.",)
    assert [event.unfit for event in found.handle(9, tray())] == [(), ()]  # type: ignore[union-attr]


def test_silence_before_the_first_reading_is_against_all_until_the_gpus_are_known() -> None:
    found = GpuVerdicts(TRAY, 3)
    assert len(found.handle(0, BLIND)) == 3
    found.begin((0,))
    assert {event.index for event in found.handle(5, tray())} == {0, 1, 2}  # type: ignore[union-attr]
    assert set(found.unfit.values()) == {()}


def test_who_will_not_be_watched_is_not_kept_out() -> None:
    found = GpuVerdicts(TRAY, 2)
    found.handle(0, BLIND)
    assert [event.unfit for event in found.unwatched()] == [(), ()]  # type: ignore[union-attr]


# -- cliques and links
def test_a_gpu_that_comes_up_in_another_clique_may_not_be_used() -> None:
    found = judge(tray())
    found.handle(5, tray(gpu(1, fabric=msgspec.structs.replace(FABRIC, clique=5))))
    assert found.unfit[1] == (f"GPU 1: it is in clique {CliqueId(CLIQUE.domain, 5)}, not in {CLIQUE}",)


def test_the_rack_file_says_which_clique_it_is_to_be() -> None:
    other = CliqueId(CLIQUE.domain, 9)
    found = GpuVerdicts(TRAY, 4, {1: other})
    found.begin((0, 1, 2, 3))
    found.handle(0, tray())
    assert found.unfit[1] == (f"GPU 1: it is in clique {CLIQUE}, not in {other}",)


def test_a_gpu_that_still_registers_is_taken_for_one_of_its_trays_clique_and_waits() -> None:
    reading = tray(gpu(2, fabric=REGISTERING))
    assert cliques_of(reading, (0, 1, 2)) == {0: CLIQUE, 1: CLIQUE, 2: CLIQUE}
    found = judge(reading)
    assert found.unfit[2] == ("GPU 2: its fabric registration is in progress, not completed",)
    assert (found.unfit[0], by_driver(reading, "t", (0, 2)).trays[0].gpus[1].clique) == ((), CLIQUE)
    assert "slot 1 has not registered yet" in by_driver(reading, "t", (0, 2)).notes[0]


def test_a_host_that_is_in_no_rack_need_not_register_with_a_fabric() -> None:
    gpus = [gpu(index, fabric=REGISTERING) for index in range(4)]
    assert judge(tray(*gpus)).unfit[0] == ()
    placed = [gpu(index, fabric=REGISTERING, platform=PLACE) for index in range(4)]
    assert "not completed" in judge(tray(*placed)).unfit[0][0]


def test_a_gpu_must_have_as_many_links_as_it_had() -> None:
    alone = [gpu(index, fabric=None, links=(1, 1, 0)) for index in range(4)]
    found = judge(tray(*alone))
    assert not found.unfit[0]
    found.handle(5, tray(gpu(0, fabric=None, links=(1, 0, 0)), *alone[1:]))
    assert found.unfit[0] == ("GPU 0: 1 NVLinks are up, not 2",)


# -- the driver and the rack file together
def test_the_trays_of_a_file_together_are_the_file(nvl72: Topology) -> None:
    merged = merge(partial_of_tray(nvl72, name, "rack.yaml") for name in nvl72.trays)
    assert [seat.slot for seat in merged.seats] == [seat.slot for seat in nvl72.seats]
    assert merged.cliques == nvl72.cliques
    assert [rack.fabric for rack in merged.racks] == [rack.fabric for rack in nvl72.racks]


def test_made_up_uuids_give_way_to_the_drivers_and_all_else_of_the_file_stays(nvl72: Topology) -> None:
    files = [partial_of_tray(nvl72, TRAY, "rack.yaml")]
    reading = tray(*(gpu(index, platform=PLACE) for index in range(3)))
    driver = by_driver(reading, TRAY, (0, 1, 2))
    gpus = merge(reconciled(files, driver)).trays[TRAY][1].gpus
    assert [one.uuid for one in gpus[:3]] == ["GPU-0", "GPU-1", "GPU-2"]
    assert gpus[3].uuid == files[0].trays[0].gpus[3].uuid  # the driver does not list it
    assert gpus[0].nics == ("mlx5_0",)


def test_a_file_that_names_another_clique_than_the_driver_is_no_tray(nvl72: Topology) -> None:
    files = [partial_of_tray(nvl72, TRAY, "rack.yaml")]
    elsewhere = msgspec.structs.replace(FABRIC, clique=1)
    driver = by_driver(tray(*(gpu(index, fabric=elsewhere, platform=PLACE) for index in range(4))), TRAY, (0, 1, 2, 3))
    with pytest.raises(SourcesDisagree, match=r"NVML on tray-00, and .* by rack\.yaml"):
        merge(reconciled(files, driver))
    assert named_cliques(files)[0] == CliqueId(CLIQUE.domain, 32766)


def test_a_simulated_tray_has_only_the_gpus_that_its_file_names(nvl72: Topology) -> None:
    files = [partial_of_tray(nvl72, TRAY, "rack.yaml")]
    assert not is_of(tray(), files)
    assert is_of(tray(gpu(0, uuid=files[0].trays[0].gpus[0].uuid)), files)


@pytest.fixture(scope="module")
def nvl72() -> Topology:
    from rackrun.topology.model.rack_file import read_rack_file

    return read_rack_file(EXAMPLES / "gb200-nvl72.yaml")
