"""What must be taken back is written down before it is done, so that it is taken back also when the injector dies.

A folder holds one file for each thing that is in force. Who injects heals what it has done; a `Watcher`, a process of its own, heals what
is left when the injector is gone. ``python -m rackrun.chaos.testbed.machine.undo_log FOLDER`` heals by hand.
"""

from __future__ import annotations

import contextlib
import os
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
    "SetClock",
    "SetSize",
    "Undo",
    "UndoLog",
    "Unmount",
    "Watcher",
    "heal_all",
]

NAMED = Path("/run/netns")
"""Network namespaces that have names."""


class _Undo(msgspec.Struct, frozen=True, tag_field="undo"):
    pass


class Continue(_Undo, frozen=True, tag="continue"):
    """SIGCONT to those that were stopped."""

    processes: tuple[Process, ...]


class EndProcess(_Undo, frozen=True, tag="end_process"):
    """A helper of an injector."""

    process: Process


class RemoveGroup(_Undo, frozen=True, tag="remove_group"):
    """A control group; who is in it goes to ``home``, or to the one above."""

    path: str
    home: str = ""


class RemoveFile(_Undo, frozen=True, tag="remove_file"):
    path: str


class RemoveTree(_Undo, frozen=True, tag="remove_tree"):
    path: str


class Unmount(_Undo, frozen=True, tag="unmount"):
    """And the folder goes."""

    path: str


class RestoreGpu(_Undo, frozen=True, tag="restore_gpu"):
    """A fake driver says again what it said before."""

    state: str
    tray: str
    gpu: int
    said: dict[str, int | dict[str, int]]


class SetSize(_Undo, frozen=True, tag="set_size"):
    """Of the file system that is mounted at ``path``."""

    path: str
    bytes: int


class SetClock(_Undo, frozen=True, tag="set_clock"):
    """The wall clocks that answer to these pages are right again."""

    pages: tuple[str, ...]


class EndJob(_Undo, frozen=True, tag="end_job"):
    """All processes with this mark in their environment, or with what is mounted at ``shared`` as their ``/dev/shm``."""

    mark: str
    shared: str = ""


class RemoveRules(_Undo, frozen=True, tag="remove_rules"):
    """A table of nf_tables, in a network namespace that has a name."""

    space: str
    family: str
    table: str


class RemoveHosts(_Undo, frozen=True, tag="remove_hosts"):
    """All network namespaces whose names begin so; links and rules go with them."""

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
    | EndJob
    | RemoveRules
    | RemoveHosts
)
_decode = msgspec.json.Decoder(Undo).decode
_PATIENCE_S = 10.0


class UndoLog:
    """Of one run. ``folder`` is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._next = 0

    def record(self, undo: Undo) -> int:
        """Before it is done. Returns its number."""
        number, self._next = self._next, self._next + 1
        path = self._path(number)
        partial = path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(undo))
        partial.replace(path)
        return number

    def heal(self, number: int) -> None:
        """Take it back; nothing happens if that is done already."""
        path = self._path(number)
        with contextlib.suppress(FileNotFoundError):
            _take_back(_decode(path.read_bytes()))
            path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"


def heal_all(folder: Path) -> list[str]:
    """The newest first. Returns what was taken back. What cannot be keeps nothing else from it, and stays written down; then it is raised."""
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
    """Heals ``folder`` when this process is gone, however that came about. Not needed any more: `close`."""

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
        """Returns when all is healed, and it has ended."""
        self._process.communicate()


def _take_back(undo: Undo) -> None:  # noqa: PLR0912 - one for each kind
    match undo:
        case Continue(processes):
            for process in processes:
                process.send(signal.SIGCONT)
        case EndProcess(process):
            process.send(signal.SIGKILL)
            wait_gone([process], _PATIENCE_S)  # what it does last would come after what is taken back next
        case RemoveFile(path):
            Path(path).unlink(missing_ok=True)
        case SetSize(path, count):
            with contextlib.suppress(OSError):  # it is gone
                set_size(Path(path), count)
        case SetClock(pages):
            for page in pages:
                with contextlib.suppress(FileNotFoundError):
                    move(Path(page), 0.0)
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
    """The group goes once the kernel has torn down whoever died in it."""
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
    """What is not there needs not be removed: that it fails means nothing. What is left is looked for at the end."""
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
            signal.signal(number, signal.SIG_IGN)  # it ends when there is nothing to watch any more
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
