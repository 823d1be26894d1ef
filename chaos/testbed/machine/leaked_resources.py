"""Find what outlives the processes of one job: files in ``/dev/shm``, temporary folders, control groups.

As root, the job gets a ``/dev/shm`` of its own, and everything left there counts. Otherwise, and where its command
names ``/dev/shm``, only names that rackrun gives count. The job also gets a temporary folder of its own, in which only
such names count, too: a killed script's own temporary files are nobody's to remove. Ports, locks and anonymous memory
end with the processes; mounts that the job makes end with its mount namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rackrun.agent.host.cgroup import own_group
from rackrun.chaos.testbed.machine.undo_log import RemoveTree, UndoLog, Unmount

__all__ = ["LeakedResources", "can_be_private"]

SHARED = Path("/dev/shm")  # noqa: S108 - looked at
_OURS = ("rackrun", "torchelastic_")
_INSIDE = 'mount --bind "$0" /dev/shm && exec "$@"'


class LeakedResources:
    """Finds what a job leaves. Create it before the job.

    ``before`` goes in front of the command of each of the job's processes, ``env`` into their environment.
    """

    def __init__(self, folder: Path, command: Sequence[str], undo: UndoLog) -> None:
        self._temporary = Path(tempfile.mkdtemp(prefix="rackrun-chaos-"))  # a short path: sockets are made below it
        undo.record(RemoveTree(str(self._temporary)))
        caches = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        self.env = {
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(caches)),
        }
        self.before: list[str] = []
        self.shared: Path | None = None
        """The file system mounted here is the job's ``/dev/shm``; None if the job has none of its own."""
        if can_be_private() and not any(str(SHARED) in word for word in command):
            shared = folder.resolve() / "shm"
            shared.mkdir()
            undo.record(Unmount(str(shared)))
            subprocess.run(_mount(shared), check=True)
            self.shared, self.before = shared, [*_UNSHARE, "sh", "-c", _INSIDE, str(shared)]
        self._known = set(self._outside())

    def found(self) -> tuple[str, ...]:
        """Return what is left, once no process of the job is alive."""
        mine = [f"{SHARED}/{path.name}" for path in self.shared.iterdir()] if self.shared is not None else []
        mine += [str(path) for path in self._temporary.iterdir() if path.name.startswith(_OURS)]
        return tuple(sorted([*mine, *set(self._outside()) - self._known]))

    def _outside(self) -> list[str]:
        """Return what is left in places that other jobs use, too."""
        found = [] if self.shared is not None else [path for path in SHARED.iterdir() if path.name.startswith(_OURS)]
        group = own_group()
        found += [path for path in group.iterdir() if path.is_dir() and _of_the_dead(path)] if group is not None else []
        return [str(path) for path in found]


@cache
def can_be_private() -> bool:
    """Whether a job can have a ``/dev/shm`` of its own here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    return subprocess.run([*_UNSHARE, *_mount(SHARED)], capture_output=True, check=False).returncode == 0


_UNSHARE = ["unshare", "--mount", "--propagation", "private"]


def _mount(where: Path) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", "mode=1777", "rackrun-chaos-shm", str(where)]


def _of_the_dead(group: Path) -> bool:
    """Whether the cgroup is ``rackrun-filler-PID-...`` of a process that has ended."""
    words = group.name.split("-")
    return (
        words[:2] == ["rackrun", "filler"]
        and words[2:3] != []
        and words[2].isdigit()
        and not Path(f"/proc/{words[2]}").exists()
    )
