"""Files in ``/dev/shm`` that torch makes for tensors in shared memory, of processes that were killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["remove_tensor_files"]

_SHARED = Path("/dev/shm")  # noqa: S108 - where the files are, whoever may write there


def remove_tensor_files(pids: Collection[int], since: float) -> None:
    """Remove what killed processes have left of torch's shared tensors.

    torch unlinks such a file as soon as it has mapped it. A process that is killed between the two, a data loader's
    for example, leaves the file, and its memory is lost until the host starts anew. The files that count CUDA tensors
    sent to other processes stay longer, and are left by every kill.

    ``pids``: processes that this one has reaped. ``since``: older files (seconds since the epoch) stay, and so do
    another user's: where containers share ``/dev/shm`` another process may have had the same id.
    """
    if not pids:
        return
    starts = tuple(f"torch_{pid}_" for pid in pids)
    with contextlib.suppress(OSError):  # there is no such folder, or it may not be read
        for name in os.listdir(_SHARED):
            if name.startswith(starts):
                _remove(_SHARED / name, since)


def _remove(path: Path, since: float) -> None:
    with contextlib.suppress(OSError):  # another has removed it
        found = path.lstat()
        if found.st_uid == os.geteuid() and found.st_mtime >= since:
            path.unlink()
