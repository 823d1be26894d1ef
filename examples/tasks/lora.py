"""LoRA: adapters alone are trained, beside a model that is frozen.

rackrun --standalone --nproc-per-node 3 --spares 1 examples/tasks/lora.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two small matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.base(x)
        return frozen + x @ self.down.T @ self.up.T


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=2)
def main(run: rackrun.Run) -> None:
    torch.manual_seed(0)  # the model that you have loaded
    base = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    adapted = nn.Sequential(*(LoRA(one) if isinstance(one, nn.Linear) else one for one in base))
    model = DDP(adapted.to(run.device))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(inputs, inputs[:, :4].argmax(1)))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(12):
        run.log(loss=train_step(step))
    if run.is_main:
        adapters = {name: value for name, value in adapted.state_dict().items() if name.endswith((".up", ".down"))}
        print(f"{sum(value.numel() for value in adapters.values())} values to save")  # torch.save(adapters, ...)


if __name__ == "__main__":
    main()
