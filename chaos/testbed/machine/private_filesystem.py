"""A file system of its own for the checkpoints of a job, which can be full without anybody else's being so.

It is a tmpfs, of half of the host's memory at the most. Its size is set to what is in it, so nothing has to be written to fill it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["SIZE_BYTES", "mount", "set_size", "sizes"]

SIZE_BYTES = os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGESIZE")
_TRIES = 5


def mount(path: Path) -> None:
    """Raises ``OSError``. Made by the caller, and unmounted by it."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"mode=0700,size={SIZE_BYTES}", "rackrun-chaos-disk", str(path))


def sizes(path: Path) -> tuple[int, int]:
    """Of the file system there: bytes in all, bytes in use. Raises ``OSError``."""
    told = os.statvfs(path)
    return told.f_blocks * told.f_frsize, (told.f_blocks - told.f_bfree) * told.f_frsize


def set_size(path: Path, count: int | None) -> None:
    """``count`` bytes in all; None: what is in use, so that it is full. Raises ``OSError``."""
    for left in reversed(
        range(_TRIES)
    ):  # somebody may write between the question and the answer: less than is in use is refused
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
