"""A filler runs while a spare waits, and is gone when the spare is needed, whatever it does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from rackrun.agent import proc
from rackrun.agent.config import FillerConfig, FillerPauses
from rackrun.agent.fillers import MARK
from rackrun.agent.worker import Worker
from rackrun.core.commands import Member, Plan, ReleaseWorkers, ResumeGeneration
from rackrun.core.commands import Worker as Who
from rackrun.core.ids import Generation, Incarnation, Rank, SlotId
from rackrun.core.wire import FillerTold
from rackrun.link.channel import frame
from tests.agent import nasty_fillers
from tests.agent.nasty_fillers import DAEMON, KINDS

SPARE = """
import os, time
from rackrun.core.events import WorkerReady
from rackrun.link import boot
from rackrun.link.channel import WorkerChannel
me = boot.current()
channel = WorkerChannel(me.channel_fd)
print(f"pid={os.getpid()}", flush=True)
channel.send(WorkerReady(slot=me.slot, incarnation=me.incarnation))
while message := channel.receive():
    if type(message).__name__ == "ResumeGeneration":
        print(f"told {me.slot} {me.incarnation} at {time.monotonic():.4f}", flush=True)
"""
NASTY = (sys.executable, "-E", "-s", nasty_fillers.__file__)
SLEEP = ("sleep", "600")
QUICK = FillerPauses(first_s=0.01, most_s=0.04)


def plan(*spares: tuple[int, int]) -> ResumeGeneration:
    members = tuple(
        Member(rank=Rank(rank), slot=SlotId(f"tray-0/{index}"), incarnation=Incarnation(incarnation))
        for rank, (index, incarnation) in enumerate(spares)
    )
    found = Plan(generation=Generation(2), world_size=len(members), members=members, store="127.0.0.1:1")
    return ResumeGeneration(plan=found, because="a test")


async def begin(rig, *command: str, slots: int = 1, **config: object) -> None:
    await rig.start(SPARE, slots=slots, filler=FillerConfig(command=command, **config))


async def spare_waits(rig, index: int = 0, incarnation: int = 1) -> None:
    """With a filler beside it."""
    await rig.start_worker(index, incarnation, spare=True)
    await told(rig, index, incarnation, "running")


async def told(rig, index: int, incarnation: int, state: str, start: int = 0) -> FillerTold:
    def wanted(message: object) -> bool:
        return (
            isinstance(message, FillerTold)
            and (message.slot, message.incarnation, message.state) == (f"tray-0/{index}", incarnation, state)
            and start in (0, message.start)
        )

    found = (await rig.coordinator.wait(wanted, f"filler {state} beside {index}")).message
    assert isinstance(found, FillerTold)
    return found


async def told_of_plan(rig, index: int, incarnation: int) -> float:
    return float((await rig.line(f"told tray-0/{index} {incarnation} at ")).split()[-1])


async def appears(path: Path) -> str:
    """Its content, once there is some."""
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} never came"
        await asyncio.sleep(0.01)
    return path.read_text()


def alive_of_fillers(rig) -> list[int]:
    """Below the agent, or escaped: by the mark of all fillers of this tray, or by the daemon's words."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            marks = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if DAEMON.encode() in words or any(mark.startswith(f"{MARK}=tray-0/".encode()) for mark in marks):
            found.append(int(name))
    return [pid for pid in found if rig.alive(pid)]


# -- it goes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.stories)])
async def test_whatever_a_filler_does_it_is_gone_within_a_second_and_the_plan_waits_for_nobody(rig, rounds):
    slots = range(len(KINDS))
    await begin(rig, *NASTY, str(rig.folder), slots=len(KINDS))
    for incarnation in range(1, rounds + 1):
        for index in slots:
            await spare_waits(rig, index, incarnation)
            await appears(rig.folder / f"ready-{index}-{incarnation}")
        before = time.monotonic()
        await rig.coordinator.send(plan(*((index, incarnation) for index in slots)))
        ends = [await told(rig, index, incarnation, "ended") for index in slots]
        took, left = time.monotonic() - before, alive_of_fillers(rig)
        gone = {kind.__name__: one.gone_s for kind, one in zip(KINDS, ends, strict=True)}
        print({name: round(gone_s, 3) for name, gone_s in gone.items()}, file=sys.stderr)
        assert not left
        assert took < 1.0, gone
        assert {one.because for one in ends} == {"the spare is needed"}
        delays = [await told_of_plan(rig, index, incarnation) - before for index in slots]
        print([round(delay, 3) for delay in delays], file=sys.stderr)
        assert statistics.median(delays) < 0.15, (delays, gone)
        assert (rig.folder / f"told-0-{incarnation}").exists(), "the polite one was not told"
    assert await rig.end() == 0


async def test_a_filler_that_kills_its_cage_leaves_nobody_behind_and_is_started_again(rig):
    killer = (
        "import os, signal, sys, time\n"
        "cage = os.getppid()\n"
        "if not os.path.exists(sys.argv[1]) and os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    os.kill(cage, signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    await begin(rig, sys.executable, "-c", killer, str(rig.folder / "child"), pauses=QUICK)
    await spare_waits(rig)
    end = await told(rig, 0, 1, "ended")
    assert end.because == "its cage was killed by signal 9"
    await rig.all_gone([int((rig.folder / "child").read_text())])
    await told(rig, 0, 1, "running", start=2)
    assert await rig.end() == 0
    assert not alive_of_fillers(rig)


@pytest.mark.parametrize("how", ["fenced", "dead", "released"])
async def test_a_filler_goes_with_its_spare(rig, how):
    await begin(rig, *SLEEP)
    await spare_waits(rig)
    if how == "fenced":
        await rig.fence(0, 1)
    elif how == "released":
        await rig.coordinator.send(ReleaseWorkers(workers=(Who(SlotId("tray-0/0"), Incarnation(1)),)))
    else:
        os.kill(await rig.number("pid"), signal.SIGKILL)
    end = await told(rig, 0, 1, "ended")
    assert end.gone_s < 1.0
    assert not alive_of_fillers(rig)
    await rig.end()


async def test_no_filler_outlives_a_killed_agent(rig):
    await begin(rig, *NASTY, str(rig.folder), slots=3)
    for index in range(3):
        await spare_waits(rig, index)
        await appears(rig.folder / f"ready-{index}-1")
    below = proc.descendants(rig.agent)
    os.kill(rig.agent, signal.SIGKILL)
    await rig.agent_exit()
    await rig.all_gone(below)
    assert not alive_of_fillers(rig)


async def test_at_the_end_of_the_job_fillers_are_told_gone_and_counted(rig):
    await begin(rig, sys.executable, "-c", "import hashlib\nwhile True: hashlib.sha256(bytes(1 << 20))", sample_s=0.05)
    await spare_waits(rig)
    await rig.coordinator.wait(lambda m: isinstance(m, FillerTold) and m.cpu_s > 0.0, "processor time")
    assert await rig.end() == 0
    end = await told(rig, 0, 1, "ended")
    assert end.because in ("the job ends", "the spare is gone")
    assert end.cpu_s > 0.0
    assert end.seconds > 0.05


# -- it comes --------------------------------------------------------------------------------------------------------


async def test_the_next_spare_in_the_slot_has_a_filler_again_and_a_rank_has_none(rig):
    await begin(rig, *SLEEP, slots=2)
    await rig.start_worker(1, 2)  # no spare
    await spare_waits(rig, 0, 1)
    await rig.coordinator.send(plan((0, 1)))
    await told(rig, 0, 1, "ended")
    await rig.fence(0, 1)
    await rig.coordinator.exit_of(1)
    await spare_waits(rig, 0, 3)
    assert not [t for t in rig.coordinator.received if isinstance(t.message, FillerTold) and t.message.incarnation == 2]
    assert await rig.end() == 0


async def test_a_spare_that_is_in_the_plan_before_it_is_ready_has_no_filler(rig):
    await begin(rig, *SLEEP)
    await rig.coordinator.send(plan((0, 1)), rig.start_command(0, 1, spare=True))
    await rig.coordinator.wait(lambda m: type(m).__name__ == "WorkerReady", "WorkerReady")
    await told_of_plan(rig, 0, 1)
    assert await rig.end() == 0
    assert not [timed for timed in rig.coordinator.received if isinstance(timed.message, FillerTold)]


async def test_a_filler_that_ends_is_started_again_and_after_ten_times_at_once_given_up(rig):
    await begin(rig, "sh", "-c", "echo once more; exit 3", pauses=QUICK)
    await spare_waits(rig)
    end = await told(rig, 0, 1, "given up")
    assert (end.start, end.because) == (10, "exit code 3")
    (log,) = (rig.folder / "logs").glob("*/filler/0.log")
    assert log.read_text() == "once more\n" * 10
    said = rig.err.read_text()
    assert (
        f"the filler beside tray-0/0 has ended at once 10 times (exit code 3), and is not started there again. See {log}"
        in said
    )
    assert await rig.end() == 0


async def test_a_program_that_has_vanished_since_the_launch_is_given_up_and_named(rig):
    await begin(rig, "/no/such/program", pauses=QUICK)
    await spare_waits(rig)
    assert (await told(rig, 0, 1, "given up")).because == "exit code 127"
    (log,) = (rig.folder / "logs").glob("*/filler/0.log")
    assert "cannot run the filler /no/such/program: No such file or directory" in log.read_text()
    assert await rig.end() == 0


async def test_it_is_last_in_line_has_its_slots_gpu_and_none_of_a_ranks_environment(rig):
    code = (
        "import json, os, sys; print(json.dumps({'env': dict(os.environ), 'nice': os.nice(0), 'policy': os.sched_getscheduler(0),"
        "'oom': open('/proc/self/oom_score_adj').read().strip(), 'leader': os.getsid(0) == os.getpid(),"
        "'ignored': [n for n in (1, 2, 13, 15) if __import__('signal').getsignal(n) == 1 and n != 13],"
        "'fds': sorted(map(int, os.listdir('/proc/self/fd')))[:4], 'in': sys.stdin.read()}), flush=True);"
        "__import__('time').sleep(600)"
    )
    await begin(rig, sys.executable, "-c", code, slots=2)
    await spare_waits(rig, 1)
    deadline = time.monotonic() + 20
    while not (logs := [p for p in (rig.folder / "logs").glob("*/filler/1.log") if p.read_text()]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    found = json.loads(logs[0].read_text())
    assert (found["nice"], found["oom"], found["leader"], found["in"], found["ignored"]) == (19, "1000", True, "", [])
    assert found["policy"] in (os.SCHED_IDLE, os.SCHED_OTHER)
    assert found["env"][MARK] == "tray-0/1:1:1"
    assert found["env"]["CUDA_VISIBLE_DEVICES"] == os.environ.get("CUDA_VISIBLE_DEVICES", "1")
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & found["env"].keys() - os.environ.keys()
    assert await rig.end() == 0


# -- where it holds a GPU ----------------------------------------------------------------------------------------------


async def test_where_workers_have_gpus_the_plan_comes_when_the_filler_is_gone(rig):
    def as_on_a_gpu_host() -> int:
        torch.cuda.is_available = lambda: True
        filler = FillerConfig(command=(*NASTY, str(rig.folder)), grace_s=0.3)
        return rig.run(SPARE, slots=3, filler=filler)

    rig.agent = rig.fork(as_on_a_gpu_host)
    rig.store = (await rig.coordinator.joined()).store
    await spare_waits(rig, 2)
    await appears(rig.folder / "ready-2-1")
    before = time.monotonic()
    await rig.coordinator.send(plan((2, 1)))
    end = await told(rig, 2, 1, "ended")
    assert 0.3 <= end.gone_s < 1.0
    assert 0.3 <= await told_of_plan(rig, 2, 1) - before < 1.0
    assert await rig.end() == 0


async def test_what_follows_a_plan_that_waits_does_not_overtake_it(rig):
    worker = Worker(rig.start_command(0, 1, store="127.0.0.1:1"), lambda _worker, _body: None)
    gone = asyncio.Event()
    theirs = socket.socket(fileno=os.dup(worker.fds_for_birth[0]))
    theirs.setblocking(False)
    first, second = frame(plan((0, 1))), frame(ReleaseWorkers(workers=()))
    worker.send(first, after=gone)
    worker.send(second)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    gone.set()
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < len(first) + len(second):
        data += await loop.sock_recv(theirs, 1 << 16)
    assert data == first + second
    theirs.close()
    worker.sent_off()
    worker.buried()
    worker.forget()


def test_what_is_told_of_a_filler_travels_as_it_is():
    message = FillerTold(
        slot=SlotId("tray-0/1"), incarnation=Incarnation(3), start=1, state="running", seconds=1.0, cpu_s=0.5
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FillerTold) == message
