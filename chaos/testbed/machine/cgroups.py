"""Control groups of version 1 and 2: where one can be made for a process, whichever of the two has the controller."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

__all__ = ["home_of", "new_name", "room_for"]


def new_name() -> str:
    return f"rackrun-chaos-{uuid.uuid4().hex[:8]}"


def room_for(pid: int, controller: str, files: Sequence[str], files_2: Sequence[str]) -> Path | None:
    """The group in which one for ``pid`` can be made that has all of ``files`` (version 1) or ``files_2`` (version 2). None: there is none."""
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
    """Where it is, in the hierarchy of ``above``."""
    return next((own for own, _ in _own(pid) if own == above or above in own.parents), above)


def _above(pid: int, controller: str) -> list[Path]:
    """Groups around it that may have the controller, the nearest first. In version 2 one that holds processes hands none down, so those
    above it count, too."""
    found = []
    for own, controllers in _own(pid):
        if controllers is None:
            found += [own, *(above for above in own.parents if (above / "cgroup.procs").exists())]
        elif controller in controllers:
            found.append(own)
    return found


def _own(pid: int) -> list[tuple[Path, list[str] | None]]:
    """Where it is in each hierarchy that is mounted here, with its controllers; None: it is of version 2."""
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
