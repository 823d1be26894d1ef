"""The `Run` object that the user's ``main(run)`` receives: position, data, tracked state, and the step loop."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rackrun.core.placement import mesh_resize
from rackrun.errors import StepError, UsageError
from rackrun.protocol.ids import BEGIN, EVERY, Position
from rackrun.topology.model.mesh import DATA_AXES
from rackrun.worker.batch.lr_rule import ScaleLR
from rackrun.worker.batch.mesh_axes import MIN_RANKS_VARIABLE, axes_of, data_coordinate, fitted, unfit_because
from rackrun.worker.batch.microbatch_collectives import MicrobatchCollectives
from rackrun.worker.data.global_batch import Batches, StepBatch, Worlds, data_ranks
from rackrun.worker.data.loader import BatchPlan, Loader, MapDataset, Shard, StepOrder
from rackrun.worker.data.rng import reseed
from rackrun.worker.data.streams import STATE_EVERY, Stream
from rackrun.worker.device.numerics import numerics_of
from rackrun.worker.exact.exact_reduction import ExactReduction
from rackrun.worker.exact.fixed_point_scales import width_of
from rackrun.worker.loop.data_sources import DataSources
from rackrun.worker.loop.driven_loop import NO_END, DrivenLoop
from rackrun.worker.loop.entry_parts import MainHandover
from rackrun.worker.loop.loop_exit import all_leave
from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.decisions.interruptions import Reenter
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.process.log_values import log_values
from rackrun.worker.process.reports import say
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.script.rank_changes import RankChangeHooks
from rackrun.worker.script.script_checks import ScriptChecks
from rackrun.worker.script.second_loop import ONE_LOOP, second_loop
from rackrun.worker.script.user_line import user_line
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints, DurableOptions
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.turns import Turn, decoded
from rackrun.worker.torch_compat.not_compiled import is_compiled, read_eagerly, refuse_compiled_step

__all__ = ["Opened", "Run", "Steps"]

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

_LEFT_EARLY = 2**20
"""Phase number of the agreement that all ranks leave the loop early; it sorts after all other phases of the last step.
"""


class Steps(Iterator[int]):
    """Iterator over the numbers of the steps to run, to be passed unchanged to the step function. ``len()`` is the
    total number of steps of the run, steps already committed included."""

    def __init__(self, numbers: Iterator[int], total: int) -> None:
        self._numbers, self._total = numbers, total

    def __next__(self) -> int:
        return next(self._numbers)

    def __len__(self) -> int:
        return self._total

    def close(self) -> None:
        """Leave the loop before its end, as ``break`` does: on all ranks after the same step."""
        close: Callable[[], None] | None = getattr(self._numbers, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class Opened:
    """What holds for a run that is opened in the middle of a script (`rackrun.begin`)."""

    entered_once: str
    """Why the script cannot run again in its process, for a message."""
    order: StepOrder | None = None
    """The micro-batches of each step, where a framework decides about them."""


class Run:
    """One run of the job, on this rank. `rackrun.elastic` creates it; a script never does.

    ``device`` is the torch device on which this rank computes.
    """

    def __init__(
        self,
        runtime: Runtime,
        batch: BatchPlan,
        mesh: dict[str, int] | None,
        snapshot_every: int | None,
        reduction: str = "fast",
        carried: MainHandover | None = None,
        scale: ScaleLR | None = None,
        opened: Opened | None = None,
    ) -> None:
        """``opened``: what holds for a run that code has opened which cannot run again; None under `rackrun.elastic`."""
        order, entered_once = (opened.order, opened.entered_once) if opened else (None, "")
        self._batch = batch
        """The global batch with the sizes given to `rackrun.elastic`."""
        self._order = order
        self.device = runtime.device
        self._runtime, self._world = runtime, runtime.world
        boot = runtime.boot
        if carried is not None:
            self._axes = fitted(carried.axes, runtime.world.size)
        else:
            changed = boot is not None and boot.generation > 1
            self._axes = axes_of(mesh, runtime.world.size, os.environ, changed=changed)
        self._mesh: DeviceMesh | None = None
        self._data = DataSources(self)
        self._state = TrackedState()
        self._state.numerics = functools.partial(numerics_of, runtime.device)
        width = width_of(reduction, batch.shards)
        if width is not None and any(name == "pp" for name, _ in self._axes):
            raise UsageError(
                f'reduction="{reduction}" needs the same parameters on all ranks, which a mesh with an axis "pp" has not.',
                remedy='use reduction="fast".',
            )
        exact = ExactReduction(runtime.world, self._state, width, batch.shards) if width is not None else None
        facts = batch.facts + (f", reduction={reduction!r}" if exact else "") + (", batch='scale_lr'" if scale else "")
        options = DurableOptions.from_environment(facts)
        durable = carried.durable if carried else None
        if durable is not None:
            durable.become(self._state)
        elif options:
            durable = DurableCheckpoints(runtime, self._state, options)
            if runtime.world.rank == 0:
                durable.check_training()
        self._held = entered_once or unfit_because(self._axes, mesh)
        self._world.microbatch_collectives = MicrobatchCollectives(self._axes, runtime.world.size)
        self._batches = Batches(batch, scale, functools.partial(data_ranks, self._axes), self._worlds, order)
        self._places = RankChangeHooks(lambda: (self._world.rank, self._world.size))
        self._checks = ScriptChecks(
            runtime.world, self._state, lambda: self._data_coordinate()[1], reduced=reduction != "none"
        )
        self._units = UnitRunner(
            runtime, self._state, self._batches, snapshot_every, durable, self._axes, exact, carried
        )
        self._units.entered_once(entered_once)
        self._every: list[tuple[int, Callable[[], Any]]] = []
        self._at_end: list[Callable[[], Any]] = []
        self._step_functions: list[Callable[..., Any]] = []
        self._open = 0
        """The total number of steps of a loop that has begun and not ended; 0 when no loop is open."""
        self._came_after_loop = False
        """Whether all steps were committed, or the other ranks had left the loop, when this process reached it."""
        self._carried = carried is not None
        """Whether this is another entry of ``main``."""
        self._looping: int | None = None
        """The step that the loop has yielded and whose step function has not been called yet; None otherwise."""
        self._is_committed = False
        """Whether that step is committed already, in a turn that this process enters after others."""
        self._turn = Turn()
        self._goes_through = self._joined_others = False
        """Whether this process still goes through calls that are committed, and whether other ranks have made them."""
        self._calls_phases = False
        """Whether the loop's body may call `phase`."""
        self._driven: DrivenLoop | None = None
        """The loop that `do` and `phase` drive; None in a script that has no such loop."""
        reseed(batch.seed, "setup")

    # -- who and where
    @property
    @read_eagerly
    def rank(self) -> int:
        """This process's current rank, from 0. A spare has a provisional rank until it takes a place."""
        return self._world.groups[0].rank()

    @property
    @read_eagerly
    def world_size(self) -> int:
        """The current number of ranks in the world. Spares are not counted."""
        return self._world.groups[0].size()

    @property
    @read_eagerly
    def is_main(self) -> bool:
        """Whether this process is rank 0 of the world now, and not a spare. For an object that exactly one process must
        own and keep, use `main_only`."""
        is_main = self.rank == 0 and not self._units.waiting_spare
        if self._runtime.boot is not None:
            self._places.asked_for_main(is_main=is_main)
        return is_main

    @property
    @read_eagerly
    def global_batch_size(self) -> int:
        """Samples in the global batch of the current step, or of the next one between two steps.

        With ``batch="scale_lr"`` a spare knows the value only inside the loop over ``run.steps``.
        """
        step = self._units.step_in_hand
        return (
            self._batch_of(self._units.passed.step + 1 if step is None else int(step)).shards * self._batch.micro_batch
        )

    @property
    @read_eagerly
    def generation(self) -> int:
        """The number of the current membership of the world, which is how many there have been, this one included; 0 on
        a spare without a place."""
        return self._world.generation

    @property
    @read_eagerly
    def mesh(self) -> DeviceMesh:
        """The device mesh asked for with ``@rackrun.elastic(mesh=...)`` or ``rackrun --mesh``; by default one axis
        ``dp`` over all ranks."""
        if self._mesh is None:
            names, sizes = zip(*(self._axes or (("dp", self.world_size),)), strict=True)
            self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return self._mesh

    def on_join(self, function: Callable[[], Any]) -> None:
        """Call ``function()`` in this process whenever its place in the world is new.

        It is called at ``run.steps()``, on a spare when it takes over a rank, and each time that this process's rank or
        the number of ranks has changed. `rank`, `world_size` and `is_main` have their new values by then. It must not
        use collectives. Use it to set again what a framework has derived from an older rank.
        """
        self._places.on_join(function)

    def main_only(self, make: Callable[[], W]) -> W:
        """Return an object that forwards to what ``make()`` returns on rank 0, such as ``lambda:
        SummaryWriter("runs")``.

        ``make`` runs at the first use, in whichever process is rank 0 by then. On other ranks all methods do nothing
        and return None.
        """
        return cast("W", self._places.main_only(make, lambda: self.rank == 0 and not self._units.waiting_spare))

    # -- what is trained
    def track(self, **things: Any) -> None:
        """Keep these objects through failures: modules, optimizers, schedulers, scalers, anything with ``state_dict``
        and ``load_state_dict``.

        Of a wrapper that a framework has put around an optimizer, the optimizer inside is tracked. Raises `StepError`
        for any other object, and when ``run.steps`` has begun already.
        """
        if self._world.scope is not Scope.SETUP:
            raise StepError(
                f"run.track({', '.join(things)}) was called after run.steps(), so a process that takes a rank over would not know of it.",
                remedy="call it before run.steps(); for what is made later, track an object with state_dict and load_state_dict that will hold it.",
            )
        for name, thing in things.items():
            self._state.track(name, _unwrapped(thing))

    def loader(
        self,
        dataset: MapDataset,
        *,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch: int = 4,
    ) -> Loader:
        """Return a loader of the map-style ``dataset``; iterating over it in a step yields this rank's micro-batches of
        that step, on ``device``.

        ``num_workers`` processes fetch up to ``prefetch`` micro-batches each ahead. Raises `UsageError` when the data
        set is smaller than one global batch.
        """
        return self._data.loader(dataset, collate=collate, shuffle=shuffle, num_workers=num_workers, prefetch=prefetch)

    def stream(
        self,
        make: Callable[[int, int], Any],
        *,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        batched: bool = False,
        state_every: int = STATE_EVERY,
    ) -> Stream:
        """Return a loader of data that can only be read from front to back; iterating over it in a step yields this
        rank's micro-batches of that step, on ``device``.

        ``make(shard, shards)`` returns an iterable over the samples of one of ``shards`` data shards: as many as the
        global batch has micro-batches, whatever the number of ranks. ``batched``: it gives whole micro-batches. It may
        have ``state_dict`` and ``load_state_dict``, which every ``state_every`` steps record where it stands (0:
        never); and ``set_epoch``, as it begins anew at its end. Raises `StepError` when ``run.steps`` has begun
        already, and `UsageError` where a framework decides about the samples.
        """
        return self._data.stream(make, collate=collate, batched=batched, state_every=state_every)

    def carry(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """Carry the state of a loader of this data-parallel rank, which the script or a framework owns.

        ``get()`` returns its state, of a few KB: before each gate the ranks exchange their states, and they are kept
        when the step is committed. ``put(state)`` sets it, before a step that is done again, and in a process that
        takes a rank over or goes on from a checkpoint, after what `on_join` was given. The world keeps its size.
        Raises `StepError` for a name in use and when ``run.steps`` has begun already, and `UsageError` for a state
        that cannot be kept and with ``reduction="exact"``.
        """
        self._data.carry(name, get, put)

    # -- the loop
    def step(self, function: Callable[Concatenate[Step, P], T]) -> Callable[Concatenate[int, P], T]:
        """Decorator for the step function. The runtime may run it again after a failure.

        A script calls it with the step number that ``run.steps`` yields; the function receives a `Step` instead, and
        all further arguments unchanged. The call returns the function's result once the step is committed. Raises
        `StepError` outside the loop over ``run.steps``, at a second call in one turn of it, and when ``torch.compile``
        compiles the function or what calls it.
        """
        if is_compiled(function):
            refuse_compiled_step(function.__name__)
        self._step_functions.append(function)

        @functools.wraps(function)
        def committed(*args: Any, **kwargs: Any) -> T:
            if torch.compiler.is_dynamo_compiling():
                refuse_compiled_step(function.__name__)
            if self._looping is None or self._driven is not None:
                raise StepError(
                    f"{function.__name__} was called outside the loop over run.steps(), or twice in one turn of it.",
                    remedy="call one step function, once, in each turn of `for step in run.steps(n)`.",
                )
            return self._call(function, args[1:], kwargs)

        return committed

    def _call(self, function: Callable[..., T], args: Sequence[Any], kwargs: dict[str, Any]) -> T:
        """Run the current turn's step by ``function``, and return its result."""
        assert self._looping is not None, "a turn has begun, and its step was not called"
        number, self._looping = self._looping, None
        self._turn.after_step(number)
        if self._is_committed:
            result = cast("T", decoded(self._units.results.step))
        else:
            self._goes_through = False
            result = self._units.run(Position(number), lambda step: self._attempt(step, function, args, kwargs))
            self._places.run_callbacks()
            self._checks.committed(function, args, kwargs)
        # so random draws in the loop's body are the same on every rank, no matter when a rank joined
        reseed(self._batch.seed, "after", number)
        return result

    def do(self, function: Callable[Concatenate[Step, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run the next step by ``function(step, ...)``, in a loop that is not ``for step in run.steps(n)``: ``while
        True``, nested loops, steps of several kinds in one turn. Return the function's result once the step is
        committed.

        A spare waits at the first call. A process that takes a rank over, or resumes, makes the same calls from the
        first on. Those whose steps are committed do nothing: the last of them returns the result that the others have
        (numbers, texts, lists and dictionaries; a tuple becomes a list; else None), all earlier ones return None. So
        the code around the calls decides by what it counts itself, and the loop ends by that or by `goes_on`. When the
        job is to end at a step boundary, ``main`` is left in this call. Raises `StepError` in a script that calls `steps`, and for a call that the other ranks have
        not made.
        """
        if torch.compiler.is_dynamo_compiling() or is_compiled(function):
            refuse_compiled_step(function.__name__)
        self._refuse_in_unit("do", function)
        return self._begin_driven(function).call(lambda: self._call(function, args, kwargs))

    def phase(self, function: Callable[[], T], *, name: str = "") -> T | None:
        """Run ``function`` as a phase on all ranks now, in the body of a loop, and return its result.

        The loop is one of `do`, or ``run.steps(n, phases=True)``. A phase may use collectives, and may run again as a
        whole; what it changes of tracked state is kept. On a process that takes a rank over, the phases of the turn
        that are committed do nothing: the last of them returns the result that the others have (as in `do`), earlier
        ones return None. After a loop over `steps`, ``function`` is called like any code there. ``name`` stands for the function
        in messages, and keeps what is known of one phase apart from another. Raises `StepError` in a step or a phase,
        and in a loop without ``phases=True``.
        """
        named = name or _name_of(function)
        self._refuse_in_unit("phase", function)
        if self._world.scope is Scope.SETUP:
            self._begin_driven(None)
        after_loop = self._world.scope is Scope.AFTER
        if after_loop and self._driven is None:
            return function()
        if not self._calls_phases:
            raise StepError(
                f"run.phase({named}) was called in a loop over run.steps(n).",
                remedy="write run.steps(n, phases=True); or give the function to run.every.",
            )
        at, results = self._turn.next_phase(), self._units.results
        if after_loop or at <= self._units.passed:
            result = cast("T | None", decoded(results.of_last_phase) if at == self._units.last_in_body else None)
        else:
            self._goes_through = False
            result = self._phase(at, function, named, in_body=True)
        reseed(self._batch.seed, "after", at.step, at.phase)
        return result

    def goes_on(self, condition: Callable[[], bool]) -> bool:
        """Return whether a loop of `do` has another turn: ``while run.goes_on(lambda: progress.reward < 200)``.

        That is ``condition()``, except on a process that still goes through calls which are committed: there tracked
        objects have the values of later turns, and the loop goes on as it did on the other ranks.
        """
        return bool(condition()) if self._driven is None else self._driven.goes_on(condition)

    def _refuse_in_unit(self, call: str, function: Callable[..., Any]) -> None:
        """Raise `StepError` in a step or a phase."""
        if self._units.step_in_hand is not None:
            raise StepError(
                f"run.{call}({_name_of(function)}) was called in a step or a phase.",
                remedy="call it in the body of the loop; in a step or a phase, call the function itself.",
            )

    def _begin_driven(self, function: Callable[..., Any] | None) -> DrivenLoop:
        """Return the loop that `do` and `phase` drive; the first call begins it. ``function``: the step's, which a
        spare may try."""
        if self._driven is None:
            if self._world.scope is not Scope.SETUP:
                raise StepError(
                    "run.do was called in a script that has a loop over run.steps().",
                    remedy="call the @run.step function with the number that the loop yields, or write the whole loop with run.do.",
                )
            if function is not None:
                self._step_functions.append(function)
            numbers = self._loop(NO_END, phases=True)
            self._driven = DrivenLoop(numbers, self._units, self._turn, self._batch.seed)
        return self._driven

    def every(self, steps: int, function: Callable[[], Any]) -> None:
        """Run ``function`` as a phase on all ranks after every ``steps`` committed steps. A phase may use collectives.
        Raises `StepError` when ``steps`` is below 1."""
        if steps < 1:
            raise StepError(f"run.every({steps}, ...) would never run.", remedy="give a number of at least 1.")
        self._every.append((steps, function))

    def at_end(self, function: Callable[[], Any]) -> None:
        """Run ``function`` as a phase on all ranks after the last step. A phase may use collectives."""
        self._at_end.append(function)

    def steps(self, total: int, *, phases: bool = False) -> Steps:
        """Return an iterator over the steps to run, from the first uncommitted one to ``total - 1``; call the `step`
        function with each.

        A spare waits here until it is needed. ``len()`` of the iterator is ``total``. ``phases``: the loop's body calls
        `phase`. Then a process that takes a rank over, or resumes, begins with the turn of the last committed step, in
        which the step function is not run again: its call returns the result that the others have, if that consists of
        numbers, texts, lists and dictionaries (a tuple becomes a list), else None.

        Raises `StepError` when nothing is tracked, when a turn of the loop calls no step function, and for a second
        loop. A script that leaves the loop early (``break``, ``return``) must leave it after the same step on all
        ranks; `at_end` phases run when ``main`` has returned.
        """
        if total < 1:
            raise StepError(f"run.steps({total}) has no steps.", remedy="ask for at least one.")
        if line := second_loop(user_line()):
            raise StepError(
                f"{line}: a second loop over run.steps() follows the first. There is one in main: a process that takes a rank over goes on inside of it.",
                remedy=ONE_LOOP,
            )
        if self._driven is not None:
            raise StepError(
                "run.steps() was called after run.do or run.phase, which begin a loop of their own.",
                remedy="call run.phase in the body of `for step in run.steps(n, phases=True)`, in its first turn for what comes before training.",
            )
        return Steps(self._loop(total, phases=phases), total)

    def _loop(self, total: int, *, phases: bool) -> Generator[int, None, None]:
        if not self._state:
            raise StepError(
                "nothing is tracked, so nothing could be kept.",
                remedy="call run.track(model=..., optimizer=...) before run.steps().",
            )
        self._state.check_complete()
        self._my_shards()  # raises when the world does not fit the batch
        self._calls_phases = self._units.keeps_results = phases
        self._joined_others = self._units.waiting_spare or self._carried
        self._units.begin(self._warm_up, total, self._held, self._possible_sizes())
        self._places.run_callbacks()
        self._open = total
        self._came_after_loop = self._units.left_early or self._units.passed.step + 1 >= total
        if self._units.left_early:  # in an earlier entry of main; `_finish` does what is left
            self._end_loop(total)
            self._goes_through = total == NO_END
            return
        self._checks.begins_loop()
        done = self._units.passed
        if done.step > total:
            # Resumed from a checkpoint: this start asks for fewer steps than are committed. The at_end phases follow
            # the last committed step.
            if self.is_main and not done.phase:
                say(
                    f"step {done.step} is committed, and run.steps({total}) ends before it: no step is left, and run.at_end follows"
                )
            self._open = total = done.step
        self._goes_through = phases and done > BEGIN
        if done.step >= 0:
            if phases and done.step < total:
                yield from self._one_turn(done.step, total, is_committed=True)
            self._run_phases(done.step, total, after=done.phase)
        for number in range(done.step + 1, total):
            if self._units.draining:
                break
            yield from self._one_turn(number, total)
            self._run_phases(number, total, after=0)
        if not self._units.draining and done.step < total:
            self._run_at_end(total, after=0)
        self._open = 0
        self._end_loop(total)
        self._units.refuse_freed()

    def _one_turn(self, number: int, total: int, *, is_committed: bool = False) -> Iterator[int]:
        """Yield ``number``, let the loop's body run, and end the turn."""
        self._looping, self._is_committed = number, is_committed
        self._turn.begins(number)
        self._world.scope = Scope.OUTSIDE
        reseed(self._batch.seed, "before", number)
        try:
            yield number
        except GeneratorExit:
            # where main is left to be entered again, the world may already be a different one
            if not self._units.leaving and self._world.scope is not Scope.AFTER:
                self._units.leaves_loop()
                self._end_loop(total, late=self._driven is not None)
            raise
        if self._looping is not None:
            raise StepError(
                f"the loop's body did not call a @run.step function for step {number}.",
                remedy="call it once in every turn of `for step in run.steps(n)`.",
            )
        self._units.body_over()
        self._places.run_callbacks()

    def _end_loop(self, total: int, *, late: bool = False) -> None:
        """Switch to the code after the loop. ``late``: some of that code has run already, before this was noticed."""
        self._looping, self._checks.loop_over, self._goes_through = None, True, False
        self._world.scope = Scope.AFTER
        reseed(self._batch.seed, "after", total)
        self._units.loop_over(late=late)

    def log(self, **values: object) -> None:
        """Print ``values`` with the step, in the launcher: once per committed step, in order, from whichever rank
        reports first.

        Numbers, including NumPy scalars and tensors with one element, are printed as numbers; everything else as its
        text. Values logged in an attempt that is not committed are not printed.
        """
        if not self._has_logged_before():
            self._units.report_log(log_values(values))

    def _has_logged_before(self) -> bool:
        """Whether the script logs what the other ranks, or this job before it was resumed, have logged: in the code
        between calls that are committed. After the last of them, other ranks have logged too, but a job that resumes
        may not have."""
        if not self._goes_through or self._units.step_in_hand is not None:
            return False
        return self._joined_others or self._turn.place < self._units.last_in_body

    def expect(self, seconds: float) -> None:
        """Announce that the next operation takes long (a compilation, a download): it is not treated as a hang before
        ``seconds`` have passed."""
        self._units.expect(seconds)

    def _finish(self) -> None:
        """Leave the loop if it is still open, run the ``at_end`` phases, and wait until all ranks have finished.
        `rackrun.elastic` calls this when ``main`` has returned."""
        if self._driven is not None:
            self._driven.end()
        if self._open and not self._units.draining:
            if self._world.scope is not Scope.AFTER:  # a script that still holds the iterator has kept the loop open
                self._end_loop(self._open, late=True)
            self._units.loop_left()
            left_after = self._units.left_after
            assert left_after is not None, "it has just been set"
            if self._driven is not None:
                self._open = left_after + 1
            # A process that takes over a rank from here on finds the loop finished.
            step = self._units.passed.step
            self._phase(
                Position(self._open - 1, _LEFT_EARLY),
                lambda: all_leave(self._world, self._runtime.boot, step),
                "leaving the loop",
            )
            if self._driven is not None:
                self._units.ends_after(left_after)
            self._run_at_end(self._open, after=0)
        self._data.close_streams()
        self._units.finish()
        self._data.close_streams()  # steps may have been done again meanwhile

    def _leaves(self, error: BaseException | None) -> bool:
        """Whether ``main`` is to be entered again, whatever it returned or raised. `rackrun.elastic` calls this when
        ``main`` has ended with ``error``, or None."""
        if self._units.leaving:
            if error is not None and not isinstance(error, Reenter):
                say(f"rank {self.rank}: leaving main, to enter it again: {type(error).__name__}: {error}")
            return True
        return isinstance(error, Exception) and self._units.lost_before_steps

    def _let_go(self) -> MainHandover:
        """End everything that this run has begun, except what the next entry of ``main`` takes over, which is returned.
        `rackrun.elastic` calls this."""
        self._data.let_go()
        self._checks.let_go()
        return self._units.let_go()

    def _bind_to_rank(self, because: str) -> None:
        """Note that ``main`` has built something for its rank and for the number of ranks, which no group or tracked
        object shows: the number stays, and a spare that takes another rank over enters ``main`` again.

        ``because``: what was built, for a message. To be called before `steps`.
        """
        self._units.bind_to_rank(because)

    # -- used by loaders
    def _current_step(self) -> Step:
        """Return the current step; raise `StepError` outside step functions and phases."""
        step = self._units.step_in_hand
        if step is None:
            raise StepError(
                "a loader or stream of the run was used outside a step function.",
                remedy="iterate over it inside the @run.step function.",
            )
        return step

    def _batch_of(self, step: int) -> StepBatch:
        """Return the global batch of ``step``."""
        return self._units.batch_of(step)

    def _my_shards(self) -> list[Shard]:
        """Return this rank's logical shards of the current step, or of the next one between steps."""
        dp_rank, dp_size = self._data_coordinate()
        shares = self._world.share_changes.shares
        if self._batches.scale is None and self._order is None:
            return self._batch.shards_of(dp_rank, dp_size, shares=shares)
        step = self._units.step_in_hand
        number = self._units.passed.step + 1 if step is None else int(step)
        shards = self._batch_of(number).shards
        return self._batch.shards_of(dp_rank, dp_size, shards, shares if sum(shares) == shards else ())

    def _begin_shard(self, step: Step, shard: Shard, *, last: bool, ids: Any) -> None:
        self._units.begin_shard(step, shard, last=last, ids=ids, dp_size=self._data_coordinate()[1])

    def _is_trial(self) -> bool:
        """Whether this is a spare that tries the step function while it waits."""
        return self._units.waiting_spare

    def _progress(self) -> None:
        """Note that this rank makes progress in a step."""
        self._runtime.page.progress()

    # -- helpers
    def _data_coordinate(self) -> tuple[int, int]:
        """Return this rank's index among the data-parallel ranks, and their number. Ranks along the other axes share
        its data."""
        if not self._axes or (len(self._axes) == 1 and self._axes[0][0] in DATA_AXES):
            return self._world.rank, self._world.size
        return data_coordinate(self.mesh)

    def _worlds(self) -> Worlds:
        """Return the number of ranks that the world began with, and (first step, ranks) of all its worlds. Without a
        plan that says otherwise the world keeps its size."""
        plan, size = self._world.joined, self._world.size
        return (plan.full or size, plan.worlds) if plan is not None and plan.worlds else (size, ((0, size),))

    def _possible_sizes(self) -> list[int]:
        """Return the numbers of ranks that the world may come to have, for ``batch="scale_lr"``; empty for a constant
        batch."""
        if self._batches.scale is None:
            return []
        full, fewest = self._worlds()[0], int(os.environ.get(MIN_RANKS_VARIABLE, "1"))
        sizes = range(fewest or full, full + 1)
        return [size for size in sizes if not self._axes or mesh_resize.fitted(self._axes, size)]

    def _warm_up(self) -> Callable[[Step], Any] | None:
        """Return the step function for a spare to try once on loopback groups; None unless there is exactly one, with
        the step as its only argument."""
        if len(self._step_functions) != 1:
            return None
        function = self._step_functions[0]
        code = getattr(function, "__code__", None)
        return function if code is not None and code.co_argcount == 1 and not code.co_kwonlyargcount else None

    def _attempt(self, step: Step, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._places.run_callbacks()
        self._data.begin_attempt()
        return self._checks.run(step, function, args, kwargs)

    def _phase(self, at: Position, function: Callable[[], T], name: str, *, in_body: bool = False) -> T:
        def attempt(_: Step) -> T:
            self._places.run_callbacks()
            return function()

        result = self._units.run(at, attempt, name, in_body=in_body)
        self._places.run_callbacks()
        return result

    def _run_phases(self, step: int, total: int, *, after: int) -> None:
        if step >= total:
            self._run_at_end(total, after=after)
            return
        for index, (steps, function) in enumerate(self._every, start=1):
            at = Position(step, EVERY + index)
            if at.phase > after and (step + 1) % steps == 0 and not self._units.draining:
                self._phase(at, function, f"{_name_of(function)} (run.every({steps}, ...))")

    def _run_at_end(self, total: int, *, after: int) -> None:
        for index, function in enumerate(self._at_end, start=1):
            if index > after:
                self._phase(Position(total, index), function, f"{_name_of(function)} (run.at_end)")


def _unwrapped(thing: Any) -> Any:
    """Return the optimizer whose ``step`` torch's hooks see, under a wrapper of Accelerate, Fabric or another
    framework."""
    seen = {id(thing)}
    while isinstance(inner := getattr(thing, "optimizer", None), torch.optim.Optimizer) and id(inner) not in seen:
        if not (isinstance(thing, torch.optim.Optimizer) or "ptimizer" in type(thing).__name__):
            break  # a learning rate scheduler has this attribute, too
        seen.add(id(inner))
        thing = inner
    return thing


def _name_of(function: Callable[[], Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__).replace("<locals>.", "")
