"""A filler runs while a spare waits, and is gone when the spare is needed, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import rackrun.agent.fillers.filler_runner
import rackrun.agent.workers.worker_handle
from rackrun.agent.fillers.filler_runner import CAGE, HOLD_S, LATE_S, MARK, Fillers
from rackrun.agent.fillers.filler_supervisor import HELD, FillerOrder
from rackrun.agent.gpus.start_checks import SHARE
from rackrun.agent.host import proc
from rackrun.agent.host.cgroup import Cgroup
from rackrun.agent.host.numa_binding import NOWHERE
from rackrun.agent.host.priority import finish_off, idle_can_be_left
from rackrun.agent.worker_start.worker_logs import WorkerLogs
from rackrun.launch.options.filler_options import GRACE_S_MAX
from rackrun.protocol.agent_config import FillerConfig, FillerPauses, LogConfig
from rackrun.protocol.commands import GenerationPlan, Member, ReleaseWorkers, ResumeGeneration
from rackrun.protocol.commands import Worker as Who
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId
from rackrun.protocol.wire import FillerState
from tests.agent import nasty_fillers
from tests.agent.conftest import Rig, eventually
from tests.agent.nasty_fillers import DAEMON, KINDS

SPARE = """
import os, time
from rackrun.protocol.events import WorkerReady
from rackrun.protocol import boot
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
LEAVES_WHEN_LET = (
    sys.executable,
    "-E",
    "-s",
    "-c",
    """
import os, signal, sys
folder = sys.argv[1]
def leave(*_):
    open(f"{folder}/told", "w").write("yes")
    open(f"{folder}/may-go", "rb", 0).read(1)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(f"{folder}/ready", "w").write("yes")
while True:
    signal.pause()
""",
)
QUICK = FillerPauses(first_s=0.01, most_s=0.04, at_once_s=1000.0, forgotten_after_s=1000.0)


def plan(*spares: tuple[int, int]) -> ResumeGeneration:
    members = tuple(
        Member(rank=Rank(rank), slot=SlotId(f"tray-0/{index}"), incarnation=Incarnation(incarnation))
        for rank, (index, incarnation) in enumerate(spares)
    )
    found = GenerationPlan(
        generation=Generation(2),
        world_size=len(members),
        members=members,
        store="127.0.0.1:1",
        layout=Generation(0),
        full=len(members),
    )
    return ResumeGeneration(plan=found, because="a test")


async def begin(rig: Rig, *command: str, slots: int = 1, last_in_line: bool = False, **config: Any) -> None:
    """A filler that is last in line would do nothing at all beside busy processes; most tests wait for it to do something."""
    await rig.start(SPARE, slots=slots, filler=FillerConfig(command=command, last_in_line=last_in_line, **config))


async def spare_waits(rig: Rig, index: int = 0, incarnation: int = 1) -> None:
    """With a filler beside it."""
    await rig.start_worker(index, incarnation, spare=True)
    await told(rig, index, incarnation, "running")


async def told(rig: Rig, index: int, incarnation: int, state: str, start: int = 0) -> FillerState:
    def wanted(message: object) -> bool:
        return (
            isinstance(message, FillerState)
            and (message.slot, message.incarnation, message.state) == (f"tray-0/{index}", incarnation, state)
            and start in (0, message.start)
        )

    found = (await rig.coordinator.wait(wanted, f"filler {state} beside {index}")).message
    assert isinstance(found, FillerState)
    return found


async def told_of_plan(rig: Rig, index: int, incarnation: int) -> float:
    return float((await rig.line(f"told tray-0/{index} {incarnation} at ")).split()[-1])


async def appears(rig: Rig, path: Path) -> str:
    """Its content, once there is some."""
    return await rig.eventually(lambda: path.exists() and path.read_text(), f"{path} never came")


def is_stopped(stat: int) -> bool:
    found = proc.read_stat(stat)
    assert found is not None
    return found.stopped


@contextlib.contextmanager
def let_go(rig: Rig) -> Iterator[None]:
    """What is in the pipe stays there, also where whoever reads is stopped, or hears a signal, just as it opens its end."""
    end = os.open(rig.folder / "may-go", os.O_RDWR)
    try:
        os.write(end, b"x")
        yield
    finally:
        os.close(end)


def groups_of(rig: Rig) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/rackrun-filler-{rig.agent}-*") if path.is_dir()]


def command_line(pid: int) -> list[bytes]:
    """[] when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def alive_of_fillers(rig: Rig) -> list[int]:
    """Below the agent, or escaped: by the marks of all fillers and of this rig, or by the daemon's words."""
    found = []
    rigs = f"RACKRUN_TEST_RIG={rig.folder}".encode()
    daemon = [DAEMON.encode(), str(rig.folder).encode()]
    for name in filter(str.isdigit, os.listdir("/proc")):
        words = command_line(int(name))
        try:
            marks = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        filler = rigs in marks and any(mark.startswith(f"{MARK}=".encode()) for mark in marks)
        if filler or words[-3:-1] == daemon:
            found.append(int(name))
    return [pid for pid in found if rig.alive(pid)]


# -- it goes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_cgroups", [True, pytest.param(False, marks=pytest.mark.stories)])
@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.stories)])
async def test_whatever_a_filler_does_nothing_of_it_is_left(
    rig: Rig, rounds: int, in_cgroups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_cgroups:
        monkeypatch.setattr(Cgroup, "make", lambda _name: None)
    slots = range(len(KINDS))
    await begin(rig, *NASTY, str(rig.folder), slots=len(KINDS))
    for round_ in range(rounds):
        workers = [(index, round_ * len(KINDS) + index + 1) for index in slots]  # no two have the same incarnation
        for index, incarnation in workers:
            await spare_waits(rig, index, incarnation)
            await appears(rig, rig.folder / f"ready-{index}-{incarnation}")
        await rig.coordinator.send(plan(*workers))
        ends = [await told(rig, index, incarnation, "ended") for index, incarnation in workers]
        assert not alive_of_fillers(rig)
        assert not groups_of(rig)
        print({kind.__name__: one.gone_s for kind, one in zip(KINDS, ends, strict=True)}, file=sys.stderr)
        assert {one.because for one in ends} == {"the spare is needed"}
        for index, incarnation in workers:
            await told_of_plan(rig, index, incarnation)
    assert await rig.end() == 0


async def test_it_is_told_before_it_is_killed_and_the_plan_waits_for_nobody(rig: Rig) -> None:
    await begin(rig, *LEAVES_WHEN_LET, str(rig.folder), grace_s=1000.0)
    os.mkfifo(rig.folder / "may-go")
    await spare_waits(rig)
    await appears(rig, rig.folder / "ready")
    await rig.coordinator.send(plan((0, 1)))
    await told_of_plan(rig, 0, 1)
    await appears(rig, rig.folder / "told")
    assert alive_of_fillers(rig)
    with let_go(rig):
        end = await told(rig, 0, 1, "ended")
    assert end.because == "the spare is needed"
    assert await rig.end() == 0


def test_the_grace_time_and_the_agents_patience_with_a_cage_leave_time_to_die_within_the_second() -> None:
    assert HOLD_S + GRACE_S_MAX + LATE_S <= 0.8


async def test_a_filler_that_is_held_is_stopped_with_all_below_it_and_ends_with_the_cages_agent() -> None:
    script = "import os, signal\nos.fork()\nos.write(1, b'%d\\n' % os.getpid())\nsignal.pause()"
    order = FillerOrder(
        command=[sys.executable, "-c", script], hold_s=1000.0, grace_s=1000.0, cpus=[], cgroup="", last_in_line=False
    )
    pipe = subprocess.PIPE
    cage = await asyncio.create_subprocess_exec(
        sys.executable, *CAGE, str(os.getpid()), json.dumps(order), stdin=pipe, stdout=pipe
    )
    assert cage.stdin is not None
    assert cage.stdout is not None
    pids = [int(await cage.stdout.readline()) for _ in range(2)]
    stats = [os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY) for pid in pids]
    cage.stdin.write(HELD)
    await eventually(lambda: all(is_stopped(stat) for stat in stats), lambda: "not stopped")
    cage.stdin.close()
    assert await cage.wait() == 128 + signal.SIGKILL
    assert [proc.read_stat(stat) for stat in stats] == [None, None]
    for stat in stats:
        os.close(stat)


@pytest.mark.parametrize("killed", ["cage", "agent"])
async def test_nobody_stays_stopped_when_who_holds_a_filler_is_killed(
    rig: Rig, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rackrun.agent.fillers.filler_runner, "HOLD_S", 1000.0)
    monkeypatch.setattr(Cgroup, "make", lambda _name: None)
    await begin(rig, "sh", "-c", "setsid sleep 603 & exec sleep 604")
    await spare_waits(rig)
    below = [await rig.eventually(partial(sleeper, rig, word), f"no sleep {word}") for word in ("603", "604")]
    stats = [os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY) for pid in below]
    await rig.coordinator.send(plan((0, 1)))
    await rig.eventually(lambda: all(is_stopped(stat) for stat in stats), "not stopped")
    if killed == "agent":
        os.kill(rig.agent, signal.SIGKILL)
        await rig.agent_exit()
        await rig.all_gone(below)
    else:
        os.kill(next(pid for pid in proc.children(rig.agent) if set(below) & {*proc.children(pid)}), signal.SIGKILL)
        assert (await told(rig, 0, 1, "ended")).because == "the spare is needed"
        assert [proc.read_stat(stat) for stat in stats] == [None, None]
        assert await rig.end() == 0
    for stat in stats:
        os.close(stat)


def test_a_process_that_may_not_be_killed_saves_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = os.kill
    with subprocess.Popen(SLEEP) as others, subprocess.Popen(SLEEP) as ours:

        def as_told(pid: int, number: int) -> None:
            if pid == others.pid:
                raise PermissionError
            kill(pid, number)

        monkeypatch.setattr(os, "kill", as_told)
        finish_off([others.pid, ours.pid])
        assert ours.wait() == -signal.SIGKILL
        assert others.poll() is None
        monkeypatch.undo()
        others.kill()


def test_a_launcher_does_not_wait_for_a_process_that_it_may_not_kill() -> None:
    kill = """if True:
        import os, subprocess
        from rackrun.launch.run.local_agents import LocalAgents
        with subprocess.Popen(["sleep", "600"]) as others:
            def refuse(*_):
                raise PermissionError
            os.kill, kill = refuse, os.kill
            LocalAgents([]).kill()
            os.kill = kill
            assert others.poll() is None
            others.kill()
    """
    subprocess.run([sys.executable, "-c", kill], check=True)


async def test_a_filler_that_kills_its_cage_leaves_nobody_behind_and_is_started_again(rig: Rig) -> None:
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
async def test_a_filler_goes_with_its_spare(rig: Rig, how: str) -> None:
    await begin(rig, *SLEEP)
    await spare_waits(rig)
    if how == "fenced":
        await rig.fence(0, 1)
    elif how == "released":
        await rig.coordinator.send(ReleaseWorkers(workers=(Who(SlotId("tray-0/0"), Incarnation(1)),)))
    else:
        os.kill(await rig.number("pid"), signal.SIGKILL)
    end = await told(rig, 0, 1, "ended")
    assert end.gone_s is not None
    assert not alive_of_fillers(rig)
    await rig.end()


async def test_no_filler_outlives_a_killed_agent(rig: Rig) -> None:
    await begin(rig, *NASTY, str(rig.folder), slots=3)
    for index in range(3):
        await spare_waits(rig, index)
        await appears(rig, rig.folder / f"ready-{index}-1")
    below = proc.descendants(rig.agent)
    os.kill(rig.agent, signal.SIGKILL)
    await rig.agent_exit()
    await rig.all_gone(below)
    assert not alive_of_fillers(rig)


async def test_at_the_end_of_the_job_fillers_are_told_gone_and_counted(rig: Rig) -> None:
    await begin(rig, sys.executable, "-c", "import hashlib\nwhile True: hashlib.sha256(bytes(1 << 20))", sample_s=0.05)
    await spare_waits(rig)
    await rig.coordinator.wait(lambda m: isinstance(m, FillerState) and m.cpu_s > 0.0, "processor time")
    assert await rig.end() == 0
    end = await told(rig, 0, 1, "ended")
    assert end.because in ("the job ends", "the spare is gone")
    assert end.cpu_s > 0.0
    assert end.seconds > 0.0


# -- it comes --------------------------------------------------------------------------------------------------------


async def test_the_next_spare_in_the_slot_has_a_filler_again_and_a_rank_has_none(rig: Rig) -> None:
    await begin(rig, *SLEEP, slots=2)
    await rig.start_worker(1, 2)  # no spare
    await spare_waits(rig, 0, 1)
    await rig.coordinator.send(plan((0, 1)))
    await told(rig, 0, 1, "ended")
    await rig.fence(0, 1)
    await rig.coordinator.exit_of(1)
    await spare_waits(rig, 0, 3)
    assert not [
        t for t in rig.coordinator.received if isinstance(t.message, FillerState) and t.message.incarnation == 2
    ]
    assert await rig.end() == 0


async def test_a_spare_that_is_in_the_plan_before_it_is_ready_has_no_filler(rig: Rig) -> None:
    await begin(rig, *SLEEP)
    await rig.coordinator.send(plan((0, 1)), rig.start_command(0, 1, spare=True))
    await rig.coordinator.wait(lambda m: type(m).__name__ == "WorkerReady", "WorkerReady")
    await told_of_plan(rig, 0, 1)
    assert await rig.end() == 0
    assert not [timed for timed in rig.coordinator.received if isinstance(timed.message, FillerState)]


@pytest.mark.stories
async def test_a_filler_that_ends_is_started_again_and_after_ten_times_at_once_given_up(rig: Rig) -> None:
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


@pytest.mark.stories
async def test_a_filler_that_ends_after_a_while_is_started_again_any_number_of_times(rig: Rig) -> None:
    await begin(rig, "true", pauses=FillerPauses(first_s=0.01, most_s=0.01, at_once_s=0.0))
    await spare_waits(rig)
    await told(rig, 0, 1, "running", start=12)
    assert await rig.end() == 0


async def test_when_the_job_has_ended_nothing_is_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_args: object, **_more: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(subprocess, "Popen", no_room)
    logs = WorkerLogs(LogConfig(directory=os.devnull), "a-run", 1)
    pauses = FillerPauses(first_s=0.0, most_s=0.0, at_once_s=0.0)
    fillers = Fillers(FillerConfig(command=SLEEP, pauses=pauses), 1, logs, lambda _index: NOWHERE, gpus=0)
    heard: list[FillerState] = []
    three = asyncio.Event()

    def tell(told: FillerState) -> None:
        heard.append(told)
        if len(heard) == 3:
            three.set()

    fillers.tell = tell
    fillers.spare_waits(SlotId("tray-0/0"), Incarnation(1))
    await three.wait()
    await fillers.stop()
    before = len(heard)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(heard) == before
    logs.close()


async def test_a_program_that_has_vanished_since_the_launch_is_given_up_and_named(rig: Rig) -> None:
    await begin(rig, "/no/such/program", pauses=QUICK)
    await spare_waits(rig)
    assert (await told(rig, 0, 1, "given up")).because == "exit code 127"
    (log,) = (rig.folder / "logs").glob("*/filler/0.log")
    assert "cannot run the filler /no/such/program: No such file or directory" in log.read_text()
    assert await rig.end() == 0


async def test_it_has_its_slots_gpu_and_none_of_a_ranks_environment(rig: Rig) -> None:
    code = (
        "import json, os, signal, sys; print(json.dumps({'env': dict(os.environ),"
        "'oom': open('/proc/self/oom_score_adj').read().strip(), 'leader': os.getsid(0) == os.getpid(),"
        "'ignored': [n for n in (1, 2, 3, 15) if signal.getsignal(n) == signal.SIG_IGN], 'in': sys.stdin.read()}), flush=True);"
        "signal.pause()"
    )
    await begin(rig, sys.executable, "-c", code, slots=2)
    await spare_waits(rig, 1)
    found = json.loads(await rig.eventually(lambda: log_of(rig, 1), "its output"))
    assert (found["oom"], found["leader"], found["in"], found["ignored"]) == ("1000", True, "", [])
    assert found["env"][MARK] == "tray-0/1:1:1"
    assert found["env"]["CUDA_VISIBLE_DEVICES"] == os.environ.get("CUDA_VISIBLE_DEVICES", "1")
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & found["env"].keys() - os.environ.keys()
    assert await rig.end() == 0


@pytest.mark.parametrize(
    ("index", "gpus", "environment", "wanted"),
    [
        (2, 4, {}, "2"),
        (2, 4, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, "5"),
        (2, 2, {"CUDA_VISIBLE_DEVICES": "7,6"}, ""),
        (2, 1, {SHARE: "1"}, "0"),
        (3, 2, {SHARE: "1", "CUDA_VISIBLE_DEVICES": "7,6"}, "6"),
        (3, 0, {SHARE: "1"}, "3"),
    ],
)
def test_a_filler_sees_the_gpu_that_its_slots_worker_has(
    index: int, gpus: int, environment: dict[str, str], wanted: str
) -> None:
    assert rackrun.agent.fillers.filler_runner._device(index, gpus, environment)["CUDA_VISIBLE_DEVICES"] == wanted


def sleeper(rig: Rig, word: str) -> int:
    """0: there is none."""
    below = proc.descendants(rig.agent)
    return next((pid for pid in below if command_line(pid)[:2] == [b"sleep", word.encode()]), 0)


def autogroup_nice(pid: int) -> str:
    """ "" where the kernel does not group processes by session."""
    group = Path(f"/proc/{pid}/autogroup")
    return group.read_text().rpartition(" ")[2].strip() if group.exists() else ""


def log_of(rig: Rig, index: int) -> str:
    """Whole lines of the filler's output; "" while there is nothing."""
    text = "".join(path.read_text() for path in (rig.folder / "logs").glob(f"*/filler/{index}.log"))
    return text if text.endswith("\n") else ""


def is_last_in_line(pid: int) -> bool:
    return autogroup_nice(pid) in ("", "19")


async def test_it_is_last_in_line_with_all_sessions_that_it_makes(rig: Rig) -> None:
    # The only one here whose filler is starved beside busy processes: all that it has to do is to be there.
    await begin(rig, "sh", "-c", "setsid sleep 601 & exec sleep 602", last_in_line=True)
    await spare_waits(rig)
    for word in ("601", "602"):
        pid = await rig.eventually(partial(sleeper, rig, word), f"no sleep {word}")
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.sched_getscheduler(pid) == (os.SCHED_IDLE if idle_can_be_left() else os.SCHED_OTHER)
        await rig.eventually(partial(is_last_in_line, pid), "its session is not last in line")
    assert await rig.end() == 0
    assert not alive_of_fillers(rig)


# -- where it holds a GPU ----------------------------------------------------------------------------------------------


async def test_where_workers_have_gpus_the_plan_comes_when_the_filler_is_gone(rig: Rig) -> None:
    def as_on_a_gpu_host() -> int:
        torch.cuda.device_count = lambda: 1
        rackrun.agent.workers.worker_handle.HELD_S = 1000.0
        filler = FillerConfig(command=(*LEAVES_WHEN_LET, str(rig.folder)), grace_s=1000.0, last_in_line=False)
        return rig.run(SPARE, slots=1, filler=filler)

    rig.agent = rig.fork(as_on_a_gpu_host)
    rig.store = (await rig.coordinator.joined()).store
    os.mkfifo(rig.folder / "may-go")
    await spare_waits(rig)
    await appears(rig, rig.folder / "ready")
    await rig.coordinator.send(plan((0, 1)))
    await appears(rig, rig.folder / "told")
    before = time.monotonic()
    with let_go(rig):
        await told(rig, 0, 1, "ended")
    assert await told_of_plan(rig, 0, 1) > before
    assert await rig.end() == 0


def test_what_is_told_of_a_filler_travels_as_it_is() -> None:
    message = FillerState(
        slot=SlotId("tray-0/1"), incarnation=Incarnation(3), start=1, state="running", seconds=1.0, cpu_s=0.5
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FillerState) == message
