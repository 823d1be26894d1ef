"""Uses the adapter for Megatron-Core wrongly, in the way that the first argument names."""

import sys

import megatron_on_cpu  # noqa: F401 - before Megatron is imported
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

import rackrun
import rackrun.megatron

MISUSE = sys.argv[1]


class Net(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


@rackrun.elastic(global_batch_size=12 if MISUSE == "uneven_batch" else 8, micro_batch_size=4)
def main(run):
    if MISUSE == "groups_made_elsewhere":
        parallel_state.initialize_model_parallel()
    else:
        rackrun.megatron.initialize(run, tensor_model_parallel_size=2 if MISUSE == "another_mesh" else 1)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Net(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1), [model])
    training = rackrun.megatron.track(run, [model], optimizer)
    data = run.loader(torch.randn(64, 4))

    @run.step
    def train_step(step):
        assert MISUSE == "no_begin", training
        for x in data:
            (model(x).mean() * step.gradient_scale).backward()
        model.finish_grad_sync()
        optimizer.step()

    for step in run.steps(3):
        train_step(step)


main()
