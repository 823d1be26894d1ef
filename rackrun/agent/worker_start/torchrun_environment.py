"""Environment of a worker: torchrun's variable names with torchrun's meanings (``LocalElasticAgent.worker_env``)."""

from __future__ import annotations

import os

from rackrun.link.address import host_and_port
from rackrun.protocol.agent_config import AgentConfig
from rackrun.protocol.commands import StartWorker

__all__ = ["worker_environment"]


def worker_environment(config: AgentConfig, command: StartWorker, master: str, error_file: str) -> dict[str, str]:
    """Return the variables to set in addition to the agent's environment. ``master`` is the ``host:port`` of the store
    to meet at."""
    index = command.slot.rpartition("/")[2]
    local_world_size = _local_world_size(config, command.world_size)
    host, port = host_and_port(master)
    return {
        "OMP_NUM_THREADS": "1",
        "ROLE_NAME": "default",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **_of_place(config, int(index)),
        **config.env,
        "RANK": str(command.rank),
        "LOCAL_RANK": index,
        "GROUP_RANK": str(command.rank // local_world_size),
        "ROLE_RANK": str(command.rank),
        "WORLD_SIZE": str(command.world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_WORLD_SIZE": str(-(-command.world_size // local_world_size)),
        "ROLE_WORLD_SIZE": str(command.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(command.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }


def _of_place(config: AgentConfig, index: int) -> dict[str, str]:
    """Return the variables for the slot's place in the rack, except those that the user has set."""
    wanted = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts: slot i is GPU i for those who watch it, too
        **(config.slot_env[index] if index < len(config.slot_env) else {}),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _local_world_size(config: AgentConfig, world_size: int) -> int:
    """Return the number of ranks on this tray. Spares are not ranks, so with several trays it is an even share, rounded
    up."""
    share = -(-world_size // max(config.nnodes, 1))
    return max(1, min(config.slots, share))
