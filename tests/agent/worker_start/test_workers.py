"""How workers start, what they are given, and how their ends are told."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import resource
import signal
import tempfile
import weakref
from pathlib import Path

import aiohttp
import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import rackrun
from rackrun.link.exchange import Exchange
from rackrun.protocol.agent_config import LogConfig, ScriptConfig
from rackrun.protocol.commands import BreakGeneration, FenceWorker, Worker
from rackrun.protocol.ids import Generation, Incarnation, SlotId, Step
from rackrun.protocol.wire import Logged, UnitCommitted
from tests.agent.conftest import Rig, failure_of


async def test_a_worker_prints_and_its_exit_is_told(rig: Rig) -> None:
    await rig.start("print('hello')")
    await rig.start_worker()
    ended = await rig.coordinator.exit_of(1)
    assert (ended.exit_code, ended.signal, ended.failure, ended.step) == (0, None, None, -1)
    assert await rig.end() == 0
    assert rig.out.read_text() == "hello\n"
    assert rig.err.read_text() == ""


async def test_a_worker_has_all_of_torchruns_environment(rig: Rig) -> None:
    await rig.start(
        "import json, os; print('env=' + json.dumps(dict(os.environ)))",
        env={"OMP_NUM_THREADS": "2", "MINE": "yes"},
        max_restarts=5,
    )
    await rig.start_worker(2, world_size=3, restarts=1)
    env = json.loads((await rig.line("env=")).removeprefix("env="))
    source = inspect.getsource(LocalElasticAgent._start_workers) + inspect.getsource(
        LocalElasticAgent._set_local_rank_env
    )
    names = set(re.findall(r'"([A-Z_]+)":', source)) | {"LOCAL_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE"}
    assert names >= {"RANK", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE"}, "torch's source has moved"
    assert names <= set(env)
    wanted = {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "ROLE_RANK": "2",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "a-run",
        "OMP_NUM_THREADS": "2",
        "MINE": "yes",
    }
    assert {name: env[name] for name in wanted} == wanted
    await rig.coordinator.exit_of(1)
    assert await rig.end() == 0


async def test_a_script_finds_itself_as_under_python(rig: Rig) -> None:
    rig.folder.joinpath("beside.py").write_text("here = True\n")
    script = rig.script(
        """
        import os, random, signal, sys, threading, beside, torch, numpy
        print("argv", sys.argv[1:], __name__, __file__ == sys.argv[0], sys.modules["__main__"].__dict__ is globals())
        print("path", sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
        print("signals", signal.getsignal(signal.SIGALRM) is signal.SIG_DFL, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        print("session", os.getsid(0) == os.getpid() == os.getpgid(0), sys.stdin.read() == "")
        print("threads", torch.get_num_threads(), threading.current_thread().name)
        print("torch seed", torch.initial_seed())
        print("random", random.random(), numpy.random.rand())
        fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
        print("fds", sorted(link.split(":")[0].split(" ")[0].split("-tray")[0] for link in fds if "proc" not in link))
        print("done")
        """
    )
    script = ScriptConfig(path=script.path, args=("--rank", "${local_rank}", "x"))
    await rig.start(script, env={"OMP_NUM_THREADS": "2"})
    await rig.start_worker(1, 1)
    await rig.coordinator.exit_of(1)
    assert await rig.line("argv") == "argv ['--rank', '1', 'x'] __main__ True True", rig.err.read_text()
    assert await rig.line("path") == "path True"
    assert await rig.line("signals") == "signals True True"
    assert await rig.line("session") == "session True True"
    assert await rig.line("threads") == "threads 2 MainThread"
    assert await rig.line("torch seed") == "torch seed 67280421310721"
    assert await rig.line("fds") == (
        "fds ['/memfd', '/memfd', '/memfd', '/memfd', 'socket', 'socket']"
    )  # snapshots, the page and its mapping's, channel and its copy
    await rig.start_worker(2, 2)
    await rig.coordinator.exit_of(2)
    draws = [line for line in rig.out.read_text().splitlines() if line.startswith("random")]
    assert len(set(draws)) == 2, "two workers drew the same random numbers"
    assert await rig.end() == 0


async def test_a_module_and_a_program_run_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.folder.joinpath("a_module.py").write_text("import sys\nprint('module', sys.argv[1:], __name__)\n")
    monkeypatch.chdir(rig.folder)
    await rig.start(ScriptConfig(path="a_module", args=("1",), module=True))
    await rig.start_worker()
    await rig.line("module ['1'] __main__")
    await rig.coordinator.exit_of(1)
    assert await rig.end() == 0
    rig.coordinator.received.clear()
    await rig.start(ScriptConfig(path="sh", args=("-c", "echo program $RANK; exit 7"), no_python=True))
    await rig.start_worker(3)
    await rig.line("program 3")
    assert (await rig.coordinator.exit_of(1)).exit_code == 7
    assert await rig.end() == 0


async def test_exit_codes_and_signals_are_told_as_they_are(rig: Rig) -> None:
    await rig.start(
        """
        import os, signal, sys
        what = os.environ["RANK"]
        if what == "0": sys.exit(7)
        if what == "1": os._exit(8)
        if what == "2": os.kill(os.getpid(), signal.SIGSEGV)
        if what == "3": sys.exit("words")
        """
    )
    for index in range(4):
        await rig.start_worker(index, index + 1)
    ends = [await rig.coordinator.exit_of(incarnation) for incarnation in (1, 2, 3, 4)]
    assert [(end.exit_code, end.signal) for end in ends] == [(7, None), (8, None), (None, signal.SIGSEGV), (1, None)]
    assert all(end.failure is None for end in ends)
    assert "words\n" in rig.err.read_text()
    assert await rig.end(1) == 0


@pytest.mark.parametrize("line", ["json.loads('{')", "os.environ['NOBODY_HAS_SET_IT']"], ids=["file", "frozen"])
async def test_the_place_of_an_exception_is_the_users_line_not_the_librarys(rig: Rig, line: str) -> None:
    await rig.start(f"import json, os\n{line}")
    await rig.start_worker()
    ended = await rig.coordinator.exit_of(1)
    assert failure_of(ended).where == f"{rig.folder / 'script.py'}:2"
    assert await rig.end(1) == 0


async def test_an_exception_is_told_with_its_place_and_in_torchs_error_file(rig: Rig) -> None:
    await rig.start(
        """
        import os
        print("file=" + os.environ["TORCHELASTIC_ERROR_FILE"])
        def inner():
            raise ValueError("no such thing")
        inner()
        """
    )
    await rig.start_worker()
    ended = await rig.coordinator.exit_of(1)
    assert ended.exit_code == 1
    assert failure_of(ended).type == "builtins.ValueError"
    assert failure_of(ended).message == "no such thing"
    assert failure_of(ended).where == f"{rig.folder / 'script.py'}:5"
    assert "rackrun/agent" not in failure_of(ended).traceback
    assert await rig.end(1) == 0
    error = json.loads(Path((await rig.line("file=")).removeprefix("file=")).read_text())
    assert error["message"]["message"] == "ValueError: no such thing"
    assert "inner()" in error["message"]["extraInfo"]["py_callstack"]
    trace = rig.err.read_text()
    assert trace.startswith("Traceback (most recent call last):\n  File ")
    assert trace.endswith("ValueError: no such thing\n")
    assert "rackrun/agent" not in trace


async def test_exit_handlers_and_threads_end_as_under_python(rig: Rig) -> None:
    await rig.start(
        """
        import atexit, threading, time
        ready = threading.Event()
        atexit.register(lambda: print("handler after", late))
        def work():
            global late
            ready.wait()
            late = "thread"
        threading.Thread(target=work).start()
        atexit.register(lambda: print("first"))
        threading._register_atexit(ready.set)
        """
    )
    await rig.start_worker()
    assert (await rig.coordinator.exit_of(1)).exit_code == 0, rig.err.read_text()
    assert await rig.end() == 0
    assert rig.out.read_text() == "first\nhandler after thread\n"


async def test_messages_come_in_order_and_before_the_end(rig: Rig) -> None:
    await rig.start(
        """
        import os, signal
        from rackrun.protocol.events import WorkerReady
        from rackrun.protocol.ids import Position
        from rackrun.protocol.wire import Logged, UnitCommitted
        from rackrun.protocol import boot
        from rackrun.link.channel import WorkerChannel
        me = boot.current()
        channel = WorkerChannel(me.channel_fd)
        common = dict(slot=me.slot, incarnation=me.incarnation, generation=1, rank=0)
        for step in range(200):
            channel.send(UnitCommitted(at=Position(step), ids=bytes(1000), **common))
            channel.send(Logged(at=Position(step), values={"loss": 1.0}, **common))
        channel.send(WorkerReady(slot=me.slot, incarnation=me.incarnation))
        channel.send(UnitCommitted(at=Position(200), **common))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    await rig.start_worker()
    ended = await rig.coordinator.exit_of(1)
    assert ended.signal == signal.SIGKILL, rig.err.read_text()
    messages = [timed.message for timed in rig.coordinator.received]
    assert [type(message).__name__ for message in messages[-3:]] == ["WorkerReady", "UnitCommitted", "WorkerExited"]
    assert [m.at.step for m in messages if isinstance(m, UnitCommitted)] == list(range(201))
    assert [m.at.step for m in messages if isinstance(m, Logged)] == list(range(200))
    assert await rig.end(1) == 0


async def test_commands_reach_the_workers_they_name_and_no_other(rig: Rig) -> None:
    await rig.start(
        """
        from rackrun.protocol import boot
        from rackrun.link.channel import WorkerChannel
        me = boot.current()
        channel = WorkerChannel(me.channel_fd)
        print(me.rank, "up", flush=True)
        while (command := channel.receive()) is not None:
            print(me.rank, type(command).__name__, flush=True)
            if type(command).__name__ == "ReleaseWorkers":
                break
        """
    )
    slots = [SlotId("tray-0/0"), SlotId("tray-0/1")]
    # Sent at once with the start: a worker that does not exist yet must find them when it does.
    break_0 = BreakGeneration(generation=Generation(2), workers=(Worker(slots[0], Incarnation(1)),), because="")
    await rig.coordinator.send(rig.start_command(0, 1), rig.start_command(1, 2), break_0)
    await rig.line("0 BreakGeneration")
    await rig.release((slots[0], 1), (slots[1], 1), (slots[1], 2), ("tray-9/0", 2))
    await rig.coordinator.exit_of(1)
    await rig.coordinator.exit_of(2)
    assert await rig.end() == 0
    assert sorted(line for line in rig.out.read_text().splitlines() if "up" not in line) == [
        "0 BreakGeneration",
        "0 ReleaseWorkers",
        "1 ReleaseWorkers",
    ]


async def test_a_fenced_worker_takes_its_grandchildren_along(rig: Rig) -> None:
    await rig.start(
        """
        import subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        print(f"child={child.pid}", flush=True)
        time.sleep(600)
        """
    )
    await rig.start_worker()
    child = await rig.number("child")
    await rig.fence(0, 99)  # not this one
    await rig.fence(0, 1)
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    await rig.all_gone([child])
    assert await rig.end() == 0


@pytest.mark.parametrize("end", ["rank killed", "agent ends"])
async def test_what_torch_had_in_shared_memory_when_a_process_was_killed_is_removed(rig: Rig, end: str) -> None:
    """A data loader that is killed between the creation of a file and its unlink leaves it."""
    await rig.start(
        """
        import os, time
        child = os.fork()
        open(f"/dev/shm/torch_{os.getpid()}_7_0", "w").write("half")
        if child:
            print(f"parent={os.getpid()}", flush=True)
        else:
            print(f"child={os.getpid()}", flush=True)
        time.sleep(600)
        """
    )
    await rig.start_worker()
    left = [Path(f"/dev/shm/torch_{await rig.number(who)}_7_0") for who in ("parent", "child")]
    of_another = Path(f"/dev/shm/torch_{os.getpid()}_7_0")
    of_another.write_text("")
    try:
        assert all(path.exists() for path in left)
        if end == "rank killed":
            await rig.fence(0, 1)
            await rig.coordinator.exit_of(1)
            await rig.eventually(lambda: not any(path.exists() for path in left), "the files are removed")
        assert await rig.end() == 0
        assert not any(path.exists() for path in left)
        assert of_another.exists()
    finally:
        of_another.unlink()


async def test_a_worker_that_is_fenced_before_it_exists_never_runs(rig: Rig) -> None:
    await rig.start("print('ran')")
    start = rig.start_command(0, 1)
    await rig.coordinator.send(start, FenceWorker(slot=start.slot, incarnation=start.incarnation, because="a test"))
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    await rig.start_worker(0, 2)
    assert (await rig.coordinator.exit_of(2)).exit_code == 0
    assert await rig.end() == 0
    assert rig.out.read_text() == "ran\n"


async def test_a_slots_next_worker_waits_for_the_last_one_to_be_gone(rig: Rig) -> None:
    await rig.start("import os, time; print(f'pid={os.getpid()}', os.environ['RANK'], flush=True); time.sleep(600)")
    await rig.start_worker(0, 1, rank=1)
    first = await rig.number("pid")
    await rig.start_worker(0, 2, rank=2)
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    await rig.line(" 2")
    assert not rig.alive(first)
    await rig.start_worker(0, 1)  # told late: it has been already
    assert await rig.end(1) == 0
    assert len(rig.out.read_text().splitlines()) == 2


async def test_each_generation_of_a_plain_script_meets_at_a_fresh_store(rig: Rig) -> None:
    joined = await rig.start(
        """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0: print("count", store.add("mine", 1), os.environ["MASTER_PORT"], flush=True)
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    for attempt in range(3):
        starts = [
            rig.start_command(i, attempt * 2 + i + 1, world_size=2, generation=attempt + 1, restarts=attempt)
            for i in (0, 1)
        ]
        await rig.coordinator.send(*starts)
        for start in starts:
            assert (await rig.coordinator.exit_of(start.incarnation)).exit_code == 0, rig.err.read_text()
    lines = [line.split() for line in rig.out.read_text().splitlines() if line.startswith("count")]
    assert [count for _, count, _ in lines] == ["1", "1", "1"]
    ports = [port for _, _, port in lines]
    assert len({*ports, joined.store.rpartition(":")[2]}) == 4
    exchange = await asyncio.to_thread(Exchange, joined.store, "a-token", "master/2", 10.0)
    told = (await asyncio.to_thread(exchange.get, "address", 10.0)).decode()
    exchange.close()
    assert told == f"127.0.0.1:{ports[1]}"
    assert await rig.end() == 0


async def test_a_worker_whose_store_is_gone_does_not_start_and_says_so(rig: Rig) -> None:
    await rig.start("print('ran')")
    await rig.start_worker(store="127.0.0.1:9")
    ended = await rig.coordinator.exit_of(1)
    assert (ended.exit_code, ended.signal, failure_of(ended).type) == (None, None, "rackrun.StartFailed")
    assert "127.0.0.1:9" in failure_of(ended).message
    assert rig.out.read_text() == ""
    assert await rig.end(3) == 0


def kept_descriptors(pid: int) -> list[tuple[int, str]]:
    """The descriptors of a process, without the files in ``/proc`` that an agent opens for an instant to read them."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return sorted(entry for entry in found if not entry[1].startswith("/proc/"))


async def test_a_worker_for_which_no_descriptor_is_left_is_a_failed_start_and_its_tray_stays(rig: Rig) -> None:
    await rig.start("import os, time; print('trains', os.environ['RANK'], flush=True); time.sleep(3600)")
    await rig.start_worker(0, 1)
    await rig.line("trains 0")
    before = kept_descriptors(rig.agent)
    used = {int(name) for name in os.listdir(f"/proc/{rig.agent}/fd")}
    free = next(number for number in range(len(used) + 1) if number not in used)
    soft, hard = resource.prlimit(rig.agent, resource.RLIMIT_NOFILE)
    for room in range(5):  # a worker takes five before its process exists
        resource.prlimit(rig.agent, resource.RLIMIT_NOFILE, (free + room, hard))
        await rig.start_worker(1, 2 + room)
        ended = await rig.coordinator.exit_of(2 + room)
        assert (ended.exit_code, ended.signal, failure_of(ended).type) == (None, None, "rackrun.StartFailed")
        assert "Too many open files" in failure_of(ended).message
    assert kept_descriptors(rig.agent) == before, "what was opened is closed again"
    resource.prlimit(rig.agent, resource.RLIMIT_NOFILE, (soft, hard))
    await rig.start_worker(1, 20)
    await rig.line("trains 1")
    await rig.fence(0, 1)
    await rig.fence(1, 20)
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGKILL
    assert await rig.end() == 0


async def test_what_the_launcher_wants_done_at_its_own_end_is_not_done_at_a_workers(rig: Rig) -> None:
    """Such as to remove a temporary directory, or to close the files of log handlers, whose numbers are others' by now."""
    with tempfile.TemporaryDirectory() as folder:

        class Log(logging.Handler):
            def close(self) -> None:
                Path(folder, str(os.getpid())).touch()

        log = Log()
        await rig.start("print('trained', flush=True)")
        await rig.start_worker(1)
        assert (await rig.coordinator.exit_of(1)).exit_code == 0
        assert Path(folder).is_dir()
        assert not list(Path(folder).iterdir())
        logging._removeHandlerRef(weakref.ref(log))  # type: ignore[attr-defined]  # of no public name


async def test_two_workers_train_with_a_data_loader(rig: Rig) -> None:
    await rig.start(
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            model = DDP(torch.nn.Linear(4, 1))
            optimizer = torch.optim.AdamW(model.parameters())
            data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4, num_workers=1)
            for batch in data:
                model(batch).sum().backward()
                optimizer.step()
            print("trained", flush=True)
            dist.destroy_process_group()
        """
    )
    await rig.coordinator.send(rig.start_command(0, 1, world_size=2), rig.start_command(1, 2, world_size=2))
    for incarnation in (1, 2):
        assert (await rig.coordinator.exit_of(incarnation)).exit_code == 0, rig.err.read_text()
    assert await rig.end() == 0


@pytest.mark.stories
async def test_preloads_that_leave_threads_mean_fresh_interpreters(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.folder.joinpath("threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    script = rig.script(
        """
        import os, sys
        from rackrun.protocol import boot
        print("fresh", "threaded" not in sys.modules, boot.current().rank, os.environ["RANK"], sys.argv[1:], flush=True)
        raise ValueError("told")
        """
    )
    monkeypatch.setenv("PYTHONPATH", f"{rig.folder}:{Path(rackrun.__file__).parents[1]}")
    monkeypatch.syspath_prepend(rig.folder)
    await rig.start(ScriptConfig(path=script.path, args=("a",), preload=("threaded",)))
    await rig.start_worker(3)
    ended = await rig.coordinator.exit_of(1)
    assert failure_of(ended).message == "told"
    assert await rig.line("fresh") == "fresh True 3 3 ['a']"
    assert "workers start in fresh interpreters" in rig.err.read_text()
    assert await rig.end() == 0


async def test_a_flood_of_output_goes_to_the_file_and_not_through_the_agent(rig: Rig) -> None:
    await rig.start(
        """
        import os
        block = b"x" * (1 << 20)
        for _ in range(300):
            os.write(1, block)
        """,
        logs=LogConfig(directory=str(rig.folder / "logs"), redirects="1"),
    )
    await rig.start_worker()
    assert (await rig.coordinator.exit_of(1)).exit_code == 0
    (log,) = (rig.folder / "logs").glob("a-run_*/attempt_0/0/stdout.log")
    assert log.stat().st_size == 300 << 20
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{rig.agent}/status").read_text())
    assert peak is not None
    assert int(peak[1]) < 900_000
    assert await rig.end() == 0
    os.truncate(log, 0)


async def test_tee_redirect_and_filter_are_torchruns(rig: Rig) -> None:
    await rig.start(
        "import sys; print('out'); print('err', file=sys.stderr); print('no end', end='')",
        logs=LogConfig(directory=str(rig.folder / "logs"), redirects="2:3", tee="0:1,1:1", local_ranks_filter="0,2"),
    )
    await rig.coordinator.send(*(rig.start_command(index, index + 1) for index in range(4)))
    for index in range(4):
        await rig.coordinator.exit_of(index + 1)
    assert await rig.end() == 0
    folder = next((rig.folder / "logs").glob("a-run_*")) / "attempt_0"
    written = {f"{path.parent.name}/{path.stem}": path.read_text() for path in sorted(folder.glob("*/*.log"))}
    assert written == {
        "0/stdout": "out\nno end",
        "1/stdout": "out\nno end",
        "2/stdout": "out\nno end",
        "2/stderr": "err\n",
    }
    assert rig.out.read_text() == "[default0]:out\n[default0]:no end\n"  # 1 and 3 are filtered, 2 is redirected
    assert rig.err.read_text() == "err\n"


async def test_snapshots_outlive_their_worker(rig: Rig) -> None:
    joined = await rig.start(
        """
        import os, signal
        from rackrun.protocol import boot
        from rackrun.link.heartbeat_page import Activity, HeartbeatPage
        from rackrun.protocol.ids import Position
        me = boot.current()
        page = HeartbeatPage(me.page_fd)
        page.enter(Activity.STEP, Position(6))
        for which, step in ((0, 4), (1, 5)):
            os.pwrite(me.snapshot_fds[which], f"state {step} ".encode() * 1_000_000, 0)
            page.seal_snapshot(which, step)
        if me.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    await rig.start_worker(0, 1)
    ended = await rig.coordinator.exit_of(1)
    assert (ended.step, ended.snapshots) == (6, (Step(4), Step(5)))
    url = f"http://{joined.snapshots}/snapshot/tray-0/0"
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer a-token"}) as session:
        async with session.get(f"{url}/1/5") as answer:
            assert (answer.status, answer.content_length) == (200, 8_000_000)
            assert await answer.read() == b"state 5 " * 1_000_000
        async with session.get(f"{url}/1/3") as answer:
            assert (answer.status, await answer.text()) == (
                404,
                "no sealed snapshot of step 3; of incarnation 1 there is [4, 5]",
            )
        async with session.get(f"{url}/1/5", headers={"Authorization": "Bearer x"}) as answer:
            assert answer.status == 401
        for incarnation in (2, 3, 4, 5):
            await rig.start_worker(0, incarnation)
            await rig.coordinator.exit_of(incarnation)
        async with session.get(f"{url}/1/5") as answer:
            assert answer.status == 404
        async with session.get(f"{url}/4/5") as answer:
            assert answer.status == 200
    assert await rig.end() == 0
