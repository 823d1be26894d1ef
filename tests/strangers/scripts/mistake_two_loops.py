"""Two loops one after the other: pre-training as a denoiser, then fine-tuning of the same encoder with another head and a new optimizer."""
# strangers: expect=said

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

PRETRAIN, FINETUNE = 12, 12


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=73)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()).to(run.device)
    denoiser = nn.Sequential(encoder, nn.Linear(32, 16).to(run.device))
    classifier = nn.Sequential(encoder, nn.Linear(32, 4).to(run.device))
    first, second = DDP(denoiser), DDP(classifier)
    adam = torch.optim.Adam(first.parameters(), lr=3e-3)
    sgd = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)
    run.track(denoiser=first, classifier=second, adam=adam, sgd=sgd)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def pretrain_step(step):
        for x, _ in data:
            step.backward(F.mse_loss(first(x + 0.3 * torch.randn_like(x)), x))
        adam.step()
        adam.zero_grad()
        return step.loss

    @run.step
    def finetune_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(second(x), y))
        sgd.step()
        sgd.zero_grad()
        return step.loss

    for step in run.steps(PRETRAIN):
        loss = pretrain_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    for step in run.steps(PRETRAIN + FINETUNE):
        loss = finetune_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, denoiser=denoiser, classifier=classifier, sgd=sgd)


if __name__ == "__main__":
    main()
