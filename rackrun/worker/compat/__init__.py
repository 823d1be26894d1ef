"""The only place that touches torch's private parts; each module says which torch it was tried on.

`check` refuses what is not there with a reason, instead of half working; `install` makes torch's own entry points elastic.
"""

from __future__ import annotations

from rackrun.worker.compat.c10d import adopt_default_group, forget_groups, promote_groups, register_backend
from rackrun.worker.compat.fsdp import forget_meshes, promote_sharded
from rackrun.worker.compat.install import check, install

__all__ = [
    "adopt_default_group",
    "check",
    "forget_groups",
    "forget_meshes",
    "install",
    "promote_groups",
    "promote_sharded",
    "register_backend",
]
