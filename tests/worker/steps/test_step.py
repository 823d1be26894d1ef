"""What a step computes: the gradient of the mean over the global batch, however many ranks share it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.protocol.ids import Position
from rackrun.worker.data.loader import BatchPlan
from rackrun.worker.data.rng import derive, reseed
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, moments, say
from tests.worker.scripts import STEPS, Samples, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]
ROOT = Path(__file__).resolve().parents[3]


def one_step(weight: Callable[[torch.Tensor], float | None]) -> Callable[[Run], None]:
    def main(run: Run) -> None:
        model = DDP(net().eval())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            weights, shards = [], []
            for batch in data:
                step.backward(loss_of(model, batch), weight=weight(batch))
                weights.append(step.weight)
                shards.append(step.shards)
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            say(gradient=gradient.tolist(), loss=step.loss, weights=weights, shards=shards[-1])
            optimizer.zero_grad()

        for number in run.steps(1):
            step(number)

    return main


def alone(samples: list[int]) -> tuple[torch.Tensor, float]:
    """What one process computes from the same samples at once."""
    reseed(7, "setup")
    model = net().eval()
    data = Samples()
    loss = loss_of(model, torch.stack([data[i] for i in samples]))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), float(loss.detach())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradient_and_loss_are_those_of_the_whole_batch_in_one_process(ranks: int, train: Train) -> None:
    ended = train(one_step(lambda _: None), ranks=ranks, batch=(16, 2))
    assert ended.exit_code == 0, ended
    order = np.random.Generator(np.random.PCG64(derive(7, "epoch", 0))).permutation(60)[:16].tolist()
    assert ended.samples(Position(0)) == sorted(order)
    gradient, loss = alone(order)
    for said in ended.said.values():
        torch.testing.assert_close(torch.tensor(said["gradient"]), gradient)
        assert said["loss"] == pytest.approx(loss)
        assert said["loss"] == ended.losses[0]


def test_a_ghost_weighs_nothing_and_delivers_nothing(train: Train) -> None:
    ended = train(one_step(lambda _: None), ranks=3, batch=(16, 2))
    assert ended.said[0]["weights"] == [1 / 8, 1 / 8, 0.0]
    assert ended.said[0]["shards"] == [0, 1]
    assert BatchPlan(16, 2, 0).shards_of(0, 3)[-1].ghost


def test_weights_of_the_scripts_own_replace_equal_shares(train: Train) -> None:
    """As for a mean over tokens. A ghost's weight is 0 whatever the script says."""
    ended = train(one_step(lambda _: 0.125), ranks=3, batch=(16, 2))
    gradient, loss = alone(ended.samples(Position(0)))
    torch.testing.assert_close(torch.tensor(ended.said[2]["gradient"]), gradient)
    assert ended.losses[0] == pytest.approx(loss)


def test_synchronised_batch_norm_is_exact(train: Train) -> None:
    def main(run: Run) -> None:
        model = DDP(nn.Sequential(nn.Linear(10, 14), Normalise(), nn.Linear(14, 10)))
        fit(run, model, adam(model))

    reference = train(main)
    assert reference.exit_code == 0, reference
    ended = train(main, kill={rank: moments(reference, rank, "sync")[0] for rank in (0, 2)})
    assert not ended.differences(reference), ended


class Normalise(nn.Module):
    """What SyncBatchNorm does (it wants a GPU): statistics over all ranks, by a collective in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(14))
        self.mean: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        mean = batch.detach().mean(0)
        dist.all_reduce(mean)
        self.mean.lerp_(mean, 0.1)
        return batch - mean


@pytest.mark.stories
def test_death_right_after_the_first_step_is_exact_though_replicas_are_not_checked_yet(train: Train) -> None:
    """What was equal at the start has parted (BatchNorm's statistics): nobody may be taken for a replica."""

    def main(run: Run) -> None:
        model = ddp(run, nn.BatchNorm1d(14))
        fit(run, model, adam(model))

    reference = train(main)
    lived = reference.moments[0]
    for what in ("committed Position(step=0", "passed the gate of Position(step=0"):
        moment = next(index for index, said in enumerate(lived) if said.startswith(what))
        for later in (0, 1, 2):
            ended = train(main, kill={0: moment + later})
            assert not ended.differences(reference), f"{lived[moment + later]}\n{ended}"


def ends_with_a_collective(averages_weights: bool) -> Callable[[Run], None]:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if averages_weights:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data, op=dist.ReduceOp.MAX)
            else:
                shown = torch.ones(1)
                dist.all_reduce(shown)

        for number in run.steps(STEPS):
            step(number)

    return main


def after_a_gate(reference: Ended, rank: int) -> int:
    """The moment at which ``rank`` enters a collective between a gate and its commit."""
    lived = reference.moments[rank]
    gates = [index for index, said in enumerate(lived) if said.startswith("passed the gate")]
    return gates[4] + 1


@pytest.mark.parametrize("averages_weights", [False, True])
def test_a_collective_that_breaks_after_the_update(averages_weights: bool, train: Train) -> None:
    """One whose result is only shown costs nothing; for one that writes weights the gate comes after it."""
    main = ends_with_a_collective(averages_weights)
    reference = train(main)
    moment = after_a_gate(reference, 1)
    ended = train(main, kill={1: moment})
    assert not ended.differences(reference), f"{reference.moments[1][moment]}\n{ended}"
    assert not ended.restarted, ended


# -- the loss of a step that skips its optimizer ------------------------------------------------------------------------
def skips_every_third_step(skipped_by: str, shown_by: str) -> Callable[[Run], None]:
    """``step.loss`` is returned in every step, or logged, or read by rank 0 alone; in every third no optimizer.step() was called."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> float:
            skip = int(step) % 3 == 1
            for batch in data:
                loss = step.scale(loss_of(model, batch))
                scaler.scale(loss * math.inf if skip and skipped_by == "scaler" else loss).backward()
            if skipped_by == "scaler":
                scaler.step(optimizer)
                scaler.update()
            elif not skip:
                optimizer.step()
            optimizer.zero_grad()
            if shown_by == "log":
                run.log(loss=step.loss)
            if shown_by == "rank 0":
                return step.loss if run.rank == 0 else 0.0
            return step.loss

        losses = [step(number) for number in run.steps(STEPS)]
        say(losses=losses, skipped=scaler.get_scale() < 1024.0)

    return main


@pytest.mark.parametrize(
    ("skipped_by", "shown_by"),
    [
        ("scaler", "return"),
        ("guard", "rank 0"),
        *(pytest.param(*both, marks=pytest.mark.stories) for both in (("guard", "return"), ("scaler", "log"))),
    ],
)
def test_the_loss_of_a_step_that_skips_its_optimizer_is_known(skipped_by: str, shown_by: str, train: Train) -> None:
    main = skips_every_third_step(skipped_by, shown_by)
    reference = train(main)
    assert reference.exit_code == 0, reference
    told = [reference.losses[step] for step in range(STEPS)]
    assert len(set(told)) == STEPS
    assert reference.said[0]["losses"] == told
    assert reference.said[0]["skipped"] == (skipped_by == "scaler")
    if shown_by != "rank 0":
        assert all(said["losses"] == told for said in reference.said.values())
    ended = train(main, kill={1: moments(reference, 1, shown_by)[0]})
    assert not ended.differences(reference), ended


def reads_loss(where: str) -> Callable[[Run], None]:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            optimizer.zero_grad()
            for batch in data:
                if where == "in the loop":
                    step.loss  # noqa: B018 - it raises
                step.backward(loss_of(model, batch))
            if step.loss > 1e6:
                return
            if where == "before a collective":
                dist.all_reduce(torch.ones(1))
            optimizer.step()

        for number in run.steps(STEPS):
            step(number)

    return main


@pytest.mark.parametrize(
    "where", ["before the optimizer", pytest.param("before a collective", marks=pytest.mark.stories)]
)
def test_a_guard_may_look_at_the_loss_before_the_optimizer(where: str, train: Train) -> None:
    reference = train(reads_loss(where))
    assert reference.exit_code == 0, reference
    ended = train(reads_loss(where), kill={0: moments(reference, 0, "guard")[0]})
    assert not ended.differences(reference), ended


def test_a_loss_that_is_read_too_early_is_refused_without_a_fault(train: Train) -> None:
    ended = train(reads_loss("in the loop"), max_restarts=0)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    assert "step.loss was read before" in ended.failure.message
    assert not ended.gates or max(ended.gates) <= Position(1)


def keeps_its_steps(run: Run) -> None:
    kept: list[Step] = []
    model = ddp(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        kept.append(step)
        for batch in data:
            step.backward(loss_of(model, batch))
        say(open=[int(one) for one in kept if one._ask_loss is not None], steps=len(kept))
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def test_a_spare_that_takes_a_place_has_ended_the_step_that_it_had_tried(train: Train) -> None:
    reference = train(keeps_its_steps, ranks=2)
    ended = train(keeps_its_steps, ranks=2, kill={1: moments(reference, 1, "gate")[0]})
    assert not ended.differences(reference), ended
    assert ended.said[1] == {"open": [STEPS - 1], "steps": 4}, ended.said
    assert ended.said[0]["open"] == [STEPS - 1], ended.said


SCRIPT = """
import torch, rackrun
from torch import nn
@rackrun.elastic(global_batch_size=8, micro_batch_size=2)
def main(run):
    torch.set_num_threads(1)
    {wrap}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader([torch.full((4,), float(i)) for i in range(16)])
    @run.step
    def step(step):
        for batch in data:
            step.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    for number in run.steps(3):
        step(number)
        run.log(loss=step_loss(run))
def step_loss(run):
    return float(run._world.gate.loss)
if __name__ == "__main__":
    main()
"""
DDP_WRAP = "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))"
FSDP_WRAP = "from torch.distributed.fsdp import fully_shard; model = fully_shard(nn.Linear(4, 4))"


def started(command: list[str], script: Path, wrap: str) -> list[str]:
    script.write_text(SCRIPT.format(wrap=wrap))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(DDP_WRAP, id="ddp"),
        pytest.param(FSDP_WRAP, id="fsdp", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
@pytest.mark.parametrize("store", ["of torchrun's agent", pytest.param("of rank 0", marks=pytest.mark.stories)])
def test_a_script_trains_alike_under_python_and_under_torchrun(
    wrap: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(store == "of rank 0")))
    alone = started([sys.executable], tmp_path / "train.py", wrap)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = started(torchrun, tmp_path / "train.py", wrap)
    assert len(alone) == len(together) == 3
    for a, b in zip(alone, together, strict=True):
        assert float(a.split()[-1]) == pytest.approx(float(b.split()[-1]), rel=1e-4)
