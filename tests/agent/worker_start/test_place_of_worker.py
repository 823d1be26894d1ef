"""What a worker is told about its place, and where it is bound."""

from __future__ import annotations

import os

import pytest

from rackrun.agent.host.numa_binding import bind, bindings, cores_here
from rackrun.agent.worker_start.torchrun_environment import worker_environment
from rackrun.protocol.agent_config import AgentConfig, LogConfig, ScriptConfig
from rackrun.protocol.commands import StartWorker
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, TrayId
from rackrun.topology.model.racks import Gpu, Rack, Topology, Tray
from tests.agent.conftest import fork

GRACE = range(144)


def topology(*cpus: str, numa: int | None = None) -> Topology:
    gpus = tuple(Gpu(uuid=f"GPU-{at}", index=at, cpus=text, numa=numa) for at, text in enumerate(cpus))
    return Topology.of([Rack(serial="a", trays=(Tray(name="t", index=0, gpus=gpus),))])


def bound(of: Topology, here: range, allowed: range) -> dict[int, tuple[int, ...]]:
    return {slot: one.cpus for slot, one in bindings(of, "t", here, allowed).items()}


# -- cores
def test_gpus_share_the_cores_near_them() -> None:
    grace = topology("0-71", "0-71", "72-143", "72-143")
    found = bound(grace, GRACE, GRACE)
    assert {slot: (cpus[0], cpus[-1], len(cpus)) for slot, cpus in found.items()} == {
        0: (0, 35, 36),
        1: (36, 71, 36),
        2: (72, 107, 36),
        3: (108, 143, 36),
    }


def test_a_tray_with_more_cores_than_this_machine_is_another_machine() -> None:
    assert bound(topology("0-71", "72-143"), range(2), range(2)) == {}


def test_only_what_this_process_may_use_is_shared_out() -> None:
    assert bound(topology("0-71", "0-71"), GRACE, range(8, 16)) == {0: tuple(range(8, 12)), 1: tuple(range(12, 16))}


def test_a_worker_is_not_bound_to_a_single_core_nor_to_none() -> None:
    assert bound(topology("0-1", "0-1"), range(2), range(2)) == {}
    assert bound(topology("0-7", "8-15"), range(16), range(8)) == {0: tuple(range(8))}
    assert bound(topology(""), range(16), range(16)) == {}


def test_a_tray_that_is_not_described_is_left_alone() -> None:
    assert bindings(topology("0-7"), "another", range(16), range(16)) == {}


def test_memory_comes_from_the_node_of_the_gpu() -> None:
    assert bindings(topology("0-7", numa=1), "t", range(16), range(16))[0].numa == 1


def test_a_process_is_bound_before_it_has_threads_and_a_node_that_is_not_there_is_passed_over() -> None:
    core = min(os.sched_getaffinity(0))

    def child() -> int:
        bind((core,), 0)
        bind((), 63)
        bind((100_000,), None)  # refused by the kernel: left as it is
        return 0 if os.sched_getaffinity(0) == {core} else 1

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    assert core in cores_here()


# -- variables
def told(index: int, **config: object) -> dict[str, str]:
    settings: dict[str, object] = {
        "run_id": "a", "tray": TrayId("t"), "slots": 2, "coordinator": "", "token": "", "advertise": "",
        "script": ScriptConfig(path="x"), "logs": LogConfig(directory="x"), **config,
    }  # fmt: skip
    command = StartWorker(
        slot=SlotId(f"t/{index}"),
        incarnation=Incarnation(1),
        spare=False,
        rank=Rank(0),
        world_size=2,
        generation=Generation(1),
        store="",
    )
    return worker_environment(AgentConfig(**settings), command, "127.0.0.1:1", "")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_DEVICE_ORDER", "NCCL_MNNVL_ENABLE"):
        monkeypatch.delenv(name, raising=False)


def test_each_slot_gets_its_own_variables() -> None:
    slots = ({"NCCL_MNNVL_ENABLE": "2", "NCCL_MNNVL_CLIQUE_ID": "7"}, {"NCCL_MNNVL_ENABLE": "2"})
    assert told(0, slot_env=slots)["NCCL_MNNVL_CLIQUE_ID"] == "7"
    assert "NCCL_MNNVL_CLIQUE_ID" not in told(1, slot_env=slots)
    assert told(1, slot_env=slots)["NCCL_MNNVL_ENABLE"] == "2"


def test_without_a_rack_file_nothing_is_said_of_nvlink_between_hosts() -> None:
    assert not [name for name in told(0) if name.startswith("NCCL_")]


def test_gpus_are_counted_as_nvml_counts_them() -> None:
    assert told(0)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MNNVL_ENABLE", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    found = told(0, slot_env=({"NCCL_MNNVL_ENABLE": "2"},))
    assert not {"NCCL_MNNVL_ENABLE", "CUDA_DEVICE_ORDER"} & set(found)  # the agent's own environment is below
