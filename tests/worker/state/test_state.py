"""Tracked state: named, compared, put back, and carried to a newcomer."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from rackrun.errors import StepError
from rackrun.worker.restore.restore_layout import PIECE_BYTES_MIN, RestoreLayout
from rackrun.worker.state.state_manifest import StateManifest, TensorInfo
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from rackrun.worker.tensors.device_digest import device_digest
from rackrun.worker.tensors.tensor_bytes import digest
from tests.worker import harness  # noqa: F401 - sets the number of threads before torch is imported


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "holds"), [([], False), (["rackrun.a"], False), (["a"], True), (["rackrun.a", "a"], True)]
)
def test_a_script_that_tracks_nothing_of_its_own_has_no_state(names: list[str], holds: bool) -> None:
    state = TrackedState()
    for name in names:
        state.track(name, Counter())
    assert bool(state) is holds


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def tracked(seed: int = 0, steps: int = 0) -> TrackedState:
    net = model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = TrackedState()
    for name, thing in {"net": net, "optimizer": optimizer, "scheduler": scheduler}.items():
        state.track(name, thing)
    for _ in range(steps):
        net(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return state


def carried(source: TrackedState, newcomer: TrackedState) -> None:
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(source.manifest("a class")), type=StateManifest)
    tensors = newcomer.allocate(manifest)
    for path, tensor in source.tensors().items():
        tensors[path].copy_(tensor)
    newcomer.load_plain(manifest, tensors)


# -- a newcomer ----------------------------------------------------------------------------------------------------------
def test_a_newcomer_that_never_made_a_step_gets_everything() -> None:
    source, newcomer = tracked(steps=3), tracked(seed=1)
    carried(source, newcomer)
    theirs, mine = source.tensors(), newcomer.tensors()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[path], mine[path]) for path in theirs)
    assert newcomer.encode_plain() == source.encode_plain()
    assert newcomer.content() == source.content()
    assert newcomer.layout() == source.layout()


def test_a_newcomer_has_what_its_optimizer_holds_in_the_order_in_which_the_source_has_it() -> None:
    """Who prints, hashes or pickles ``state_dict()`` sees no difference."""
    source, newcomer = tracked(steps=3), tracked(seed=1)
    carried(source, newcomer)
    (ours, *_), (theirs, *_) = (
        one.optimizers["optimizer"].state_dict()["state"].values() for one in (newcomer, source)
    )
    assert list(ours) == list(theirs) != sorted(theirs)


def test_a_newcomer_keeps_its_tensors_so_that_references_to_them_stay_good() -> None:
    source, newcomer = tracked(steps=1), tracked(seed=1, steps=2)
    before = {path: tensor.data_ptr() for path, tensor in newcomer.tensors().items()}
    carried(source, newcomer)
    assert {path: tensor.data_ptr() for path, tensor in newcomer.tensors().items()} == before


def test_a_newcomer_forgets_optimizer_state_that_its_source_does_not_have() -> None:
    source, newcomer = tracked(), tracked(steps=2)
    carried(source, newcomer)
    assert newcomer.tensors().keys() == source.tensors().keys()


def test_another_model_than_the_sources_is_refused() -> None:
    source = TrackedState()
    source.track("net", nn.Linear(4, 5))
    newcomer = TrackedState()
    newcomer.track("net", nn.Linear(4, 6))
    with pytest.raises(StepError, match="net/param/weight is"):
        newcomer.allocate(source.manifest(""))


def unfrozen(steps: int, at: int | None, *, between: bool = False) -> TrackedState:
    """The head is trained alone, until step ``at``; then the body too, in a group of its own."""
    net = model()
    net[0].requires_grad_(False)
    net[1].eval()
    optimizer = torch.optim.AdamW(net[2].parameters(), lr=0.1)
    state = TrackedState()
    state.track("net", net)
    state.track("optimizer", optimizer)
    state.check_complete()
    for step in range(steps):
        if step == at:
            unfreeze(state)
        net(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state


def unfreeze(state: TrackedState) -> None:
    body = state.modules["net"][0]  # type: ignore[index]
    body.requires_grad_(True)
    state.modules["net"].train()
    state.optimizers["optimizer"].add_param_group({"params": list(body.parameters()), "lr": 0.01})


@pytest.mark.parametrize("at", [1, 2, 3], ids=["long ago", "just now", "not yet"])
def test_a_newcomer_has_the_groups_that_were_added_since(at: int) -> None:
    source, newcomer = unfrozen(3, at), unfrozen(0, None)
    carried(source, newcomer)
    assert newcomer.content() == source.content()
    groups = [state.optimizers["optimizer"].param_groups for state in (source, newcomer)]
    assert [[len(group["params"]) for group in some] for some in groups] == [[2, 2][: 2 if at < 3 else 1]] * 2
    own = newcomer.modules["net"][0 if at < 3 else 2].parameters()  # type: ignore[index]
    assert all(a is b for a, b in zip(groups[1][-1]["params"], own, strict=True))


def test_who_goes_back_to_before_a_group_was_added_has_it_no_more() -> None:
    source, ahead = unfrozen(1, None), unfrozen(3, 1)
    carried(source, ahead)
    assert ahead.content() == source.content()
    assert len(ahead.optimizers["optimizer"].param_groups) == 1
    assert len(ahead.optimizers["optimizer"].state) == 2


@pytest.mark.parametrize("at", [1, None], ids=["unfrozen", "not yet"])
def test_whoever_takes_a_state_over_has_a_gradient_where_its_source_has_one_though_zero(at: int | None) -> None:
    """Here the optimizer sets gradients to zero; there they were dropped, or are of steps that are to be done again."""
    source = unfrozen(2, at)
    trained = source.trained()
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for other in (unfrozen(0, None), unfrozen(3, 1)):
        ahead = list(other.parameters())
        ahead[0].grad = torch.ones_like(ahead[0])
        carried(source, other)
        assert [p.grad is None for p in ahead] == [p.grad is None for p in source.parameters()]
        assert not any(p.grad.any() for p in ahead if p.grad is not None)


def flags_of(state: TrackedState) -> tuple[list[bool], list[bool]]:
    net = state.modules["net"]
    return [p.requires_grad for p in net.parameters()], [m.training for m in net.modules()]


@pytest.mark.parametrize("at", [1, 5], ids=["thawed", "frozen"])
def test_a_newcomer_trains_what_the_others_train_by_now(at: int) -> None:
    """What ``main`` sets before run.steps is of the beginning; what the steps have set since is not in it."""
    source, newcomer = unfrozen(3, at), unfrozen(2, 6 - at if at > 1 else None)
    carried(source, newcomer)
    assert flags_of(newcomer) == flags_of(source)


def body_of(state: TrackedState) -> nn.Module:
    return state.modules["net"].get_submodule("0")


def resumed(source: TrackedState, *, frozen: bool) -> list[bool]:
    """What of the body trains after a resume with a ``main`` that has frozen it, or not."""
    later = unfrozen(0, None)
    body_of(later).requires_grad_(not frozen)
    later.check_complete()
    carried(source, later)
    again = unfrozen(0, None)
    carried(later, again)  # a newcomer, or another resume
    if frozen:
        assert flags_of(again) == flags_of(later)
    return [p.requires_grad for p in body_of(later).parameters()]


def test_a_resume_with_another_choice_in_main_has_it() -> None:
    assert resumed(unfrozen(3, None), frozen=True) == [False, False]
    assert resumed(unfrozen(3, None), frozen=False) == [True, True]


def test_a_resume_has_what_steps_have_switched_whatever_main_says() -> None:
    switched = unfrozen(3, 1)
    body_of(switched).requires_grad_(False)
    body_of(switched).get_parameter("bias").requires_grad_(True)
    assert resumed(switched, frozen=True) == [False, True]


def test_an_abandoned_step_takes_the_group_back_that_it_has_added() -> None:
    state = unfrozen(3, None)
    undo, plain = UnitUndo(state), state.encode_plain()
    undo.begin()
    unfreeze(state)
    undo.discard(backward_open=False)
    assert state.encode_plain() == plain
    unfreeze(state)  # the step done again: torch refuses parameters that are in a group already


def test_a_group_of_an_untracked_module_is_refused_when_it_is_there() -> None:
    state = unfrozen(1, None)
    state.optimizers["optimizer"].add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    with pytest.raises(StepError, match="no tracked module"):
        state.encode_plain()


def test_tied_weights_are_one_tensor_and_buffers_that_are_not_saved_are_there() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net.register_buffer("mask", torch.ones(2), persistent=False)
    state = TrackedState()
    state.track("net", net)
    assert sorted(state.tensors()) == ["net/buffer/mask", "net/param/0.bias", "net/param/0.weight", "net/param/1.bias"]


def bent(steps: int, width: int = 4) -> tuple[TrackedState, torch.optim.LBFGS, nn.Linear]:
    """LBFGS keeps lists of tensors, and a list of tensors and Nones."""
    state, net = TrackedState(), nn.Linear(width, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, history_size=4)
    for number in range(steps):
        target = torch.full((2, 3), float(number))

        def closure(target: torch.Tensor = target) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (net(torch.ones(2, width)) - target).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    state.track("net", net)
    state.track("optimizer", optimizer)
    return state, optimizer, net


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_lists_of_tensors_in_an_optimizers_state_come_as_they_are(steps: int) -> None:
    torch.manual_seed(3)
    (source, given, net), (newcomer, taken, copy) = bent(3), bent(steps)
    assert any("/old_dirs/" in path for path in source.tensors())
    carried(source, newcomer)
    assert newcomer.content() == source.content()
    assert newcomer.encode_plain() == source.encode_plain()
    for optimizer, module in ((given, net), (taken, copy)):  # and they train on alike

        def closure(optimizer: torch.optim.LBFGS = optimizer, module: nn.Module = module) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = module(torch.ones(2, 4)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert newcomer.content() == source.content()


def test_a_list_in_an_optimizers_state_is_put_back() -> None:
    torch.manual_seed(3)
    state, optimizer, net = bent(2)
    undo = UnitUndo(state)
    undo.begin()
    held = optimizer.state[net.weight]
    before = list(held["old_dirs"])
    held["old_dirs"] = [*before, torch.ones(15)]
    held["n_iter"] += 1
    undo.discard(backward_open=False)
    assert [tensor.data_ptr() for tensor in held["old_dirs"]] == [tensor.data_ptr() for tensor in before]


# -- what may be tracked --------------------------------------------------------------------------------------------------
class Custom:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_an_object_of_tensors_and_plain_data_comes_back_as_it_was() -> None:
    given = {"a": torch.arange(3), "pair": (1, torch.ones(2)), "deep": [{"x": None}, "text", 2.5]}
    source, newcomer = TrackedState(), TrackedState()
    other = Custom({"a": torch.zeros(3, dtype=torch.int64), "pair": (0, torch.zeros(2)), "deep": [{"x": 1}, "", 0.0]})
    source.track("it", Custom(given))
    newcomer.track("it", other)
    carried(source, newcomer)
    assert other.state["a"].tolist() == [0, 1, 2]
    assert isinstance(other.state["pair"], tuple)
    assert other.state["pair"][1].tolist() == [1, 1]
    assert other.state["deep"] == [{"x": None}, "text", 2.5]


class Copies:
    """As most are written by hand: what ``state_dict`` returns is not what the object holds, so nothing can be written into it."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shadow = {"w": torch.randn(3, generator=generator)}
        self.updates, self.history = seed, [0.5 * seed]

    def state_dict(self) -> dict[str, Any]:
        shadow = {name: tensor.clone() for name, tensor in self.shadow.items()}
        return {"shadow": shadow, "updates": self.updates, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: tensor.clone() for name, tensor in state["shadow"].items()}
        self.updates, self.history = state["updates"], list(state["history"])

    def held(self) -> tuple[Any, ...]:
        return self.shadow["w"].tolist(), self.updates, self.history


def copying(seed: int) -> tuple[TrackedState, Copies]:
    state, thing = tracked(seed=seed), Copies(seed)
    state.track("average", thing)
    return state, thing


def test_an_object_whose_state_dict_returns_copies_is_given_to_a_newcomer() -> None:
    (source, theirs), (newcomer, mine) = copying(7), copying(1)
    carried(source, newcomer)
    assert mine.held() == theirs.held() == Copies(7).held()


def test_an_object_whose_state_dict_returns_copies_is_put_back_when_a_step_is_discarded() -> None:
    """Tensors alone, plain values alone, and both: whichever of them the step has changed."""
    for change in (
        lambda it: it.shadow["w"].add_(1.0),
        lambda it: setattr(it, "updates", 99),
        lambda it: (it.shadow["w"].mul_(2.0), it.history.append(3.0)),
    ):
        state, thing = copying(3)
        undo = UnitUndo(state)
        for _ in range(2):  # once more: it may be discarded again
            undo.begin()
            change(thing)
            assert thing.held() != Copies(3).held()
            undo.discard(backward_open=False)
            assert thing.held() == Copies(3).held()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_scheduler_that_steps_before_the_gate_is_put_back_when_the_step_is_discarded(steps: int) -> None:
    """With the learning rates that it has set; then the step that is done again does the same."""
    state = tracked(steps=steps)
    scheduler, optimizer = state.others["scheduler"], state.optimizers["optimizer"]
    before = dict(scheduler.state_dict()), [dict(group, params=0) for group in optimizer.param_groups]
    undo, seen = UnitUndo(state), []
    for _ in range(2):
        undo.begin()
        for _ in range(2):  # so that the rate changes, wherever it stood
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch would have the optimizer go first
                scheduler.step()
        seen.append((scheduler.last_epoch, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]))
        undo.discard(backward_open=False)
        after = dict(scheduler.state_dict()), [dict(group, params=0) for group in optimizer.param_groups]
        assert after == before
    assert seen[0] == seen[1] != (before[0]["last_epoch"], before[0]["_last_lr"], before[1][0]["lr"])


def test_state_that_is_neither_tensor_nor_plain_data_is_refused() -> None:
    state = TrackedState()
    state.track("it", Custom({"lock": object()}))
    with pytest.raises(StepError, match="neither a tensor nor plain data"):
        state.manifest("")


def test_what_has_no_state_dict_is_refused() -> None:
    with pytest.raises(StepError, match="without state_dict"):
        TrackedState().track("number", 3)


def test_a_name_is_given_once() -> None:
    state = TrackedState()
    state.track("net", nn.Linear(1, 1))
    with pytest.raises(StepError, match="twice"):
        state.track("net", nn.Linear(1, 1))


def test_a_parameter_of_an_untracked_module_is_refused() -> None:
    state = TrackedState()
    state.track("optimizer", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1))
    with pytest.raises(StepError, match="trains 2 parameter"):
        state.check_complete()


# -- a discarded step --------------------------------------------------------------------------------------------------------
def test_a_discarded_step_leaves_no_trace() -> None:
    """batch norm writes its statistics behind torch's back: their version does not count up."""
    state = tracked(steps=2)
    before = {path: tensor.clone() for path, tensor in state.tensors().items()}
    plain = state.encode_plain()
    undo = UnitUndo(state)
    undo.begin()
    net, scheduler = state.modules["net"], state.others["scheduler"]
    net(torch.randn(6, 4)).sum().backward()
    scheduler._step_count += 1
    undo.discard(backward_open=False)
    assert all(torch.equal(before[path], tensor) for path, tensor in state.tensors().items())
    assert state.encode_plain() == plain
    assert all(parameter.grad is None for parameter in net.parameters())


# -- digests -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "digest", [digest, lambda tensor: int(device_digest(tensor.view(torch.uint8)))], ids=["CRC", "sums"]
)
@pytest.mark.parametrize("count", [2, 7, 1021, 5000, 300_000])
def test_a_digest_sees_a_flipped_bit_and_two_words_that_changed_places(
    count: int, digest: Callable[[torch.Tensor], int]
) -> None:
    tensor = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(count))
    original = digest(tensor)
    for place in (0, count // 2, count - 1):
        other = tensor.clone()
        other[place] ^= -(2**63) if place % 64 == 63 else 1 << (place % 64)
        assert digest(other) != original
    for a, b in ((0, count - 1), (0, 1), (count // 2, count - 1)):
        other = tensor.clone()
        other[[a, b]] = other[[b, a]]
        assert a == b or digest(other) != original
    assert digest(tensor.clone()) == original
    assert -(2**63) <= original < 2**63


def test_a_digest_is_of_the_memory_whatever_its_type() -> None:
    for tensor in (
        torch.ones(3, dtype=torch.bool),
        torch.zeros(0),
        torch.tensor(2.5),
        torch.ones(5, 3, dtype=torch.bfloat16).t(),
    ):
        assert digest(tensor) == digest(tensor.clone(memory_format=torch.preserve_format))


# -- how a transfer is laid out ---------------------------------------------------------------------------------------------
def manifest_of(*sizes: int) -> StateManifest:
    return StateManifest([TensorInfo(f"t{i}", "uint8", (size,), False, False) for i, size in enumerate(sizes)], b"")


def test_sources_share_the_pieces_and_each_byte_is_sent_once() -> None:
    sizes = (10, 3 * PIECE_BYTES_MIN + 5, 100_000)
    layout = RestoreLayout(manifest_of(*sizes), (2, 5))
    assert layout.small == ["t0"]
    for index in (1, 2):
        parts = [(piece.start, piece.stop) for piece in layout.pieces if piece.path == f"t{index}"]
        assert parts[0][0] == 0
        assert parts[-1][1] == sizes[index]
        assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert {piece.source for piece in layout.pieces} == {2, 5}


def test_a_tensor_is_checked_by_another_source_than_the_one_that_sends_its_first_piece() -> None:
    layout = RestoreLayout(manifest_of(100_000, 100_000, 100_000), (1, 4, 6))
    first = {piece.path: piece.source for piece in layout.pieces if piece.start == 0}
    assert all(layout.checker[path] != source for path, source in first.items())


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator().manual_seed(3),
        np.random.default_rng(3),
        np.random.Generator(np.random.MT19937(3)),
        np.random.Generator(np.random.Philox(3)),
        np.random.RandomState(3),
        random.Random(3),
    ],
    ids=lambda one: type(getattr(one, "bit_generator", one)).__name__,
)
def test_a_tracked_generator_is_put_back_and_given_to_a_newcomer(generator: Any) -> None:
    def draw() -> list[float]:
        if isinstance(generator, torch.Generator):
            return torch.randn(5, generator=generator).tolist()
        return [float(generator.random()) for _ in range(5)]

    state = TrackedState()
    state.track("model", nn.Linear(2, 2))
    state.track("generator", generator)
    draw()
    undo = UnitUndo(state)
    undo.begin()
    first = draw()
    assert not undo.discard(backward_open=True)
    assert draw() == first
    undo.begin()
    manifest = state.manifest("")
    tensors = {path: tensor.clone() for path, tensor in state.tensors().items()}
    second = draw()
    state.load_plain(manifest, tensors)
    assert draw() == second


def abandoned(net: nn.Module) -> tuple[TrackedState, UnitUndo]:
    """A step without copies of what the optimizer trains was left at its first place."""
    state = TrackedState()
    state.track("net", net)
    state.track("optimizer", torch.optim.SGD(net.parameters(), lr=0.1))
    undo = UnitUndo(state)
    undo.begin()
    undo.at_place()
    assert undo.discard(backward_open=False) == []
    return state, undo


def test_the_next_attempt_begins_with_digests_that_were_taken_while_others_were_waited_for() -> None:
    state, undo = abandoned(nn.Linear(4, 4))
    ahead = undo.digests_ahead()
    assert ahead.keys() == {"net/param/weight", "net/param/bias"}
    undo.begin()
    state.modules["net"].get_parameter("weight").data.add_(1.0)
    undo.at_place()
    undo.before_update()
    assert undo.not_put_back() == ["net/param/weight"]


def test_digests_of_a_state_that_was_replaced_since_are_not_those_of_the_attempt() -> None:
    state, undo = abandoned(nn.Linear(4, 4))
    undo.digests_ahead()
    other = TrackedState()
    other.track("net", nn.Linear(4, 4))
    other.track("optimizer", torch.optim.SGD(other.modules["net"].parameters(), lr=0.1))
    carried(other, state)
    undo.begin()
    undo.at_place()
    undo.before_update()
    assert undo.not_put_back() == []


def test_nobody_takes_digests_ahead_of_a_unit_that_begins_with_none() -> None:
    _, undo = abandoned(nn.Linear(4, 4))
    undo.begin()
    undo.before_update()
    undo.ended()
    assert not undo.digests_ahead()


@pytest.mark.parametrize(("key", "held"), [("step", 3), ("all", {"step": 3}), (0, torch.ones(2))])
def test_state_of_an_optimizer_that_is_not_for_a_parameter_is_refused(key: Any, held: Any) -> None:
    state = tracked(steps=1)
    state.encode_plain()
    state.optimizers["optimizer"].state[key] = held
    with pytest.raises(StepError, match=f"'optimizer', a AdamW, holds state under {key!r}, and not for a parameter"):
        state.encode_plain()


def test_state_of_an_optimizer_for_a_buffer_is_refused() -> None:
    state = tracked(steps=1)
    buffer = next(state.modules["net"].buffers())
    state.optimizers["optimizer"].state[buffer] = {"mean": torch.ones(4)}
    with pytest.raises(StepError, match=r"holds state under a tensor \(shape \(5,\)\), and not for a parameter"):
        state.encode_plain()


def test_state_of_a_parameter_that_is_trained_no_more_is_not_refused() -> None:
    state = tracked(steps=1)
    state.optimizers["optimizer"].param_groups[0]["params"].pop()
    state.encode_plain()


def test_a_key_without_state_is_not_refused() -> None:
    state = tracked(steps=1)
    of_optimizer: Any = state.optimizers["optimizer"].state
    assert not of_optimizer["all"]  # the dictionary makes an empty one
    state.encode_plain()
