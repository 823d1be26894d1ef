"""What every test gets: a check that it left nothing behind, and a way to start rackrun that leaves no process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from rackrun.link.process.import_speed import without_collections

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: what forks has no thread that its child would wait for

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("rackrun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rackrun")  # how fast the machine is must fail no test


# -- collections of garbage ------------------------------------------------------------------------------------------
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """While modules are imported and tests are made of them there is no garbage; looking for it takes a sixth of the time."""
    with without_collections():
        return (yield)


def pytest_collection_finish() -> None:
    """What is here by now stays to the end. Tests fork thousands of processes, and each would look through it, and so copy it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # torch's bindings tell of what is never freed


os.register_at_fork(after_in_child=gc.freeze)


# -- which stories are told ------------------------------------------------------------------------------------------
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``RACKRUN_STORIES=2/3``: the second third of the stories. Which a story belongs to is drawn from its name."""
    part, _, parts = os.environ.get("RACKRUN_STORIES", "1/1").partition("/")
    others = [
        item
        for item in items
        if item.get_closest_marker("stories") and zlib.crc32(item.name.encode()) % int(parts) != int(part) - 1
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


# -- a hang leaves its stacks ----------------------------------------------------------------------------------------
@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A test with a limit of its own shows its stacks a while before that, as all do before the usual one: until then it is no hang."""
    marker = item.get_closest_marker("timeout")
    stderr = item.config.stash.get(fault_handler_stderr_fd_key, None)
    if marker is not None and marker.args and stderr is not None:
        faulthandler.dump_traceback_later(0.75 * float(marker.args[0]), file=stderr)  # in place of the usual one
    return (yield)


# -- alone with what it leaves ---------------------------------------------------------------------------------------
SHARED = Path("/dev/shm")
_CLONE_NEWNS, _MS_PRIVATE = 0x20000, 1 << 18


def _shared_memory_of_its_own() -> bool:
    """Mount a ``/dev/shm`` that only this process and its children see, where that is allowed: what is in it then is theirs."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    shm, tmpfs = os.fsencode(SHARED), b"tmpfs"
    private: bool = (
        libc.mount(b"none", shm, None, ctypes.c_ulong(_MS_PRIVATE), None) == 0
    )  # the host is to have no mount of it
    return private and bool(libc.mount(tmpfs, shm, tmpfs, ctypes.c_ulong(0), b"mode=1777") == 0)


ALONE = _shared_memory_of_its_own()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``. Many tests wait for processes, so that one more than there are cores keeps all of them busy. Processes that see one
    ``/dev/shm`` cannot tell whose leak a file in it is: there one at a time."""
    return min(len(os.sched_getaffinity(0)) + 1, 8) if ALONE else 0


OF_LIBRARIES = ("rackrun", "torch_", "psm_", "sem.", "nccl-", "__KMP_", "cuda", "pymp-")
"""How what rackrun, torch and Python put there is called."""


# -- nothing is left behind ------------------------------------------------------------------------------------------

# Opened once, whenever something first needs it, and kept for the life of the process: not a leak of the test.
LAZY_FDS = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/", "/dev/pts")
LAZY_THREADS = ("pytest_timeout", "QueueFeederThread")
SETTLE_S = 30.0
PATIENCE_S = 100.0
"""A job is waited for at least so long: beside other programs all takes its time, and a test is about what happens, not when."""


def children() -> dict[str, object]:
    return {f"child process {process.pid}: {command}": process.pid for process, command in _living_children().items()}


def _living_children() -> dict[psutil.Process, str]:
    """With what they run; one that ends while it is looked at is none."""
    living: dict[psutil.Process, str] = {}
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none: the kernel says so in no time, where psutil reads all of /proc
        return living
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if "multiprocessing.resource_tracker" not in command:
                living[process] = command[:200]
    return living


def descriptors() -> dict[str, object]:
    found: dict[str, object] = {}
    of_tracker = str(resource_tracker._resource_tracker._fd)  # type: ignore[attr-defined] # its process is no leak either
    for name in os.listdir("/proc/self/fd"):
        if name == of_tracker:
            continue
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(LAZY_FDS) and not target.endswith((".so", ".pyc", ".py")):
                found[f"descriptor {name} -> {target}"] = name
    return found


def threads() -> dict[str, object]:
    return {
        f"thread {thread.name}": thread.ident
        for thread in threading.enumerate()
        if thread.is_alive() and not thread.name.startswith(LAZY_THREADS)
    }


def shared_memory() -> dict[str, object]:
    """Where others use the same ``/dev/shm``: what is called as ours would be, and no program of theirs has in its hands."""
    names = os.listdir(SHARED)
    if not ALONE:
        names = [name for name in names if name.startswith(OF_LIBRARIES)]
        names = [name for name in names if name not in _held_by_others()] if names else []
    return {f"/dev/shm/{name}": name for name in names}


def _held_by_others() -> set[str]:
    """Names in ``/dev/shm`` that living processes have open or mapped which are not of this session."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found: set[str] = set()
    for pid in psutil.pids():
        if pid in ours:
            continue
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    found |= {Path(target).name} if target.startswith("/dev/shm/") else set()
    return found


def listeners() -> dict[str, object]:
    listening = [c for c in psutil.Process().net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN]
    return {f"listening on {c.laddr.ip}:{c.laddr.port}": c.fd for c in listening}


PROBES: tuple[Callable[[], dict[str, object]], ...] = (children, descriptors, threads, shared_memory, listeners)


def snapshot() -> dict[str, object]:
    found: dict[str, object] = {}
    for probe in PROBES:
        found |= probe()
    return found


_INTERRUPTED: list[object] = []


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """What fails afterwards would hide the summary of what was done before."""
    _INTERRUPTED.append(excinfo)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child, a descriptor, a thread, a file in /dev/shm or a listening port.

    ``@pytest.mark.leaks("reason")`` turns it off for one test.
    """
    if request.node.get_closest_marker("leaks"):
        yield
        return
    before = snapshot()
    yield
    if _INTERRUPTED:
        return  # pytest is on its way out, and takes its own descriptors back meanwhile
    # Something may be on its way out: a process that is being torn down, a thread past its last line.
    deadline = time.monotonic() + SETTLE_S
    while left := [what for what in snapshot() if what not in before]:
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(left))
        gc.collect()
        time.sleep(0.02)


# -- starting rackrun ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """How a run of rackrun ended."""

    exit_code: int | None
    """None: it did not end by its deadline, and was killed."""
    stdout: str
    stderr: str
    out_dir: Path
    seconds: float
    left_behind: list[str] = field(default_factory=list)
    """Processes that still lived a moment after it had exited; they are dead now."""

    def __str__(self) -> str:
        ended = "killed at its deadline" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{ended} after {self.seconds:.1f} s\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


class Job:
    """A rackrun in a session of its own. All that it starts inherits a mark, by which nothing of it can escape."""

    def __init__(self, arguments: Sequence[str], out_dir: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.out_dir = out_dir
        out_dir.mkdir(parents=True, exist_ok=True)
        self._mark = f"RACKRUN_TEST_JOB={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        full_env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, **env, name: value}
        self._started = time.monotonic()
        with (out_dir / "stdout.txt").open("wb") as out, (out_dir / "stderr.txt").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rackrun", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=full_env,
                start_new_session=True,
            )

    def stdout(self) -> str:
        return (self.out_dir / "stdout.txt").read_text(errors="replace")

    def stderr(self) -> str:
        return (self.out_dir / "stderr.txt").read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every living process of this job, the launcher first."""
        wanted = self._mark.encode()
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return sorted(found, key=lambda pid: (pid != self.process.pid, pid))

    def status(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """``GET /api/status`` of its coordinator, once that answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                endpoint = json.loads((self.out_dir / "endpoint.json").read_text())
                token = (self.out_dir / "token").read_text().strip()
                request = urllib.request.Request(
                    f"{endpoint['url']}/api/status", headers={"Authorization": f"Bearer {token}"}
                )
                with urllib.request.urlopen(request, timeout=2) as answer:
                    status: dict[str, Any] = json.load(answer)
                    return status
            except (OSError, ValueError, KeyError):
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def wait_for(self, condition: Callable[[dict[str, Any]], object], timeout_s: float) -> dict[str, Any]:
        """The first status that meets ``condition``; AssertionError with the job's output when none does in time."""
        deadline = time.monotonic() + max(timeout_s, PATIENCE_S)
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError, KeyError):
                status = self.status(timeout_s=1.0)
                if condition(status):
                    return status
            time.sleep(0.05)
        raise AssertionError(f"the awaited status never came\n{self.finish(0.0)}")

    def finish(self, timeout_s: float) -> Ran:
        """Wait for its end, at most ``timeout_s``; whatever happens, none of its processes lives afterwards."""
        try:
            exit_code: int | None = self.process.wait(max(timeout_s, PATIENCE_S) if timeout_s else 0.0)
        except subprocess.TimeoutExpired:
            exit_code = None
        seconds = time.monotonic() - self._started
        left: list[str] = []
        if exit_code is not None:
            deadline = time.monotonic() + SETTLE_S
            while (pids := self.pids()) and time.monotonic() < deadline:
                time.sleep(0.02)
            left = [f"{pid} {_cmdline(pid)}" for pid in pids]
        self.kill()
        return Ran(exit_code, self.stdout(), self.stderr(), self.out_dir, seconds, left)

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()


def _cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "(gone)"


@pytest.fixture
def start_rackrun(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``start_rackrun(args, env={}, cwd=...) -> Job``: a running rackrun, its ``--out-dir`` in the test's folder."""
    jobs: list[Job] = []

    def start(arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Job:
        out_dir = tmp_path / f"run-{len(jobs)}"
        job = Job(["--out-dir", str(out_dir), *map(str, arguments)], out_dir, env or {}, cwd or tmp_path)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def run_rackrun(start_rackrun: Callable[..., Job]) -> Callable[..., Ran]:
    """``run_rackrun(args, timeout=60, env={}, cwd=...) -> Ran``. Fails the test if it leaves a process behind."""

    def run(arguments: Sequence[str], *, timeout: float = 60.0, **where: Any) -> Ran:
        ran = start_rackrun(arguments, **where).finish(timeout)
        assert not ran.left_behind, f"processes left behind: {ran.left_behind}\n{ran}"
        return ran

    return run
