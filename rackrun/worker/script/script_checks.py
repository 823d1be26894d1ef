"""Checks, in every run and on each rank, that a converted script still trains what it trained before.

Gradients that nobody has weighted, micro-batches that were not used, data from elsewhere, gradients that nobody
reduces, state that changes and is not tracked: each ends in other weights with exit code 0. What is certainly wrong is
refused with the line of the script; what may be intended is printed once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rackrun.errors import StepError
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.reports import say
from rackrun.worker.script.gradient_checks import GradientChecks, has_gradient
from rackrun.worker.script.interrupt import arm, interrupt_main
from rackrun.worker.script.kept_generators import KeptGenerators
from rackrun.worker.script.loop_only_names import unbound_without_a_turn
from rackrun.worker.script.untracked_changes import UntrackedChanges, is_kept
from rackrun.worker.script.user_line import line_at, line_of_name, user_frame, user_line, user_place
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from rackrun.worker.torch_compat import unhooked_calls
from rackrun.worker.torch_compat.not_compiled import not_compiled

__all__ = ["LoaderPass", "ScriptChecks"]

_LOOKED_AT_STEPS = 16


@dataclass
class LoaderPass:
    """One iteration over a loader: how many micro-batches it has, the script's place, how many were taken, and whether
    it is over."""

    micro_batches: int
    place: tuple[str, int] | None
    taken: int = 0
    over: bool = False

    @property
    def line(self) -> str:
        """The script's line, as `user_line` returns it."""
        return line_at(self.place)


class ScriptChecks:
    """The checks of one entry of ``main``. ``data_ranks``: returns how many ranks share the global batch. ``reduced``:
    whether gradients must be reduced."""

    def __init__(
        self, world: WorkerMembership, state: TrackedState, data_ranks: Callable[[], int], *, reduced: bool
    ) -> None:
        self._world, self._state = world, state
        self._gradients = GradientChecks(world, state, data_ranks, reduced=reduced)
        self._untracked = UntrackedChanges(state)
        self._step: Step | None = None
        self._function: Callable[..., Any] = lambda: None
        self._steps = 0
        self.loop_over = False
        self.own_data_is_carried = False
        """Whether the script reads loaders of its own, whose states `run.carry` has."""
        self._readings: list[LoaderPass] = []
        self._weight_reads = 0
        """Reads of the current step's weight when its last micro-batch was delivered or the loader was exhausted."""
        self._read_in_step = self._read_between = ""
        self._given_tensors = self._had_read = False
        self._generators, self._thread = KeptGenerators(), threading.get_ident()
        self._is_newcomer: bool | None = None
        """Whether this process has taken a rank over, as `_has_taken_over` says; None before the first attempt."""
        self._said: set[str] = set()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        )
        unhooked_calls.listen(self)
        arm()

    def let_go(self) -> None:
        """Remove all hooks, when ``main`` was left."""
        for hook in self._hooks:
            hook.remove()
        unhooked_calls.listen(None)

    def begins_loop(self) -> None:
        """Print a notice if code after the loop reads names that only the loop binds. Called from the head of the loop
        over ``run.steps``."""
        frame = user_frame()
        found = unbound_without_a_turn(frame) if frame is not None else None
        if frame is not None and found is not None:
            name, line = found
            self._say(
                "names",
                f"{user_line(frame).rpartition(':')[0]}:{line}: reads `{name}`, which only the loop over run.steps() binds. A process that takes a rank "
                f"over when all steps are done comes there without it, and that would end the job. Remedy: read it from a tracked object; or bind it "
                "before the loop, where another value does no harm.",
            )

    # -- around one attempt, and after the step
    def run(self, step: Step, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the step function for one attempt, with all checks reset, and return its result."""
        self._had_read = step.attempt > 0 and (self._had_read or bool(self._readings))
        self._step, self._function = step, function
        if self._is_newcomer is None:
            self._is_newcomer = self._has_taken_over()
        self._readings.clear()
        self._gradients.begin_attempt()
        self._read_in_step, self._weight_reads = "", 0
        given = (*args, *kwargs.values())
        self._given_tensors = bool(given) and any(isinstance(one, torch.Tensor) for one in _spread(given))
        try:
            return function(step, *args, **kwargs)
        finally:
            self._step = None

    def committed(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check for changes of untracked objects after a committed step. Raises `StepError` for those that were meant
        to be kept; prints the others."""
        self._steps += 1
        self._read_between = ""
        changed = self._untracked.after_step(function, tuple(args), kwargs)
        for change in changed:
            if change.meant_to_be_kept:
                raise StepError(
                    f"{change.line}: {change.name}, a {change.kind}, changes in the step function and is not tracked: a process that takes "
                    "a rank over would begin with what it was before run.steps().",
                    remedy=f"run.track({change.name.rpartition('.')[2].partition('[')[0]}=...) before run.steps().",
                )
        if changed:
            names = ", ".join(change.name for change in changed[:5])
            self._say(
                f"untracked {names}",
                f"{changed[0].line}: the step function changes {names}{' and more' if len(changed) > 5 else ''}, which run.track was not given. "
                "A process that takes a rank over has it as it was before run.steps(). Remedy: none if it is only shown; else keep it "
                "in a buffer of a tracked module, or in a tracked object with state_dict and load_state_dict.",
            )

    # -- called by the loader
    def record_batch_read(self, begun_in: Any) -> None:
        """Note a batch from a DataLoader of the script's own (see `calls.CallObserver.record_batch_read`). Raises
        `StepError` if the iteration began outside the step."""
        if self.own_data_is_carried:
            return
        if self._step is not None:
            line = user_line()
            if begun_in is not self._step:
                raise StepError(
                    f"{line}: a step reads on in a DataLoader of the script's own. A step that is done again would get other samples, "
                    "nobody counts them, and every rank reads all of them.",
                    remedy="use `for batch in run.loader(dataset)` in the step function, or run.stream for data that are read from front to back.",
                )
            self._read_in_step = self._read_in_step or line
        elif self._world.scope is Scope.OUTSIDE and not self._read_between:
            self._read_between = user_line()

    def begin_iteration(self, attempt: Step, micro_batches: int) -> LoaderPass:
        """Begin an iteration over a loader with this many micro-batches, in ``attempt`` at a unit or of a spare. Raises
        `StepError` in a thread of the script's own, and for generators that `KeptGenerators.begin` refuses."""
        reading = LoaderPass(micro_batches, user_place())
        if self._step is not None:
            self._refuse_other_thread(reading)
            self._readings.append(reading)
        if kept := self._generators.begin(attempt, self._function, newcomer=self._is_newcomer is True):
            self._say(
                "generator around the loader",
                f"{reading.line}: a generator around run.loader, kept from step to step, holds {', '.join(kept)}, which "
                "rackrun can neither put back nor give to another process. If a step has to be done again, or a rank "
                "is taken over, the job ends there. Remedy: call the generator function in the @run.step function.",
            )
        return reading

    def check_left_generators(self) -> None:
        """Check generators around the loader that go on although the attempt in which they began does not count. Raises
        StepError if they keep values."""
        self._generators.check_left()

    def _has_taken_over(self) -> bool:
        """Return whether this process begins this entry of ``main`` with state that others had: it takes a rank over,
        or all ranks have entered ``main`` anew in a world of another size."""
        plan, rank = self._world.joined, self._world.rank
        return plan is not None and (plan.reshard is not None or any(one.rank == rank for one in plan.restores))

    def _refuse_other_thread(self, reading: LoaderPass) -> None:
        """Raise `StepError`, in the main thread too, which may wait for this one, if a thread of the script's own reads
        the loader."""
        if threading.get_ident() == self._thread:
            return
        error = StepError(
            f"{reading.line}: run.loader is read by a thread of the script's own ({threading.current_thread().name}). Which "
            "micro-batch a loss belongs to, and the random numbers of the step, would depend on when that thread runs.",
            remedy="iterate over run.loader in the main thread; run.loader(..., num_workers=N) reads ahead in processes.",
        )
        interrupt_main(error)
        raise error

    def record_delivery(self, reading: LoaderPass) -> None:
        """Note that a micro-batch of ``reading`` is about to be delivered."""
        reading.taken += 1
        if self._step is not None:
            self._weight_reads = self._step._weight_reads

    def record_generator_use(self, reading: LoaderPass, name: str, generator: Any) -> None:
        """Print a notice if the data set has drawn from a ``generator`` of its own; ``generator`` None: in one of the
        loader's processes."""
        if name and (generator is None or not is_kept(getattr(generator, "bit_generator", generator), self._state)):
            where = "" if generator is not None else " in the loader's processes"
            self._say(
                "generator of the data",
                f"{reading.line}: the data set draws from {name}, a Generator of its own{where}. Unless it is seeded anew for each sample, what a "
                "sample becomes depends on which samples this process has had before, and is another after a failure. "
                "Remedy: draw from torch's, numpy's or Python's own random numbers, which are seeded for each sample"
                + ("; or give the generator to run.track." if generator is not None else "."),
            )

    def end_iteration(self, reading: LoaderPass) -> None:
        """Note that the loader is exhausted."""
        reading.over = True
        if self._step is not None:
            self._step._end_delivery()
            self._weight_reads = self._step._weight_reads

    # -- called by torch's hooks
    @property
    def attempt(self) -> Step | None:
        return self._step

    def backward(self, roots: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Return a function to be called after a backward pass that records unweighted gradients, or None (see
        `calls.CallObserver.backward`)."""
        step = self._step
        if step is None or not self._readings or step._weight_reads > self._weight_reads:
            return None  # the script weights gradients by hand, as far as can be known
        if self._steps >= _LOOKED_AT_STEPS and self._steps & (self._steps - 1):
            return None
        found = unhooked_calls.leaves(roots)
        if not found:
            return None
        return self._gradients.watch_unweighted(found, user_line())

    def record_change(self, thing: Any, call: str) -> None:
        """Raise `StepError` if a change of ``thing`` by ``call`` would be lost because it is not tracked (see
        `calls.CallObserver.record_change`)."""
        if self._world.scope is Scope.SETUP or self.loop_over:
            return
        if isinstance(thing, LRScheduler) and not is_kept(thing.optimizer, self._state):
            return
        if isinstance(thing, torch.amp.GradScaler) and not thing.is_enabled():
            return
        if not is_kept(thing, self._state):
            raise StepError(
                f"{user_line()}: {type(thing).__name__}.{call}() changes something that is not tracked: a process that takes a rank over "
                "would begin with what it was before run.steps(), and go on otherwise than the others.",
                remedy="pass it to run.track(...) before run.steps().",
            )

    # -- before each optimizer.step(), ahead of the gate; after it where a closure computes the gradients
    @not_compiled
    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):
            self._check(optimizer)

    @not_compiled
    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            self._check(optimizer)

    def _check(self, optimizer: Any) -> None:
        step = self._step
        if step is None:
            return
        if not self._readings and self._had_read:
            raise StepError(
                f"{line_of_name(self._function, '')}: the step is done again, and this time it begins no iteration over "
                "run.loader: it has kept an iterator of the attempt that does not count.",
                remedy="begin a new `for batch in loader` in every call of the @run.step function.",
            )
        if not self._readings:
            self._check_data_of_its_own()
        elif has_gradient(optimizer):
            self._check_read_through()
            self._check_weighted(step, optimizer)
        self._gradients.check_reduced(optimizer)

    def _check_data_of_its_own(self) -> None:
        if self.own_data_is_carried:
            return
        line = self._read_in_step or (self._read_between if self._given_tensors else "")
        if line:
            raise StepError(
                f"{line}: the step trains on a DataLoader of the script's own, and on no micro-batch of run.loader: every rank reads all "
                "samples, nobody counts them, and after a failure others are read.",
                remedy="use `for batch in run.loader(dataset)` in the step function, or run.stream for data that are read from front to back.",
            )
        self._say(
            "no loader",
            f"{line_of_name(self._function, '')}: the step uses no micro-batch of run.loader. Which samples it trains on, whether ranks have "
            "different ones, and whether a step that is done again has the same, is not known; the ledger stays empty. "
            "Remedy: `for batch in run.loader(dataset)` in the step function.",
        )

    def _check_read_through(self) -> None:
        for reading in self._readings:
            if reading.taken < reading.micro_batches:
                raise StepError(
                    f"{reading.line}: optimizer.step() came after {reading.taken} of the {reading.micro_batches} micro-batches that this rank "
                    "has in the step. The others would be trained on by nobody, and gradients are reduced over the ranks with the last.",
                    remedy="iterate over run.loader to its end, then call optimizer.step(); for fewer samples a step use a smaller global_batch_size.",
                )

    def _check_weighted(self, step: Step, optimizer: Any) -> None:
        if any(reading.over for reading in self._readings) and step._weight_reads > self._weight_reads:
            return  # the gradients themselves were weighted
        unweighted = step._local_loss is None and not step._weight_reads
        self._gradients.check_weighted(optimizer, user_line() if unweighted else "")

    def _say(self, what: str, text: str) -> None:
        if self._world.rank == 0 and self._world.generation and what not in self._said:
            self._said.add(what)
            say(text)


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(map(callable, (*args, *kwargs.values())))


def _spread(values: Sequence[Any]) -> list[Any]:
    """Return ``values`` and the items of lists, tuples and dictionaries among them."""
    found: list[Any] = []
    for value in values:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        found += [value, *inner]
    return found
