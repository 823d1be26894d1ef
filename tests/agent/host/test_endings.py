"""Nobody is left behind, whoever dies, and an end is seen before the kernel is done with it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import rackrun
from rackrun.agent.host import proc
from rackrun.agent.tray import worker_liveness
from rackrun.protocol.agent_config import ScriptConfig
from rackrun.protocol.commands import DismissTray
from rackrun.protocol.events import DepartureAnnounced, StopRequested, TrayJoined, WorkerExited, WorkerStalled
from rackrun.protocol.wire import PROTOCOL
from tests.agent.conftest import Rig, failure_of

SLEEPER = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=os.environ["RANK"] == "1")
print(f"child{os.environ['RANK']}={child.pid}", flush=True)
time.sleep(600)
"""

HEARTBEATS = """
import os, threading, time
from rackrun.protocol.ids import Position
from rackrun.protocol import boot
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
page = HeartbeatPage(boot.current().page_fd)
def tick():
    while True:
        page.tick()
        time.sleep(0.05)
threading.Thread(target=tick, daemon=True).start()
page.new_generation(1)
page.enter(Activity.STEP, Position(7), deadline_ms=300)
page.collective_entered()
page.collective_entered()
print(f"pid={os.getpid()}", flush=True)
time.sleep(600)
"""


async def two_sleepers(rig: Rig) -> list[int]:
    """Two workers and their children, one of which is in a session of its own. All processes below the agent."""
    await rig.coordinator.send(rig.start_command(0, 1), rig.start_command(1, 2))
    await rig.number("child0")
    await rig.number("child1")
    below = proc.descendants(rig.agent)
    assert len(below) == 5
    return below


async def test_stop_ends_workers_and_all_their_children(rig: Rig) -> None:
    await rig.start(SLEEPER)
    below = await two_sleepers(rig)
    assert await rig.end(1) == 0
    assert not [pid for pid in below if rig.alive(pid)]
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGTERM


async def test_a_worker_that_ignores_sigterm_is_killed_after_a_second_when_the_job_failed(rig: Rig) -> None:
    await rig.start(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
        grace_s=600.0,  # it is not that which it gets
    )
    await rig.start_worker()
    await rig.line("deaf")
    before = time.monotonic()
    assert await rig.end(1) == 0
    assert time.monotonic() - before > 0.9
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL


async def test_nobody_outlives_a_killed_agent(rig: Rig) -> None:
    await rig.start(SLEEPER)
    below = await two_sleepers(rig)
    os.kill(rig.agent, signal.SIGKILL)
    await rig.agent_exit()
    await rig.all_gone(below)


async def test_nobody_outlives_a_killed_launcher(rig: Rig) -> None:
    def launch() -> int:
        agent = rig.fork(lambda: rig.run(SLEEPER))
        (rig.folder / "agent").write_text(str(agent))
        os.waitpid(agent, 0)
        return 0

    launcher = rig.fork(launch)
    joined = await rig.coordinator.joined()
    rig.store = joined.store
    agent = int((rig.folder / "agent").read_text())
    rig.agent = launcher
    await rig.coordinator.send(rig.start_command(0, 1), rig.start_command(1, 2))
    await rig.number("child0")
    await rig.number("child1")
    below = proc.descendants(launcher)
    assert agent in below
    os.kill(launcher, signal.SIGKILL)
    await rig.agent_exit()
    await rig.all_gone(below)


async def test_a_killed_fork_server_costs_its_workers_but_not_the_tray(rig: Rig) -> None:
    await rig.start(SLEEPER)
    below = await two_sleepers(rig)
    os.kill(below[0], signal.SIGKILL)
    for incarnation in (1, 2):
        assert (await rig.coordinator.exit_of(incarnation)).signal == signal.SIGKILL
    await rig.all_gone(below)
    rig.out.write_text("")
    await rig.start_worker(0, 3)
    await rig.number("child0")
    assert await rig.end() == 0


async def test_a_stopped_fork_server_does_not_keep_anybody_alive(rig: Rig) -> None:
    await rig.start(SLEEPER)
    below = await two_sleepers(rig)
    os.kill(below[0], signal.SIGSTOP)
    os.kill(rig.agent, signal.SIGKILL)
    await rig.agent_exit()
    await rig.all_gone(below)


@pytest.mark.parametrize("how", ["script", "program"])  # by its lifeline, and by polling where there is none
@pytest.mark.parametrize("size_mb", [0, 900])
async def test_a_kill_is_seen_before_the_memory_is_torn_down(rig: Rig, size_mb: int, how: str) -> None:
    script = rig.script(
        f"""
        import os, time
        block = bytearray({size_mb} << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        os.nice(10)  # beside other programs its end takes longer, and nobody else's does
        print(f"pid={{os.getpid()}}", flush=True)
        time.sleep(600)
        """
    )
    if how == "program":
        script = ScriptConfig(path=sys.executable, args=(script.path,), no_python=True)
    await rig.start(script)
    await rig.start_worker()
    pid = await rig.number("pid")
    gone: list[float] = []
    pidfd, loop = os.pidfd_open(pid), asyncio.get_running_loop()

    def seen_gone() -> None:
        gone.append(time.monotonic())
        loop.remove_reader(pidfd)

    loop.add_reader(pidfd, seen_gone)
    try:
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ended, seen = await rig.coordinator.timed_exit_of(1)
        print(f"{how}, {size_mb} MB resident: told after {(seen - killed) * 1000:.1f} ms")  # pytest -s shows it
        assert ended.signal == signal.SIGKILL
        assert not size_mb or not gone or seen < gone[0], "it was waited for until its memory was torn down"
        assert await rig.end(1) == 0
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def test_a_worker_without_progress_is_stalled_and_a_stopped_one_silent(rig: Rig) -> None:
    await rig.start(HEARTBEATS, stall_floor_ms=200)
    await rig.start_worker()
    pid = await rig.number("pid")
    stalled = await rig.coordinator.said(WorkerStalled)
    assert (stalled.step, stalled.collective, stalled.silent) == (7, 2, False)
    assert stalled.for_ms >= 300
    os.kill(pid, signal.SIGSTOP)
    silent = await rig.coordinator.said(WorkerStalled, lambda m: m.silent)
    assert silent.for_ms > 200
    told = [timed.message for timed in rig.coordinator.received if isinstance(timed.message, WorkerStalled)]
    stalls = [one.for_ms for one in told if not one.silent]
    assert all(b - a > 250 for a, b in itertools.pairwise(stalls)), "told more often than once a deadline"
    await rig.fence(0, 1)
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    assert await rig.end(1) == 0


@pytest.mark.parametrize("deadline_ms", [0, 600])
async def test_a_stopped_worker_is_told_of_ever_more_rarely_and_that_it_runs_again_at_once(
    rig: Rig, deadline_ms: int
) -> None:
    await rig.start(HEARTBEATS.replace("deadline_ms=300", f"deadline_ms={deadline_ms}"), stall_floor_ms=200)
    await rig.start_worker()
    pid = await rig.number("pid")
    os.kill(pid, signal.SIGSTOP)
    third = await rig.coordinator.said(WorkerStalled, lambda m: m.silent and m.for_ms > 1_200)
    told = [timed.message for timed in rig.coordinator.received if isinstance(timed.message, WorkerStalled)]
    pauses = [b.for_ms - a.for_ms for a, b in itertools.pairwise(told)]
    assert told[-1] is third
    assert all(one.silent and not one.over for one in told)
    assert all(b > 1.5 * a for a, b in itertools.pairwise(pauses)), "each pause is about twice the one before"
    os.kill(pid, signal.SIGCONT)
    over = await rig.coordinator.said(WorkerStalled, lambda m: m.over)
    assert not over.silent
    assert await rig.end(1) == 0


async def test_a_stall_of_a_worker_whose_control_thread_runs_is_not_taken_back(rig: Rig) -> None:
    await rig.start(HEARTBEATS, stall_floor_ms=200)
    await rig.start_worker()
    await rig.coordinator.said(WorkerStalled, lambda m: m.for_ms > 900)
    told = [timed.message for timed in rig.coordinator.received if isinstance(timed.message, WorkerStalled)]
    assert not [one for one in told if one.over]
    assert await rig.end(1) == 0


async def test_who_is_idle_where_little_was_observed_is_told_of_early(rig: Rig) -> None:
    limits = "deadline_ms=600_000, busy_ms=1_800_000, least_ms=300"
    await rig.start(HEARTBEATS.replace("deadline_ms=300", limits).replace("page.collective_entered()\n", ""))
    await rig.start_worker()
    told = await rig.coordinator.said(WorkerStalled)
    assert (told.early, told.silent, told.waiting, told.step) == (True, False, False, 7)
    assert told.for_ms >= 300
    assert await rig.end(1) == 0


async def test_a_stopped_worker_is_silent_before_any_step_time_is_known(rig: Rig) -> None:
    await rig.start(HEARTBEATS.replace("deadline_ms=300", "deadline_ms=0"), stall_floor_ms=200)
    await rig.start_worker()
    pid = await rig.number("pid")
    os.kill(pid, signal.SIGSTOP)
    silent = await rig.coordinator.said(WorkerStalled)
    assert silent.silent, "without any deadline it is known by that alone"
    assert await rig.end(1) == 0


async def test_a_plain_script_whose_interpreter_does_not_run_is_silent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_liveness, "_SILENCE_NS", 700_000_000)  # a minute
    await rig.start(
        """
        import ctypes
        ctypes.PyDLL(None).sleep(600)
        """
    )
    await rig.start_worker()
    stalled = await rig.coordinator.said(WorkerStalled)
    assert (stalled.silent, stalled.unit) == (True, "")
    assert "its interpreter does not run" in stalled.where
    assert await rig.end(1) == 0


async def test_a_plain_script_that_sleeps_is_not(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_liveness, "_SILENCE_NS", 700_000_000)
    await rig.start("import time; time.sleep(4); print('awake')")
    await rig.start_worker()
    await rig.line("awake")
    assert not [one for one in rig.coordinator.received if isinstance(one.message, WorkerStalled)]
    assert await rig.end(0) == 0


async def test_a_refused_agent_says_why_and_exits_with_2(rig: Rig) -> None:
    rig.coordinator.refuse = (409, "tray-0 is taken")
    rig.launch("print('ran')")
    assert await rig.agent_exit() == 2
    assert "409 tray-0 is taken" in rig.err.read_text()


async def test_an_agent_whose_tray_has_another_one_says_so_once_and_asks_again(rig: Rig) -> None:
    rig.coordinator.refuse = (503, "tray-0 has an agent")
    rig.launch("print('ran')")
    said = await rig.line("does not take this tray yet", rig.err)
    assert "503 tray-0 has an agent" in said
    rig.coordinator.refuse = None
    await rig.coordinator.joined()
    assert rig.err.read_text().count("does not take") == 1
    assert await rig.end(0) == 0


async def test_a_broken_connection_is_taken_up_again_and_nothing_is_lost(rig: Rig) -> None:
    await rig.start(
        """
        import sys, time
        from rackrun.protocol.events import WorkerReady
        from rackrun.protocol import boot
        from rackrun.link.channel import WorkerChannel
        me = boot.current()
        channel = WorkerChannel(me.channel_fd)
        channel.receive()
        channel.send(WorkerReady(slot=me.slot, incarnation=me.incarnation))
        channel.receive()
        """
    )
    await rig.start_worker()
    await rig.coordinator.hang_up()
    await rig.coordinator.connections(2)
    first, second = rig.coordinator.queries
    assert (first["protocol"], first["tray"], "resume" in first) == (str(PROTOCOL), "tray-0", False)
    assert second["resume"] == rig.coordinator.session
    await rig.release(("tray-0/0", 1))
    await rig.coordinator.wait(lambda m: type(m).__name__ == "WorkerReady", "WorkerReady")
    assert len([t for t in rig.coordinator.received if isinstance(t.message, TrayJoined)]) == 1
    assert await rig.end() == 0


async def test_an_agent_whose_session_is_unknown_ends_its_workers(rig: Rig) -> None:
    await rig.start(SLEEPER)
    below = await two_sleepers(rig)
    rig.coordinator.refuse = (409, "unknown session")
    await rig.coordinator.hang_up()
    assert await rig.agent_exit() == 3
    assert not [pid for pid in below if rig.alive(pid)]
    assert "unknown session" in rig.err.read_text()


async def test_ctrl_c_at_the_terminal_is_left_to_the_launcher(rig: Rig) -> None:
    await rig.start(SLEEPER, grace_s=600.0)  # else SIGTERM ends the workers in the middle of this test
    below = await two_sleepers(rig)
    for pid in (rig.agent, below[0]):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
    await rig.start_worker(2, 3)  # still served
    await rig.number("child2")
    assert all(rig.alive(pid) for pid in below)
    assert not [t for t in rig.coordinator.received if isinstance(t.message, StopRequested)]
    assert await rig.end() == 0


@pytest.mark.parametrize("grace_s", [600.0, 0.5], ids=["told at once", "killed in the end"])
async def test_a_worker_that_lingers_after_its_exception_is_told_at_once_and_killed_in_the_end(
    rig: Rig, grace_s: float
) -> None:
    await rig.start(
        """
        import atexit, os, threading, time
        atexit.register(lambda: (print(f"lingers={os.getpid()}", flush=True), time.sleep(600)))
        raise RuntimeError("over")
        """,
        grace_s=grace_s,
    )
    await rig.start_worker()
    ended = await rig.coordinator.exit_of(1)
    assert failure_of(ended).message == "over"
    pid = await rig.number("lingers")
    if grace_s > 100:
        assert rig.alive(pid), "its end was waited for"
        assert await rig.end(1) == 0
        return
    await rig.all_gone([pid])
    await rig.start_worker(0, 2)
    await rig.coordinator.exit_of(2)
    exits = [timed for timed in rig.coordinator.received if isinstance(timed.message, WorkerExited)]
    assert len(exits) == 2, "each end is told once"
    assert await rig.end(1) == 0


async def test_a_worker_that_speaks_nonsense_is_killed(rig: Rig) -> None:
    await rig.start(
        """
        import os, time
        from rackrun.protocol import boot
        os.write(boot.current().channel_fd, bytes([255] * 100))
        time.sleep(600)
        """
    )
    await rig.start_worker()
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    assert "is killed" in rig.err.read_text()
    assert await rig.end(1) == 0


async def test_stop_does_not_wait_for_a_store_that_does_not_answer(rig: Rig) -> None:
    await rig.start("print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and says nothing
        await rig.start_worker(store=f"127.0.0.1:{mute.getsockname()[1]}")
        assert await rig.end(3) == 0  # while it still says nothing
    assert (await rig.coordinator.exit_of(1)).failure is None
    assert rig.out.read_text() == ""


async def announced(rig: Rig) -> DepartureAnnounced:
    os.kill(rig.agent, signal.SIGTERM)
    return await rig.coordinator.said(DepartureAnnounced)


async def test_an_agent_that_is_told_to_leave_says_so_and_works_on_until_it_is_dismissed(rig: Rig) -> None:
    await rig.start("import time\nprint('ran', flush=True)\ntime.sleep(600)", grace_s=600.0)
    told = await announced(rig)
    assert (told.tray, told.because, told.exit_code) == ("tray-0", "SIGTERM to the agent of tray-0", 143)
    await rig.start_worker()
    await rig.line("ran")
    await rig.fence(0, 1)
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    await rig.coordinator.send(DismissTray(tray=told.tray, because=told.because))
    assert await rig.agent_exit() == 0


@pytest.mark.parametrize(("grace_s", "again"), [(0.2, False), (600.0, True)], ids=["grace over", "told twice"])
async def test_an_agent_whose_time_is_up_ends_its_workers_and_leaves(rig: Rig, grace_s: float, again: bool) -> None:
    await rig.start(SLEEPER, grace_s=grace_s)
    below = await two_sleepers(rig)
    await announced(rig)
    if again:
        os.kill(rig.agent, signal.SIGTERM)
    assert await rig.agent_exit() == 0
    await rig.all_gone(below)
    await rig.coordinator.exit_of(1)
    await rig.coordinator.exit_of(2)


async def test_an_agent_of_its_own_passes_sigint_on_to_the_coordinator(rig: Rig, tmp_path: Path) -> None:
    config = rig.config("print('standalone ran')")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    environment = {**os.environ, "PYTHONPATH": str(Path(rackrun.__file__).parents[1])}
    command = [sys.executable, "-m", "rackrun.agent", str(tmp_path / "config.json")]
    with rig.out.open("wb") as out, rig.err.open("wb") as err:
        agent = subprocess.Popen(command, stdout=out, stderr=err, env=environment)  # noqa: ASYNC220 - milliseconds
    rig.agent = agent.pid
    agent.returncode = 0  # the rig reaps it
    rig.store = (await rig.coordinator.joined()).store
    await rig.start_worker()
    assert (await rig.coordinator.exit_of(1)).exit_code == 0
    os.kill(rig.agent, signal.SIGINT)
    stop = await rig.coordinator.said(StopRequested)
    assert (stop.because, stop.exit_code) == ("SIGINT to the agent of tray-0", 130)
    assert await rig.end() == 0
    assert rig.out.read_text() == "standalone ran\n"
    assert rig.err.read_text() == ""
