"""Sets the environment variables of NCCL and of torch's NCCL groups.

They are set once in the main thread, before any other thread reads them: changing a variable while another thread reads
it is undefined behaviour in C.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["prepare_environment"]

_ALWAYS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's watchdog would end survivors when a peer is lost
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would the thread that monitors the watchdog
    # after an error it writes dumps, and makes others write theirs through the store
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # rackrun informs the others
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # 15 s by default, four times, with a lock that the next collective needs
}
"""Without these a recovery would wait for torch, or torch would end the process."""
_UNLESS_SET = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    # The same as `COLLECTIVE_TIMEOUT`, for a communicator in NCCL's non-blocking mode. It applies to every call. The
    # first call of a kind connects this rank to its peers (NCCL_RUNTIME_CONNECT, and all sends), so it waits until they
    # make theirs, however late. In blocking mode that wait has no limit. A break ends it.
    # `rackrun.worker.communicators.nccl` limits the time to build a group.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "3600",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # a restore's sends would print it on every rank, each time
    "TORCH_NCCL_RANKS_PER_ROOT": "128",
    "NCCL_NVLS_ENABLE": "0",  # multicast objects of aborted communicators are freed with the process only
}
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The newer and the older name of one setting: torch's record of collectives, with a Python stack of each. torch writes
it at timeouts, which do not occur here; after a loss each survivor would print the stack of each collective in
progress."""


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables before the first group of GPUs is made. Values set by the user stay, except where a recovery
    depends on them."""
    environment.update(_ALWAYS)
    for name, value in _UNLESS_SET.items():
        environment.setdefault(name, value)
    if not any(name in environment for name in _RECORDER):
        environment[_RECORDER[0]] = "0"  # torch warns about the other name
