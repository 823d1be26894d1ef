"""The only place that touches torch's private parts; each module says which torch it was tried on.

`check` refuses what is not there with a reason, instead of half working; `install` makes torch's own entry points elastic.
"""

from __future__ import annotations

from rackrun.worker.compat.c10d import adopt_default_group, promote_groups, register_backend
from rackrun.worker.compat.fsdp import promote_sharded
from rackrun.worker.compat.install import check, install

__all__ = ["adopt_default_group", "check", "install", "promote_groups", "promote_sharded", "register_backend"]
