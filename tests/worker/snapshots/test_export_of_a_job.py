"""`rackctl ckpt` on what real jobs write: the exported set is the model that the ranks had."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rackrun.ctl.main import main as rackctl
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended
from tests.worker.scripts import Samples, adam, ddp, fully_sharded, loss_of, net

EXTRA = nn.BatchNorm1d


def sharded(run: Run) -> nn.Module:
    model = net(EXTRA(14))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)  # 14 rows in 5, 5 and 4; 10 in 4, 4 and 2
    return fully_sharded(model)


def replicated(run: Run) -> nn.Module:
    return ddp(run, EXTRA(14))


@pytest.mark.parametrize("make", [sharded, replicated])
def test_a_fresh_plain_model_takes_what_three_ranks_wrote_bit_for_bit(
    make: Callable[[Run], nn.Module],
    tmp_path: Path,
    train: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoints, held = tmp_path / "checkpoints", tmp_path / "held.pt"
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(checkpoints))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")

    def main(run: Run) -> None:
        model = make(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        def keep() -> None:
            whole = {
                name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                for name, tensor in model.state_dict().items()
            }
            if run.is_main:
                torch.save({name.removeprefix("module."): tensor for name, tensor in whole.items()}, held)

        run.at_end(keep)
        for number in run.steps(3):
            step(number)

    ended = train(main, spares=0)
    assert ended.exit_code == 0, ended

    def ctl(*arguments: object) -> Any:
        monkeypatch.setattr(sys, "argv", ["rackctl", "ckpt", *map(str, arguments), "--json"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exited:
            rackctl()
        assert not exited.value.code
        return json.loads(capfd.readouterr().out)

    (job,) = ctl("ls", checkpoints)["jobs"]
    assert (job["job"], job["damaged"]) == ("run", [])
    assert [(one["step"], one["world_size"]) for one in job["generations"]] == [(2, 3), (1, 3)]
    assert ctl("verify", checkpoints, "--all")["ok"]
    said = ctl("export", checkpoints, tmp_path / "out")
    assert said["step"] == 2
    plain = net(EXTRA(14))
    plain.load_state_dict(load_file(tmp_path / "out" / said["files"][0]))
    wanted = torch.load(held, weights_only=True)
    assert plain.state_dict().keys() == wanted.keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert ctl("gc", checkpoints, "--keep-last", 1)["dropped"] == [1]
