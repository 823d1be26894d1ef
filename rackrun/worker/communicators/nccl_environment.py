"""What NCCL and torch's group around it are told by the environment. It is set once, in the main thread, before any other thread reads it:
a variable that changes under a thread that reads it is undefined behaviour in C."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["prepare_environment"]

_ALWAYS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's watchdog would end survivors when a peer is lost
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would the thread that watches the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # after an error it writes dumps, and tells others to by the store
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # rackrun tells the others
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # 15 s by default, four times, with a lock that the next collective needs
}
"""Else a recovery would wait for torch, or the process would be ended by it."""
_UNLESS_SET = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    # As `COLLECTIVE_TIMEOUT`, for a communicator in NCCL's non-blocking mode. It is of every call: the first of a kind connects this rank to its peers
    # (NCCL_RUNTIME_CONNECT, and all sends), and so waits until they come to theirs, however late. In blocking mode it waits without a limit.
    # A break ends that. How long a group may take to be built is bounded in `rackrun.worker.communicators.nccl`.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "3600",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # a restore's sends would print it on every rank, each time
    "TORCH_NCCL_RANKS_PER_ROOT": "128",
    "NCCL_NVLS_ENABLE": "0",  # multicast objects of aborted communicators are freed with the process only
}
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""One thing, by its newer and its older name: torch's record of collectives, with a Python stack of each. It is written at timeouts, of which there are
none here; after a loss each survivor prints the stack of each collective that was under way."""


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Before the first group of GPUs is made. What the user has set stays, where a recovery does not hang on it."""
    environment.update(_ALWAYS)
    for name, value in _UNLESS_SET.items():
        environment.setdefault(name, value)
    if not any(name in environment for name in _RECORDER):
        environment[_RECORDER[0]] = "0"  # torch warns of the other
