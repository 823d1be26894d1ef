"""VQ-VAE: a codebook of 2 MiB in buffers that the forward moves by .data, as a mean over the ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

CODES, DIM, STEPS = 2048, 256, 20


class Patches(Dataset):
    def __init__(self):
        self.x = torch.randn(240, 32, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return 240

    def __getitem__(self, i):
        return self.x[i]


class Codebook(nn.Module):
    """As in Sonnet: codes follow running means of what is assigned to them."""

    def __init__(self, decay=0.9):
        super().__init__()
        self.decay = decay
        codes = torch.randn(CODES, DIM)
        self.register_buffer("codes", codes)
        self.register_buffer("cluster_size", torch.ones(CODES))
        self.register_buffer("cluster_sum", codes.clone())

    def forward(self, z):
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.T + self.codes.pow(2).sum(1)
        index = distance.argmin(1)
        quantized = self.codes[index]
        if self.training:
            with torch.no_grad():
                count = torch.zeros(CODES).index_add_(0, index, torch.ones(len(z)))
                total = torch.zeros(CODES, DIM).index_add_(0, index, z)
                dist.all_reduce(count)
                dist.all_reduce(total)
                self.cluster_size.data.mul_(self.decay).add_(count, alpha=1 - self.decay)
                self.cluster_sum.data.mul_(self.decay).add_(total, alpha=1 - self.decay)
                n = self.cluster_size.sum()
                size = (self.cluster_size + 1e-5) / (n + CODES * 1e-5) * n
                self.codes.data.copy_(self.cluster_sum / size.unsqueeze(1))
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(32, DIM), Codebook(), nn.Linear(DIM, 32)

    def forward(self, x):
        z, commitment = self.codebook(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + 0.25 * commitment


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=5)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(VQVAE().to(run.device), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Patches())

    @run.step
    def train_step(step):
        optimizer.zero_grad()
        for x in data:
            step.backward(model(x))
        optimizer.step()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, codes=model.module.codebook.codes)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
