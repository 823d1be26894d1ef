"""``reduction="exact"``: the bits do not depend on how many ranks share the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Ended, moments, say
from scripts import Script, adam, ddp, fit, net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.run import Run

Train = Callable[..., Ended]


def whole(run: Run) -> None:
    model = ddp(run)
    fit(run, model, adam(model))


def sharded(run: Run) -> None:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    fit(run, model, adam(model), after=lambda _: say(weights=full(model)))


def full(model: nn.Module) -> list[list[float]]:
    return []


@pytest.mark.parametrize("main", [whole, sharded], ids=lambda main: main.__name__)
def test_losses_and_weights_do_not_depend_on_the_number_of_ranks(main: Script, train: Train) -> None:
    alone = train(main, ranks=1, spares=0, batch=(16, 2), reduction="exact")
    assert alone.exit_code == 0, alone
    for ranks in (2, 3, 4, 8):
        ended = train(main, ranks=ranks, spares=0, batch=(16, 2), reduction="exact")
        assert ended.exit_code == 0, ended
        assert ended.losses == alone.losses
