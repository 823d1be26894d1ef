"""Record how to undo each fault before it is injected, so that it is undone even if the injector dies.

A folder holds one file for each thing in force. The injector heals what it has done; a `Watcher`, a process of its own,
heals what is left when the injector is gone. ``python -m rackrun.chaos.testbed.machine.undo_log FOLDER`` heals by hand.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import assert_never

import msgspec

import rackrun
from rackrun.chaos.testbed.machine.fake_clock import move
from rackrun.chaos.testbed.machine.private_filesystem import set_size
from rackrun.chaos.testbed.machine.processes import Process, kill_marked, wait_gone

__all__ = [
    "NAMED",
    "Continue",
    "EndJob",
    "EndProcess",
    "RemoveFile",
    "RemoveGroup",
    "RemoveHosts",
    "RemoveRules",
    "RemoveTree",
    "RestoreGpu",
    "SetDescriptors",
    "SetClock",
    "SetSize",
    "Undo",
    "UndoLog",
    "Unmount",
    "Watcher",
    "heal_all",
]

NAMED = Path("/run/netns")
"""The folder with the names of network namespaces."""


class _Undo(msgspec.Struct, frozen=True, tag_field="undo"):
    pass


class Continue(_Undo, frozen=True, tag="continue"):
    """Send SIGCONT to processes that were stopped."""

    processes: tuple[Process, ...]


class EndProcess(_Undo, frozen=True, tag="end_process"):
    """Kill a helper process of an injector."""

    process: Process


class RemoveGroup(_Undo, frozen=True, tag="remove_group"):
    """Remove a cgroup; its processes go to ``home`` or, if that is empty, to the cgroup above."""

    path: str
    home: str = ""


class RemoveFile(_Undo, frozen=True, tag="remove_file"):
    """Remove a file."""

    path: str


class RemoveTree(_Undo, frozen=True, tag="remove_tree"):
    """Remove a folder with all that is in it."""

    path: str


class Unmount(_Undo, frozen=True, tag="unmount"):
    """Unmount a file system, and remove its folder."""

    path: str


class RestoreGpu(_Undo, frozen=True, tag="restore_gpu"):
    """Let a fake driver answer again what it answered before."""

    state: str
    tray: str
    gpu: int
    said: dict[str, int | dict[str, int]]


class SetSize(_Undo, frozen=True, tag="set_size"):
    """Set the size of the file system at ``path``, in bytes."""

    path: str
    bytes: int


class SetClock(_Undo, frozen=True, tag="set_clock"):
    """Set the wall clocks that read these pages right again."""

    pages: tuple[str, ...]


class SetDescriptors(_Undo, frozen=True, tag="set_descriptors"):
    """Set the limits of a process's open files."""

    process: Process
    soft: int
    hard: int


class EndJob(_Undo, frozen=True, tag="end_job"):
    """Kill all processes with this mark in their environment, or whose ``/dev/shm`` is the file system at
    ``shared``."""

    mark: str
    shared: str = ""


class RemoveRules(_Undo, frozen=True, tag="remove_rules"):
    """Remove a table of nf_tables in a network namespace, given by name."""

    space: str
    family: str
    table: str


class RemoveHosts(_Undo, frozen=True, tag="remove_hosts"):
    """Remove all network namespaces whose names begin with ``tag``; their links and rules go with them."""

    tag: str


Undo = (
    Continue
    | EndProcess
    | RemoveGroup
    | RemoveFile
    | RemoveTree
    | Unmount
    | RestoreGpu
    | SetSize
    | SetClock
    | SetDescriptors
    | EndJob
    | RemoveRules
    | RemoveHosts
)
_decode = msgspec.json.Decoder(Undo).decode
_PATIENCE_S = 10.0


class UndoLog:
    """The undo log of one run. ``folder`` is created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._next = 0

    def record(self, undo: Undo) -> int:
        """Write down how to undo something, before it is done. Returns the number of the record."""
        number, self._next = self._next, self._next + 1
        path = self._path(number)
        partial = path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(undo))
        partial.replace(path)
        return number

    def heal(self, number: int) -> None:
        """Undo what a record says, and remove the record. Does nothing if that has been done already."""
        path = self._path(number)
        with contextlib.suppress(FileNotFoundError):
            _take_back(_decode(path.read_bytes()))
            path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"


def heal_all(folder: Path) -> list[str]:
    """Undo everything in ``folder``, the newest first, and return what was undone.

    A failure does not stop the others, and its record stays; an ExceptionGroup with all failures is raised at the end.
    """
    healed, errors = [], []
    for path in sorted(folder.glob("[0-9]*.json"), reverse=True):
        try:
            undo = _decode(path.read_bytes())
            _take_back(undo)
            path.unlink(missing_ok=True)
        except (OSError, msgspec.MsgspecError) as error:
            error.add_note(f"taking back {path}")
            errors.append(error)
        else:
            healed.append(str(undo))
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(errors) + len(healed)} could not be taken back", errors)
    return healed


class Watcher:
    """A process that heals ``folder`` when this process is gone, however it ended. Call `close` when it is no longer
    needed."""

    def __init__(self, folder: Path) -> None:
        root = str(Path(rackrun.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rackrun.chaos.testbed.machine.undo_log", str(folder), "--watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"watching\n":
            self.close()
            raise RuntimeError("nobody would heal if this process died: the watcher has not started")

    def close(self) -> None:
        """Return when everything is healed and the watcher has ended."""
        self._process.communicate()


def _take_back(undo: Undo) -> None:  # noqa: PLR0912 - one for each kind
    match undo:
        case Continue(processes):
            for process in processes:
                process.send(signal.SIGCONT)
        case EndProcess(process):
            process.send(signal.SIGKILL)
            wait_gone([process], _PATIENCE_S)  # its last action would come after the next undo
        case RemoveFile(path):
            Path(path).unlink(missing_ok=True)
        case SetSize(path, count):
            with contextlib.suppress(OSError):  # the file system is gone
                set_size(Path(path), count)
        case SetClock(pages):
            for page in pages:
                with contextlib.suppress(FileNotFoundError):
                    move(Path(page), 0.0)
        case SetDescriptors(process, soft, hard):
            if process.state:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        case EndJob(mark, shared):
            kill_marked(mark, Path(shared) if shared else None)
        case RemoveTree(path):
            shutil.rmtree(path, ignore_errors=True)
        case Unmount(path):
            subprocess.run(["umount", "--lazy", path], stderr=subprocess.DEVNULL, check=False)  # noqa: S607 - by whatever mounted it
            with contextlib.suppress(OSError):
                Path(path).rmdir()
        case RestoreGpu():
            _restore_gpu(undo)
        case RemoveGroup(path, home):
            _remove_group(Path(path), Path(home or Path(path).parent))
        case RemoveRules(space, family, table):
            if (NAMED / space).exists():
                _run("ip", "netns", "exec", space, "nft", "delete", "table", family, table)
        case RemoveHosts(tag):
            for named in sorted(NAMED.glob(f"{tag}-*")):
                _run("ip", "netns", "del", named.name)
        case _:
            assert_never(undo)


def _restore_gpu(undo: RestoreGpu) -> None:
    from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack

    with contextlib.suppress(FileNotFoundError), contextlib.closing(FakeRack.open(Path(undo.state))) as rack:
        rack.tray(undo.tray).put(undo.gpu, undo.said)


def _remove_group(path: Path, home: Path) -> None:
    """Remove a cgroup, once the kernel has torn down the processes that died in it."""
    deadline = time.monotonic() + _PATIENCE_S
    while path.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (home / "cgroup.procs").write_text(pid)
            path.rmdir()
            return
        time.sleep(0.02)


def _run(*words: str) -> None:
    """Run a command and ignore its failure: what does not exist need not be removed. Leftovers are looked for at the
    end."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(words, check=False, capture_output=True, env={**os.environ, "PATH": path})


def _main() -> int:
    folder, *flags = sys.argv[1:] or [""]
    if not folder or flags not in ([], ["--watch"]) or not Path(folder).is_dir():
        print(
            "usage: python -m rackrun.chaos.testbed.machine.undo_log FOLDER: OUT/faulted/undo or OUT/reference/undo of a run",
            file=sys.stderr,
        )
        return 2
    if flags:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends when nothing is left to watch
        sys.stdout.write("watching\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()
        sys.stdout = sys.stderr
    found = heal_all(Path(folder))
    for healed in found:
        print(f"taken back: {healed}")
    if not (found or flags):
        print(f"{folder}: there is nothing to take back")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
