"""Give a job's checkpoints a file system of their own, which can be full without affecting anything else.

It is a tmpfs of at most half of the host's memory. It is made full by setting its size to what is in it, so nothing has
to be written.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["SIZE_BYTES", "mount", "set_size", "sizes"]

SIZE_BYTES = os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGESIZE")
_TRIES = 5


def mount(path: Path) -> None:
    """Mount a new file system at ``path``, which the caller has to unmount. Raises ``OSError``."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"mode=0700,size={SIZE_BYTES}", "rackrun-chaos-disk", str(path))


def sizes(path: Path) -> tuple[int, int]:
    """Return the bytes in all and the bytes in use of the file system at ``path``. Raises ``OSError``."""
    told = os.statvfs(path)
    return told.f_blocks * told.f_frsize, (told.f_blocks - told.f_bfree) * told.f_frsize


def set_size(path: Path, count: int | None) -> None:
    """Set the size of the file system to ``count`` bytes; None makes it full. Raises ``OSError``."""
    for left in reversed(range(_TRIES)):  # a write may come between: less than is in use is refused
        wanted = max(sizes(path)[1], os.sysconf("SC_PAGESIZE")) if count is None else count
        try:
            return _mount("-o", f"remount,size={wanted}", str(path))
        except OSError:
            if not left:
                raise
    raise AssertionError


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, check=False)  # noqa: S607 - where the system has it
    if done.returncode:
        raise OSError(f"mount {words[-1]}: {done.stderr.decode(errors='replace').strip()}")
