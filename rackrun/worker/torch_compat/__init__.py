"""The only package that uses torch's private parts; each module names the versions of torch that it was tested with.

`check` tries what rackrun needs of this torch. `require` refuses what did not work, with a reason, instead of half
working. `install` makes torch's own functions elastic.
"""

from __future__ import annotations

import torch

from rackrun.errors import UsageError

try:
    from rackrun.worker.torch_compat.c10d import adopt_default_group, forget_groups, promote_groups, register_backend
    from rackrun.worker.torch_compat.data_parallel.fsdp import forget_meshes, promote_sharded
    from rackrun.worker.torch_compat.install import check, install, require
    from rackrun.worker.torch_compat.stream_waits import watch_waits
except ImportError as error:  # a private module has moved, so no trial can begin
    raise UsageError(
        f"rackrun does not know torch {torch.__version__}: {error}.", remedy="install torch 2.10 to 2.15."
    ) from error

__all__ = [
    "adopt_default_group",
    "check",
    "forget_groups",
    "forget_meshes",
    "install",
    "promote_groups",
    "promote_sharded",
    "register_backend",
    "require",
    "watch_waits",
]
