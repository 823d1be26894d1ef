"""From the driver to the coordinator: compiled library, real binding, NVML's process, agent, wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rackrun.agent.gpus.gpu_monitor import GpuMonitor, GpuMonitorTimes, _library_here
from rackrun.agent.gpus.gpu_verdicts import DeviceEvent
from rackrun.agent.host import proc
from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeTray, build
from rackrun.protocol.agent_config import AgentConfig, LogConfig, ScriptConfig
from rackrun.protocol.events import DeviceChecked, DeviceJudged, TrayJoined
from rackrun.protocol.gpu_health import Health, Response
from rackrun.protocol.ids import TrayId
from rackrun.topology.sources.partial_topology import PartialTopology, merge, partial_of_tray
from tests.agent.conftest import Rig
from tests.topology.conftest import Fake

TRAY = TrayId("tray-03")
DEADLINE_S = 100.0
PACE = GpuMonitorTimes(period_ms=40, patience_ms=1_000, pause_s=(0.05, 0.1))


# -- a whole agent -----------------------------------------------------------------------------------------------------
@pytest.fixture
def on_tray(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> Fake:
    """This process, and what it forks, is on the tray. Agents say which one it is."""
    of = fake()
    for name, value in of.rack.environment(of.library).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return of


def nvml_process(agent: int) -> int:
    found = []
    for pid in proc.descendants(agent):
        with contextlib.suppress(OSError):  # it has ended since
            if b"nvml_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    assert len(found) == 1
    return found[0]


async def test_a_tray_joins_with_what_its_driver_says_and_workers_are_told_their_place(rig: Rig, on_tray: Fake) -> None:
    on_tray.tray(TRAY).gpu[1].fabric_state = 2
    script = "import os; print('told', os.environ['NCCL_MNNVL_ENABLE'], os.environ['CUDA_DEVICE_ORDER'])"
    joined: TrayJoined = await rig.start(script, tray=TRAY, slot_env=({}, {"NCCL_MNNVL_ENABLE": "2"}))
    merged = merge(msgspec.json.decode(joined.topology, type=list[PartialTopology]))
    rack, tray = merged.trays[TRAY]
    assert (rack.serial, tray.index, len(tray.gpus)) == ("1825024170029", 3, 4)
    assert [gpu.uuid for gpu in tray.gpus] == [gpu.uuid for gpu in on_tray.topology.trays[TRAY][1].gpus]
    assert len(merged.cliques) == 1  # the second GPU will join its tray's
    assert joined.unfit == {1: ("GPU 1: its fabric registration is in progress, not completed",)}
    child = nvml_process(rig.agent)
    await rig.coordinator.send(msgspec.structs.replace(rig.start_command(1, 1), slot=f"{TRAY}/1"))
    assert await rig.line("told") == "told 2 PCI_BUS_ID"
    await rig.coordinator.exit_of(1)
    assert await rig.end() == 0
    assert not rig.alive(child)
    assert rig.err.read_text() == ""


FAULTS: list[tuple[Callable[[FakeTray], Any], Health, Response, str]] = [
    (lambda tray: tray.xid(0, 79), Health.LOST, Response.FENCE, ""),
    (lambda tray: tray.gpu[1].link_state.__setitem__(11, 0), Health.DEGRADED, Response.SWAP, "NVLink 11 down"),
    (lambda tray: setattr(tray.gpu[2], "fabric_state", 2), Health.FABRIC, Response.FENCE, "not completed"),
    (lambda tray: tray.gpu[3].remapped.__setitem__(2, 1), Health.DEGRADED, Response.SWAP, "waits for a reset"),
]


def judges(slot: int, message: object) -> bool:
    return isinstance(message, DeviceJudged) and message.verdict.index == slot


def is_of(slot: int, message: DeviceChecked) -> bool:
    return message.index == slot


async def test_every_fault_is_told_to_the_coordinator(rig: Rig, on_tray: Fake) -> None:
    await rig.start("pass", tray=TRAY)
    for slot, (strike, health, response, unfit) in enumerate(FAULTS):
        struck = time.monotonic()
        strike(on_tray.tray(TRAY))
        judged = await rig.coordinator.wait(partial(judges, slot), "verdict")
        assert isinstance(judged.message, DeviceJudged)
        print(f"slot {slot}, {health.value}: told after {(judged.at - struck) * 1000:.0f} ms")  # pytest -s shows it
        assert (judged.message.tray, judged.message.verdict.health) == (TRAY, health)
        assert judged.message.verdict.response is response
        if unfit:
            checked = await rig.coordinator.said(DeviceChecked, partial(is_of, slot), "check")
            assert unfit in checked.unfit[0]
    os.kill(nvml_process(rig.agent), signal.SIGSEGV)
    await rig.coordinator.wait(lambda m: isinstance(m, DeviceChecked) and "(SIGSEGV)" in "".join(m.unfit), "its end")
    assert await rig.end() == 0


async def test_nvmls_process_outlives_the_fork_server_but_not_the_agent_even_when_the_driver_hangs(
    rig: Rig, on_tray: Fake
) -> None:
    await rig.start("pass", tray=TRAY)
    child = nvml_process(rig.agent)
    (server,) = (pid for pid in proc.descendants(rig.agent) if pid != child)
    os.kill(server, signal.SIGKILL)
    await rig.line("another one is started", rig.err)
    assert nvml_process(rig.agent) == child
    on_tray.tray(TRAY).hang = 1
    os.kill(rig.agent, signal.SIGKILL)
    await rig.agent_exit()
    await rig.all_gone([child])


async def test_a_tray_that_two_sources_describe_differently_does_not_join(rig: Rig, on_tray: Fake) -> None:
    partial = partial_of_tray(on_tray.topology, TRAY, "rack.yaml")
    wrong = msgspec.structs.replace(partial, trays=(msgspec.structs.replace(partial.trays[0], index=7),))
    rig.launch("pass", tray=TRAY, topology=msgspec.json.encode([wrong]))
    assert await rig.agent_exit() == 2
    said = rig.err.read_text()
    assert "tray-03 is compute tray 3 by NVML on tray-03, and 7 by rack.yaml" in said
    assert rig.coordinator.queries == []


# -- the watch alone ---------------------------------------------------------------------------------------------------
class Watched:
    """Devices of a tray, and what they have told."""

    def __init__(self, devices: GpuMonitor) -> None:
        self.devices = devices
        self.told: list[DeviceEvent] = []
        self._changed = asyncio.Event()

    def tell(self, event: DeviceEvent) -> None:
        self.told.append(event)
        self._changed.set()

    async def until(self, wanted: Callable[[list[DeviceEvent]], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not wanted(self.told):
                self._changed.clear()
                await self._changed.wait()

    def unfit(self) -> dict[int, tuple[str, ...]]:
        """As last told."""
        return {one.index: one.unfit for one in self.told if isinstance(one, DeviceChecked)}


Watching = Callable[..., AbstractAsyncContextManager[Watched]]


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    @asynccontextmanager
    async def watch(env: dict[str, str], kernel_log: str = "", **config: Any) -> AsyncIterator[Watched]:
        settings = {
            "run_id": "a", "tray": TRAY, "slots": 4, "coordinator": "", "token": "", "advertise": "127.0.0.1",
            "script": ScriptConfig(path="x"), "logs": LogConfig(directory="x"), **config,
        }  # fmt: skip
        devices = GpuMonitor(AgentConfig(**settings), pace=PACE, env=env, kernel_log=kernel_log)
        try:
            yield Watched(devices)
        finally:
            await devices.close()

    return watch


async def joined(watched: Watched) -> dict[int, tuple[str, ...]]:
    found = await watched.devices.joined()
    watched.devices.report_to(watched.tell)
    return found


async def test_a_driver_that_hangs_keeps_the_tray_out_until_it_answers(
    watching: Watching, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    of = fake()
    async with watching(of.env(TRAY)) as watched:
        assert await joined(watched) == {}
        of.tray(TRAY).hang = 1
        await watched.until(lambda _: len(watched.unfit()) == 4)
        assert all(
            "nothing can be read of this tray: NVML does not answer" in why for (why,) in watched.unfit().values()
        )
        of.tray(TRAY).hang = 0
        await watched.until(lambda _: not any(watched.unfit().values()))
        assert not any(isinstance(event, DeviceJudged) for event in watched.told)  # nothing is known against the GPUs
    said = capsys.readouterr().err.splitlines()
    assert [("cannot be watched" in line, "answers again" in line) for line in said] == [(True, False), (False, True)]


async def test_a_driver_that_crashes_its_caller_is_asked_again(
    watching: Watching, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    of = fake()
    async with watching(of.env(TRAY)) as watched:
        await joined(watched)
        (child,) = watched.devices.pids
        os.kill(child, signal.SIGSEGV)
        await watched.until(lambda _: len(watched.unfit()) == 4)
        assert "SIGSEGV" in watched.unfit()[0][0]
        await watched.until(lambda _: not any(watched.unfit().values()))
        assert watched.devices.pids != (child,)


@pytest.mark.parametrize("result", [4, 9])  # no permission; the driver is not loaded
async def test_a_driver_that_refuses_is_said_once_and_the_job_goes_on(
    watching: Watching, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str], result: int
) -> None:
    of = fake()
    of.tray(TRAY).init_result = result
    async with watching(of.env(TRAY)) as watched:
        assert await joined(watched) == {}
        assert watched.devices.pids == ()
    (line,) = capsys.readouterr().err.splitlines()
    assert "the GPUs of tray-03 are not watched" in line
    assert "Remedy" in line


async def test_without_gpus_to_see_nothing_is_started(
    watching: Watching, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    of = fake()
    for environment in ({**of.env(TRAY), "CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": " "}):
        async with watching(environment) as watched:
            assert (watched.devices.pids, await joined(watched), watched.devices.partials) == ((), {}, [])
    assert capsys.readouterr().err == ""


def test_the_library_is_looked_for_where_a_new_process_would_look(library: Path, tmp_path: Path) -> None:
    assert _library_here({"LD_LIBRARY_PATH": f"{tmp_path}:{library}"})


async def test_slots_are_the_gpus_that_workers_see(watching: Watching, fake: Callable[..., Fake]) -> None:
    of = fake()
    async with watching({**of.env(TRAY), "CUDA_VISIBLE_DEVICES": "3,1"}) as watched:
        await joined(watched)
        (tray,) = watched.devices.partials[0].trays
        uuids = [gpu.uuid for gpu in of.topology.trays[TRAY][1].gpus]
        assert [(gpu.index, gpu.uuid) for gpu in tray.gpus] == [(0, uuids[3]), (1, uuids[1])]
        of.tray(TRAY).xid(0, 79)
        of.tray(TRAY).xid(3, 79)
        await watched.until(bool)
        assert [event.verdict.index for event in watched.told if isinstance(event, DeviceJudged)] == [0]


async def test_a_gpu_that_is_bad_from_the_start_is_judged_right_after_joining(
    watching: Watching, fake: Callable[..., Fake]
) -> None:
    of = fake()
    of.tray(TRAY).gpu[2].recovery_action = 2
    async with watching(of.env(TRAY)) as watched:
        assert list(await joined(watched)) == [2]
        assert [(event.verdict.index, event.verdict.health) for event in watched.told] == [(2, Health.REBOOT)]  # type: ignore[union-attr]


async def test_the_kernels_log_is_a_second_source(
    watching: Watching, fake: Callable[..., Fake], tmp_path: Path
) -> None:
    of = fake()
    os.mkfifo(tmp_path / "kmsg")
    writer = os.open(tmp_path / "kmsg", os.O_RDWR)
    try:
        async with watching(of.env(TRAY), kernel_log=str(tmp_path / "kmsg")) as watched:
            await joined(watched)
            os.write(writer, b"4,1,1,-;NVRM: Xid (PCI:0002:01:00): 79, pid='<unknown>', GPU has fallen off the bus.\n")
            await watched.until(bool)
            (event,) = watched.told
            assert isinstance(event, DeviceJudged)
            assert (event.verdict.index, event.verdict.evidence[0].source) == (1, "kernel log")
    finally:
        os.close(writer)


async def test_a_simulated_tray_is_watched_only_where_the_driver_lists_its_gpus(
    watching: Watching, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    of = fake()
    mine = msgspec.json.encode([partial_of_tray(of.topology, TRAY, "rack.yaml")])
    async with watching(of.env(TRAY), topology=mine, simulated=True) as watched:
        await joined(watched)
        assert watched.devices.pids
    for settings in ({"topology": mine}, {}):  # on another tray's driver; and with nothing to tell whose GPUs they are
        async with watching(of.env("tray-04"), simulated=True, **settings) as watched:
            await joined(watched)
            assert watched.devices.pids == ()
            assert [one.kind for one in watched.devices.partials] == ["rack file"] * len(settings)
    assert capsys.readouterr().err == ""


async def test_workers_are_bound_near_their_gpu_unless_it_is_switched_off(
    watching: Watching, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = fake()
    monkeypatch.setattr("rackrun.agent.gpus.gpu_monitor.cores_here", lambda: frozenset(range(144)))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64, 80)))
    async with watching(of.env(TRAY)) as watched:
        await joined(watched)
        assert watched.devices.binding(0).cpus == (64, 65, 66, 67)
        assert watched.devices.binding(3).cpus == (76, 77, 78, 79)
    async with watching({**of.env(TRAY), "RACKRUN_BIND": "0"}) as watched:
        await joined(watched)
        assert watched.devices.binding(0).cpus == ()


# -- what is refused at the start --------------------------------------------------------------------------------------
@pytest.fixture
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


async def refusal_of(watched: Watched) -> str:
    await joined(watched)
    return watched.devices.refusal


@pytest.mark.usefixtures("torch_for_cuda")
async def test_a_tray_on_which_no_worker_could_compute_says_so_before_it_joins(
    watching: Watching, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    of = fake()
    gpus = of.tray(TRAY).gpu
    async with watching(of.env(TRAY)) as watched:
        assert await refusal_of(watched) == ""
    async with watching(of.env(TRAY), slots=5) as watched:
        assert (await refusal_of(watched)).startswith("5 workers are to run here, and CUDA shows 4 GPUs")
    gpus[1].mig = 1
    async with watching(of.env(TRAY)) as watched:
        assert "GPU 1 is cut into slices (MIG)" in await refusal_of(watched)
    gpus[1].mig, gpus[2].compute_mode = 0, 2
    async with watching(of.env(TRAY)) as watched:
        assert "GPU 2 is in compute mode PROHIBITED" in await refusal_of(watched)
    gpus[2].compute_mode, gpus[2].user_count, gpus[2].users[0] = 3, 1, 4711
    async with watching(of.env(TRAY)) as watched:
        assert "EXCLUSIVE_PROCESS, and process 4711 uses it already" in await refusal_of(watched)
    gpus[2].compute_mode = 0
    async with watching(of.env(TRAY)) as watched:
        assert await refusal_of(watched) == ""
    assert "tray-03: GPU 2: process 4711 uses it already" in capsys.readouterr().err
    of.tray(TRAY).cuda = 12040
    async with watching(of.env(TRAY)) as watched:
        assert "serves CUDA 12.4 and older, and torch is built for CUDA 13.0" in await refusal_of(watched)


@pytest.mark.usefixtures("torch_for_cuda")
async def test_an_old_driver_that_cannot_be_asked_refuses_nothing(
    watching: Watching, fake: Callable[..., Fake], tmp_path: Path
) -> None:
    lacking = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses_v3")
    of = fake()
    library = build(tmp_path / "old", lacking)
    async with watching(of.env(TRAY, library)) as watched:
        assert await refusal_of(watched) == ""


@pytest.mark.usefixtures("torch_for_cuda")
async def test_an_agent_whose_tray_cannot_compute_ends_with_the_reason(rig: Rig, on_tray: Fake) -> None:
    on_tray.tray(TRAY).gpu[0].compute_mode = 2
    rig.launch("pass", tray=TRAY)  # forks this process, torch and all
    assert await rig.agent_exit() == 2
    assert "GPU 0 is in compute mode PROHIBITED: no process may use it. Remedy:" in rig.err.read_text()
    assert rig.coordinator.queries == []


async def test_what_is_not_judged_is_told_when_the_tray_joins(
    rig: Rig, on_tray: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_HEALTH", "ignore:links,fabric")
    on_tray.tray(TRAY).put(1, {"fabric_state": 2, "link_state": {str(link): 0 for link in range(18)}})
    joined_as: TrayJoined = await rig.start("pass", tray=TRAY)
    assert (joined_as.unfit, joined_as.unjudged) == ({}, "fabric, links (RACKRUN_HEALTH)")
    assert await rig.end() == 0
