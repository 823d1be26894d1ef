"""What a script writes through ``.data`` before a gate is put back or named, also where doing it again changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rackrun.errors import StepError
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.undo import unit_undo
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from rackrun.worker.tensors.undo_copies import NoMemoryForCopies
from rackrun.worker.torch_compat import data_access
from tests.worker.harness import TRACED

PATH = "model/param/weight"


@pytest.fixture(autouse=True)
def reports() -> Iterator[None]:
    there = "data" in vars(nn.Parameter)
    data_access.install()
    yield
    data_access.watch(None)
    if not there:
        del nn.Parameter.data
        del torch.distributed.tensor.DTensor.data


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise NoMemoryForCopies

    monkeypatch.setattr(unit_undo, "place_for", none)


class Training:
    """A model, its optimizer, and what undoes a step of them. The first step is over."""

    def __init__(self, width: int = 600) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = TrackedState()
        self.state.track("model", self.model)
        self.state.track("optimizer", self.optimizer)
        self.undo = UnitUndo(self.state)
        self.step()

    def step(self, change: Callable[[], object] = lambda: None) -> None:
        """A step that counts."""
        self.undo.begin()
        assert not self.undo.changed_between
        change()
        self.undo.before_update()
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()
        self.model.weight.grad = None
        self.undo.ended()
        self.undo.committed()

    def abandoned(self, change: Callable[[], object]) -> list[str]:
        self.undo.begin()
        change()
        return self.undo.discard(backward_open=True)

    def clamp(self) -> None:
        self.model.weight.data.clamp_(-0.01, 0.01)

    def assign(self) -> None:
        self.model.weight.data = self.model.weight.data.clamp(-0.01, 0.01)

    def read(self) -> None:
        self.model.weight.data.norm()

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


@pytest.mark.parametrize("change", ["clamp", "assign"])
def test_the_first_write_is_put_back_and_known_from_then_on(change: str) -> None:
    training = Training()
    before = training.weight
    assert not training.abandoned(getattr(training, change))
    assert training.weight.equal(before)
    assert not training.state.lineage.changes.early
    training.step(getattr(training, change))
    assert training.state.lineage.changes.early == (PATH,)
    before = training.weight
    assert not training.abandoned(training.clamp)
    assert training.weight.equal(before)


def test_an_attempt_that_writes_after_one_that_did_not_come_so_far_counts() -> None:
    training = Training()
    assert not training.abandoned(lambda: None)
    assert not training.abandoned(training.clamp)
    training.step(training.clamp)
    assert not training.undo.not_put_back()


@pytest.mark.usefixtures("no_room")
def test_without_room_for_a_copy_the_write_is_named() -> None:
    training = Training()
    assert training.abandoned(training.clamp) == [PATH]
    training = Training()
    training.step(training.clamp)
    assert training.state.lineage.changes.early == (PATH,)


def test_who_only_reads_is_copied_three_times_and_digested_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    copies, taken = training.undo._copies, list[str]()
    take = copies.take

    def told(tensors: Mapping[str, torch.Tensor], place: torch.device | None = None) -> int:
        taken.extend(tensors)
        return take(tensors, place)

    monkeypatch.setattr(copies, "take", told)
    for count in range(1, 6):
        training.step(training.read)
        assert taken.count(PATH) == min(count, 3)
    assert not training.abandoned(training.read)
    assert not training.state.lineage.changes.early
    assert training.abandoned(training.clamp) == [PATH]


def test_a_reader_who_begins_to_write_is_found_at_the_gate() -> None:
    training = Training()
    for _ in range(9):
        training.step(training.read)
    training.step(training.clamp)
    assert training.state.lineage.changes.early == (PATH,)


def test_a_parameter_that_a_clamp_reaches_later_than_another_is_put_back() -> None:
    training = Training()

    def clamp(bias: float = 10.0) -> None:
        training.clamp()
        training.model.bias.data.clamp_(-bias, bias)

    for _ in range(5):
        training.step(clamp)
    assert training.state.lineage.changes.early == (PATH,)
    before = training.model.bias.detach().clone()
    assert not training.abandoned(lambda: clamp(0.001))
    assert training.model.bias.equal(before)


def test_what_was_accessed_in_the_step_before_is_noted_at_the_first_access() -> None:
    training = Training()

    def both() -> None:
        training.model.bias.data.norm()
        training.model.weight.data.norm()

    training.step(both)
    training.undo.begin()
    training.model.bias.data.norm()
    assert PATH in training.undo.accesses


def test_a_view_that_was_kept_counts_as_an_access() -> None:
    training = Training()
    views = [training.model.weight.data.view(-1)]
    before = training.weight
    assert not training.abandoned(lambda: views[0].clamp_(-0.01, 0.01))
    assert training.weight.equal(before)
    views.clear()
    training.undo.begin()
    assert PATH not in training.undo.accesses


def test_a_tensor_that_data_was_replaced_by_counts_as_an_access() -> None:
    training = Training()
    flat = [torch.zeros(600 * 600 + 1)]
    training.model.weight.data = flat[0][1:].view(600, 600)
    training.undo.accept()
    training.step()
    before = training.weight
    assert not training.abandoned(lambda: flat[0].clamp_(-0.01, 0.01))
    assert training.weight.equal(before)
    flat.clear()
    training.undo.begin()
    assert PATH not in training.undo.accesses


def test_a_version_that_has_moved_before_the_access_is_named() -> None:
    training = Training()

    def change() -> None:
        with torch.no_grad():
            training.model.weight.clamp_(-0.02, 0.02)
        training.clamp()

    assert training.abandoned(change) == [PATH]


def test_nothing_is_noted_after_the_gate() -> None:
    training = Training()
    training.undo.begin()
    training.undo.before_update()
    training.clamp()
    assert PATH not in training.undo.accesses


def test_a_write_between_two_steps_is_refused_and_a_read_is_not() -> None:
    training = Training()
    for _ in range(4):
        training.step()
        training.read()
        training.undo.check_stands(accessed=True)
    training.clamp()
    training.undo.check_stands()
    with pytest.raises(StepError, match=f"{PATH} was changed between two steps"):
        training.undo.check_stands(accessed=True)
    training.undo.begin()
    assert training.undo.changed_between == PATH


@pytest.mark.parametrize("accept", [True, False])
def test_nothing_is_noted_when_the_loop_is_over(accept: bool) -> None:
    training = Training()
    if accept:
        training.undo.accept()
    else:
        training.undo.let_go()
    training.clamp()
    training.undo.accept()
    training.step()


def test_copies_in_progress_are_waited_for_before_the_first_write_only() -> None:
    training, waited = Training(), []
    training.undo.accesses.settle = lambda: waited.append(training.weight)
    before = training.weight
    training.step(training.clamp)
    assert [one.equal(before) for one in waited] == [True]
    training.step(training.clamp)  # known, and copied at once by a snapshot
    assert len(waited) == 1


def test_an_access_under_any_mode_is_noted_as_the_bits_that_are_there() -> None:
    training = Training()
    before, x = training.weight, torch.ones(1, 600)

    def under_grad(weight: torch.Tensor) -> torch.Tensor:
        training.read()
        return (x @ weight).sum()

    def transformed() -> None:
        torch.func.grad(under_grad)(training.weight)
        training.clamp()

    def inference() -> None:
        with torch.inference_mode():
            training.model.weight.data.add_(0)
            training.read()

    def fake() -> None:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            training.read()
        training.clamp()

    for change in (transformed, inference, fake):
        assert not training.abandoned(change)
        assert training.weight.equal(before)
        assert not training.undo._copies.value(PATH).is_inference()
        assert type(training.undo._copies.value(PATH)) is torch.Tensor


def test_a_property_does_what_it_has_replaced() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert type(parameter.data) is torch.Tensor
    assert not parameter.data.requires_grad
    assert parameter.data.data_ptr() == parameter.data_ptr()
    parameter.data.add_(1)
    assert parameter._version == 0
    parameter.data = torch.zeros(2)
    assert parameter.shape == (2,)
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(1, 2))
    assert lazy.weight.data.shape == (3, 2)
    assert "data" not in vars(torch.Tensor)


@TRACED
@pytest.mark.leaks("AOTAutograd imports a progress bar, which keeps a thread")
def test_compiled_code_has_no_further_break_and_the_same_bits() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def clamped(x: torch.Tensor) -> torch.Tensor:
        model.weight.data.clamp_(-0.1, 0.1)
        return model(x) + model.weight.data.norm()  # type: ignore[no-any-return]

    data_access.watch(lambda _: None)
    version = model.weight._version
    out = torch.compile(clamped, fullgraph=True, backend="aot_eager")(x)
    assert model.weight._version > version, "compiled code moves the version"
    data_access.watch(None)
    assert out.equal(clamped(x))


def test_a_module_that_is_where_it_is_to_go_keeps_nothing() -> None:
    training = Training()
    training.model.to("cpu")
    assert not data_access.kept() & set(map(id, training.model.parameters()))


def test_a_thread_that_reads_all_the_time_neither_fails_nor_is_accused() -> None:
    training = Training(width=16)
    over, reads = threading.Event(), 0

    def read() -> None:
        nonlocal reads
        while not over.is_set():
            training.model.bias.data.sum()
            reads += 1

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for _ in range(200):
                training.step(training.read)
                assert not training.abandoned(training.read)
        finally:
            over.set()
        reading.result()
    assert reads
    assert not training.state.lineage.changes.early
