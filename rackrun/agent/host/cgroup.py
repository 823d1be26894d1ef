"""A control group (v2) below this process's own, if one may be created, whose processes the kernel can kill all at
once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["Cgroup", "own_group"]


class Cgroup:
    """One control group."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def make(cls, name: str) -> Cgroup | None:
        """Create a group; None: there is no such hierarchy, or it is not writable."""
        try:
            above = own_group()
            if above is None:
                return None
            path = above / name
            path.mkdir()
        except OSError:
            return None
        if (path / "cgroup.kill").exists() and os.access(path / "cgroup.procs", os.W_OK):
            return cls(str(path))
        path.rmdir()
        return None

    @staticmethod
    def sweep(prefix: str) -> None:
        """Remove empty groups that dead processes have left beside this one: names with the prefix, a process id and a
        dash."""
        with contextlib.suppress(OSError):
            above = own_group()
            for path in above.glob(f"{prefix}*-*") if above is not None else ():
                owner = path.name.removeprefix(prefix).partition("-")[0]
                if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
                    Cgroup(str(path)).remove()

    def join(self) -> None:
        """Move this process into the group, with all that it starts from now on."""
        self._write("cgroup.procs", "0")

    def kill(self) -> None:
        """SIGKILL all processes in the group; a fork that is under way does not escape."""
        self._write("cgroup.kill", "1")

    def remove(self) -> None:
        """Remove the group if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _write(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self.path, name), "w", encoding="ascii") as file:
            file.write(text)


def own_group() -> Path | None:
    """Return this process's group in the v2 hierarchy, which may be mounted beside those of v1."""
    inside = ""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        if line.startswith("0::"):
            inside = line[3:]
    if not inside or inside.startswith("/.."):
        return None
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        root, where = before.split()[3:5]
        if after.startswith("cgroup2 ") and inside.startswith(root):
            return Path(where) / os.path.relpath(inside, root)
    return None
