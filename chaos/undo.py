"""What must be taken back is written down before it is done, so that it is taken back also when the injector dies.

A folder holds one file for each thing that is in force. Who injects heals what it has done; a `Watcher`, a process of its own, heals what
is left when the injector is gone. ``python -m rackrun.chaos.undo FOLDER`` heals by hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import assert_never

import msgspec

from rackrun.chaos.processes import Process, kill_marked, wait_gone

__all__ = ["Continue", "EndJob", "EndProcess", "RemoveFile", "RemoveGroup", "Undo", "UndoLog", "Watcher", "heal_all"]


class _Undo(msgspec.Struct, frozen=True, tag_field="undo"):
    pass


class Continue(_Undo, frozen=True, tag="continue"):
    """SIGCONT to those that were stopped."""

    processes: tuple[Process, ...]


class EndProcess(_Undo, frozen=True, tag="end_process"):
    """A helper of an injector."""

    process: Process


class RemoveGroup(_Undo, frozen=True, tag="remove_group"):
    """A control group; who is in it goes to the one above."""

    path: str


class RemoveFile(_Undo, frozen=True, tag="remove_file"):
    path: str


class EndJob(_Undo, frozen=True, tag="end_job"):
    """All processes with this mark in their environment."""

    mark: str


Undo = Continue | EndProcess | RemoveGroup | RemoveFile | EndJob
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
    """The newest first. Returns what was taken back."""
    healed = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        undo = _decode(path.read_bytes())
        _take_back(undo)
        path.unlink(missing_ok=True)
        healed.append(str(undo))
    return healed


class Watcher:
    """Heals ``folder`` when this process is gone, however that came about. Not needed any more: `close`."""

    def __init__(self, folder: Path) -> None:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rackrun.chaos.undo", str(folder), "--watch"],
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


def _take_back(undo: Undo) -> None:
    match undo:
        case Continue(processes):
            for process in processes:
                process.send(signal.SIGCONT)
        case EndProcess(process):
            process.send(signal.SIGKILL)
            wait_gone([process], _PATIENCE_S)  # what it does last would come after what is taken back next
        case RemoveFile(path):
            Path(path).unlink(missing_ok=True)
        case EndJob(mark):
            kill_marked(mark)
        case RemoveGroup(path):
            _remove_group(Path(path))
        case _:
            assert_never(undo)


def _remove_group(path: Path) -> None:
    """The group goes once the kernel has torn down whoever died in it."""
    deadline = time.monotonic() + _PATIENCE_S
    while path.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (path.parent / "cgroup.procs").write_text(pid)
            path.rmdir()
            return
        time.sleep(0.02)


def _main() -> int:
    folder, *flags = sys.argv[1:] or [""]
    if not folder or flags not in ([], ["--watch"]):
        print("usage: python -m rackrun.chaos.undo FOLDER", file=sys.stderr)
        return 2
    if flags:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends when there is nothing to watch any more
        sys.stdout.write("watching\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()
        sys.stdout = sys.stderr
    for healed in heal_all(Path(folder)):
        print(f"taken back: {healed}")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
