"""Keeps a process group alive after `torch.distributed.destroy_process_group`, until the process ends or another group
is destroyed.

torch's DDP drops its group while it holds the interpreter's lock. If that is the last reference, the group's destructor
waits for a gloo thread, which may be waiting for that lock in order to free a Python object. Then the rank hangs at its
end, with all its work done. Python's own reference, which is kept here, is dropped without the lock.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

__all__ = ["keep_groups"]

_kept: list[Any] = []


def keep_groups() -> None:
    """Install this in a process that has imported torch; call it once."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not hasattr(c10d, "destroy_process_group"):
        return
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def keeping(group: Any = None) -> None:
        if group is None:
            _kept[:] = list(c10d._world.pg_map)
        destroy(group)

    c10d.destroy_process_group = sys.modules["torch.distributed"].destroy_process_group = keeping  # type: ignore[attr-defined]
