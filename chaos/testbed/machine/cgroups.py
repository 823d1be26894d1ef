"""Find where a cgroup can be made for a process, in cgroup version 1 or 2, whichever has the controller."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

__all__ = ["home_of", "new_name", "room_for"]


def new_name() -> str:
    """Return a new, unique name for a cgroup."""
    return f"rackrun-chaos-{uuid.uuid4().hex[:8]}"


def room_for(pid: int, controller: str, files: Sequence[str], files_2: Sequence[str]) -> Path | None:
    """Return the cgroup below which one for process ``pid`` can be made; None if there is none.

    The new cgroup must have all of ``files`` (version 1) or all of ``files_2`` (version 2).
    """
    for above in _above(pid, controller):
        path = above / new_name()
        try:
            path.mkdir()
        except OSError:
            continue
        able = any(all((path / name).exists() for name in names) for names in (files, files_2))
        path.rmdir()
        if able:
            return above
    return None


def home_of(pid: int, above: Path) -> Path:
    """Return the cgroup of process ``pid`` in the hierarchy of ``above``."""
    return next((own for own, _ in _own(pid) if own == above or above in own.parents), above)


def _above(pid: int, controller: str) -> list[Path]:
    """Return the cgroups around a process that may have the controller, the nearest first.

    In version 2, a cgroup that holds processes passes no controllers on to its children, so those above it are
    included.
    """
    found = []
    for own, controllers in _own(pid):
        if controllers is None:
            found += [own, *(above for above in own.parents if (above / "cgroup.procs").exists())]
        elif controller in controllers:
            found.append(own)
    return found


def _own(pid: int) -> list[tuple[Path, list[str] | None]]:
    """Return the cgroup of a process in each mounted hierarchy, with that hierarchy's controllers; None for
    version 2."""
    inside: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        inside |= dict.fromkeys(controllers.split(","), path)
    found: list[tuple[Path, list[str] | None]] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, where = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        controllers_here = options.split(" ")[-1].split(",") if kind == "cgroup" else None
        path = (
            inside.get("", "")
            if controllers_here is None
            else next((inside[name] for name in controllers_here if name in inside and name), "")
        )
        if path and path.startswith(root):
            found.append((Path(where) / Path(path).relative_to(root), controllers_here))
    return found
