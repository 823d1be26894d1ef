"""``reduction="exact"``: losses and weights have the same bits on any number of ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.errors import UsageError
from rackrun.worker.exact import fixed_point_c
from rackrun.worker.exact.fixed_point import fixed_point
from rackrun.worker.exact.fixed_point_scales import Scales, width_of
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, moments, say
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, fit, fully_sharded, loss_of, net

fixed_point_c.load()  # compiled once, for all that is forked

Train = Callable[..., Ended]
BATCH = (16, 2)  # 8 micro-batches


def run_on(
    train: Train, main: Script, ranks: int, *, spares: int = 0, reduction: str = "exact", **how: object
) -> Ended:
    ended = train(main, ranks=ranks, spares=spares, batch=BATCH, reduction=reduction, **how)
    assert ended.exit_code == 0, ended
    return ended


def computed(ended: Ended) -> tuple[dict[int, float], set[str]]:
    return ended.losses, {said["state"] for said in ended.said.values()}


def show_state(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """At the end: one hash of all parameters and what the optimizer holds for them, whole."""

    def digest() -> None:
        found = hashlib.sha256()
        for parameter in model.parameters():
            for tensor in (
                parameter.detach(),
                *(optimizer.state[parameter][k] for k in sorted(optimizer.state[parameter])),
            ):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        say(state=found.hexdigest())

    run.at_end(digest)


def loop(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Step, torch.Tensor], torch.Tensor],
    clip: float = 0.0,
    steps: int = STEPS,
) -> None:
    show_state(run, model, optimizer)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss(step, batch))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        say(**{f"attempt {int(step)}": step.attempt})

    for number in run.steps(steps):
        step(number)


def replicated(run: Run) -> None:
    model = ddp(run, gradient_as_bucket_view=True)
    loop(run, model, adam(model, fused=True), lambda _, batch: loss_of(model, batch), clip=0.1)


def jumping(run: Run) -> None:
    """At step 4 the gradients of one micro-batch are 1,000 times what they were."""
    model = ddp(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def loss(step: Step, batch: torch.Tensor) -> torch.Tensor:
        jump = int(step) == 4 and step.shards[-1] == 5
        return loss_of(model, batch) * (1000.0 if jump else 1.0)

    loop(run, model, optimizer, loss)


def in_bf16(run: Run) -> None:
    model = DDP(net().bfloat16())
    loop(run, model, adam(model), lambda _, batch: loss_of(model, batch.bfloat16()).float())


def sharded(run: Run, steps: int = STEPS, **options: Any) -> None:
    """14 and 10 rows: ranks hold unequal parts, which end inside of a block of any size."""
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    loop(run, model, adam(model), lambda _, batch: loss_of(model, batch), clip=0.1, steps=steps)


def sharded_mixed(run: Run) -> None:
    sharded(run, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def sharded_reduced_in_bf16(run: Run) -> None:
    """FSDP rounds what it does not reduce at once, and not what it does."""
    sharded(run, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def sharded_and_replicated(run: Run) -> None:
    sharded(run, mesh=run.mesh)


STORY = pytest.mark.stories


@pytest.mark.parametrize(
    ("main", "ranks", "reduction"),
    [
        (replicated, (3, 8), "exact"),
        (sharded, (3,), "exact"),
        pytest.param(replicated, (2, 4, 5), "exact", marks=STORY),
        pytest.param(replicated, (3, 8), "exact64", marks=STORY),
        pytest.param(in_bf16, (2, 3, 8), "exact", marks=STORY),
        pytest.param(sharded, (2, 4, 8), "exact", marks=STORY),
        pytest.param(sharded, (3, 8), "exact64", marks=STORY),
        pytest.param(sharded_mixed, (2, 3, 8), "exact", marks=STORY),
        pytest.param(sharded_reduced_in_bf16, (3, 8), "exact", marks=STORY),
    ],
)
def test_the_bits_are_those_of_one_process(main: Script, ranks: tuple[int, ...], reduction: str, train: Train) -> None:
    alone = computed(run_on(train, main, 1, reduction=reduction))
    assert len(alone[0]) == STEPS
    for count in ranks:
        assert computed(run_on(train, main, count, reduction=reduction)) == alone, count


@pytest.mark.stories
def test_replicas_of_shards_are_added_exactly_too(train: Train) -> None:
    alone = computed(run_on(train, sharded, 1))
    assert computed(run_on(train, sharded_and_replicated, 4, mesh={"replicate": 2, "shard": 2})) == alone


@pytest.mark.parametrize("main", [replicated, sharded])
def test_the_arithmetic_of_an_accelerator_trains_the_same_bits(
    main: Script, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's operations, which do the same on a CPU."""
    alone = computed(run_on(train, main, 1))
    monkeypatch.setenv("RACKRUN_KERNELS", "0")
    elsewhere = fixed_point(torch.device("cuda", 0))
    monkeypatch.setattr("rackrun.worker.exact.exact_reduction.fixed_point", lambda _: elsewhere)
    assert computed(run_on(train, main, 3)) == alone


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(batch)))
        return out


@pytest.mark.stories
def test_tensor_parallel_ranks_share_their_micro_batches(train: Train) -> None:
    def main(run: Run) -> None:
        model = Mlp()
        parallelize_module(model, run.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=run.mesh["dp"])
        loop(run, model, adam(model, foreach=False), lambda _, batch: loss_of(model, batch))

    alone, several = (run_on(train, main, 2 * replicas, mesh={"dp": replicas, "tp": 2}) for replicas in (1, 3))
    assert computed(several) == computed(alone)


@pytest.mark.parametrize("main", [replicated, pytest.param(sharded, marks=STORY), pytest.param(jumping, marks=STORY)])
def test_a_swap_in_the_middle_changes_nothing(main: Script, train: Train) -> None:
    alone = run_on(train, main, 1)
    reference = run_on(train, main, 3)
    deaths = {rank: moments(reference, rank, main.__name__)[0] for rank in (0, 2)}
    ended = run_on(train, main, 3, spares=1, kill=deaths)
    assert ended.plans
    assert computed(ended) == computed(alone), f"{deaths}\n{ended}"


@pytest.mark.stories
def test_a_checkpoint_goes_on_with_another_number_of_ranks_as_if_nothing_had_changed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = computed(run_on(train, sharded, 1))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    run_on(train, lambda run: sharded(run, steps=5), 4)
    ended = run_on(train, sharded, 3)
    assert min(ended.losses) == 5
    assert computed(ended)[1] == alone[1]
    assert ended.losses.items() <= alone[0].items()


# -- scales


def test_a_gradient_that_outgrows_its_scale_is_computed_again_on_every_rank(train: Train) -> None:
    alone, ended = run_on(train, jumping, 1), run_on(train, jumping, 3)
    assert computed(ended) == computed(alone)
    for said in (*alone.said.values(), *ended.said.values()):
        assert [said[f"attempt {step}"] for step in range(STEPS)] == [1, 0, 0, 0, 1, 0, 0, 0]  # the first measures
    assert sorted(ended.rescaled) == [(rank, step, 1, 1) for rank in range(3) for step in (0, 4)], (
        "and the report says why"
    )


class Half(nn.Module):
    """Uses one of its layers in the first micro-batch of the global batch only, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.never = (nn.Linear(10, 10) for _ in range(3))

    def forward(self, batch: torch.Tensor, seldom: bool) -> torch.Tensor:
        out: torch.Tensor = self.always(batch)
        return self.seldom(out) if seldom else out


def test_parameters_that_some_micro_batches_do_not_use_are_added_exactly(train: Train) -> None:
    def main(run: Run) -> None:
        model = DDP(Half(), find_unused_parameters=True)
        loop(run, model, adam(model), lambda step, batch: model(batch, step.shards[-1:] == (0,)).square().mean())

    assert computed(run_on(train, main, 3)) == computed(run_on(train, main, 1))


def test_what_is_not_finite_is_nan_on_every_rank_and_a_scaler_skips_the_step(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        show_state(run, model, optimizer)
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                bad = int(step) == 3 and step.shards[-1:] == (5,)
                loss = step.scale(loss_of(model, batch))
                scaler.scale(loss * math.inf if bad else loss).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            if int(step) == 3:
                say(nan=all(bool(gradient.isnan().all()) for gradient in gradients if gradient is not None))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            say(**{f"scale {int(step)}": scaler.get_scale()})

        for number in run.steps(STEPS):
            step(number)

    ended, alone = run_on(train, main, 3), run_on(train, main, 1)
    assert computed(ended) == computed(alone)
    for said in ended.said.values():
        assert said["nan"]
        assert (said["scale 2"], said["scale 3"]) == (1024.0, 512.0)


def averaged(of: Callable[[DDP], nn.Module]) -> Script:
    """An average of the weights, that no optimizer trains: its parameters say that they need gradients, as torch makes them."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        shadow = torch.optim.swa_utils.AveragedModel(of(model))
        show_state(run, model, optimizer)
        run.track(model=model, optimizer=optimizer, shadow=shadow)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            shadow.update_parameters(of(model))
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)
        say(shadow=[parameter.tolist() for parameter in shadow.parameters()])

    return main


@pytest.mark.parametrize("whole", [False, True])
def test_an_averaged_model_is_not_counted(whole: bool, train: Train) -> None:
    main = averaged((lambda model: model) if whole else (lambda model: model.module))
    ended, alone = run_on(train, main, 3), run_on(train, main, 1)
    assert computed(ended) == computed(alone)
    shadows = [said["shadow"] for said in (*ended.said.values(), *alone.said.values())]
    assert all(shadow == shadows[0] for shadow in shadows)


def test_a_scale_follows_the_largest_gradient_and_forgets_it_slowly() -> None:
    scales = Scales(3)
    scales.seen(torch.tensor([4.0, 0.0, math.inf]))
    assert scales.largest.tolist() == [4.0, 0.0, 0.0]
    scales.seen(torch.tensor([1.0, 2.0, 3.0]))
    assert scales.largest.tolist() == pytest.approx([3.6, 2.0, 3.0])


def test_too_many_micro_batches_for_32_bits_are_refused() -> None:
    assert width_of("fast", 10**6) is None
    assert width_of("exact64", 10**6) is not None
    with pytest.raises(UsageError, match="exact64"):
        width_of("exact", 10**6)
    with pytest.raises(UsageError, match="not known"):
        width_of("precise", 8)


# -- refused


def not_wrapped(run: Run) -> None:
    model = net()
    fit(run, model, adam(model))


def partly_wrapped(run: Run) -> None:
    """As DDP is told to leave a parameter alone."""
    model = net()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    wrapped = DDP(model)
    fit(run, wrapped, adam(wrapped))


def hooked(run: Run) -> None:
    model = ddp(run)
    model.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    fit(run, model, adam(model))


def fused_shards(run: Run) -> None:
    model = fully_sharded(net())
    fit(run, model, adam(model, fused=True))


def twice(run: Run) -> None:
    model = ddp(run)

    def loss(step: Step, batch: torch.Tensor) -> torch.Tensor:
        step.backward(loss_of(model, batch))
        return loss_of(model, batch)

    loop(run, model, adam(model), loss)


def ahead(run: Run) -> None:
    model = ddp(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in list(data):
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def over_too_many(run: Run) -> None:
    """Ranks along "tp" have the same samples."""
    run.mesh  # noqa: B018
    replicated(run)


def pipelined(run: Run) -> None:
    raise AssertionError("never reached")


def by_hand(run: Run) -> None:
    """What no optimizer trains is not reduced either: it must have no gradient."""
    model, other = ddp(run), net()
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer, other=other)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch) + loss_of(other, batch))
        optimizer.step()
        with torch.no_grad():
            for parameter in other.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)

    for number in run.steps(STEPS):
        step(number)


@pytest.mark.parametrize(
    ("main", "because", "how"),
    [
        (by_hand, "neither DDP nor FSDP2", {}),
        (not_wrapped, "neither DDP nor FSDP2", {}),
        (partly_wrapped, "neither DDP nor FSDP2", {}),
        (hooked, "communication hook", {}),
        (fused_shards, "fused=True", {}),
        (twice, "reduced twice", {}),
        (ahead, "was taken from run.loader before the backward pass", {}),
        (over_too_many, "over 2 ranks, but 1 share", {"ranks": 2, "mesh": {"dp": 1, "tp": 2}}),
        (pipelined, "pp", {"ranks": 2, "mesh": {"dp": 1, "pp": 2}}),
    ],
)
def test_what_could_not_be_exact_is_refused(main: Script, because: str, how: dict[str, Any], train: Train) -> None:
    ended = train(main, batch=BATCH, reduction="exact", **{"ranks": 1, "spares": 0, "max_restarts": 0, **how})
    assert ended.failure is not None, ended
    assert because in ended.failure.message
    assert "Remedy" in ended.failure.message
