"""A config module of torchtitan's: its llama3 debug model with two layers. For ``-m torchtitan.train --module titan_tiny --config tiny``.

STRUCK in the environment names a file: rank 0 kills itself in its third forward pass, once for the job.
"""

import os
import signal
from pathlib import Path

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def strike(module, _):
    strike.forwards += isinstance(module, Llama3Model)
    struck = os.environ.get("STRUCK")
    if struck and strike.forwards == 3 and dist.get_rank() == 0 and not Path(struck).exists():
        Path(struck).touch()
        os.kill(os.getpid(), signal.SIGKILL)


strike.forwards = 0


def tiny():
    register_module_forward_pre_hook(strike)
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config
