"""Lets torchtitan, which takes "cuda" where it finds no GPU, compute on CPUs with gloo. For tests: import it before the rest of torchtitan."""

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class _Properties:
    total_memory = 2**30


torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: _Properties
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.distributed import fsdp  # noqa: E402 - it takes the device when it is imported
from torchtitan.distributed import utils as dist_utils  # noqa: E402

_stock_division = fsdp.disable_fsdp_gradient_division


def _without_division(model):
    """Do as torchtitan does, by sums without a factor: gloo has no others."""
    _stock_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _without_division
dist_utils.set_pg_timeouts = lambda **_: None  # its barrier names a device, which gloo refuses
