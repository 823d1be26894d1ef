"""What a script reads its samples from: the loaders, streams and carried states that it has asked its run for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rackrun.errors import StepError, UsageError
from rackrun.worker.data.carried_states import CarriedStates
from rackrun.worker.data.loader import Loader, MapDataset
from rackrun.worker.data.stream_positions import StreamPositions
from rackrun.worker.data.streams import Stream
from rackrun.worker.membership.decisions.script_scope import Scope

if TYPE_CHECKING:
    from rackrun.worker.loop.run import Run

__all__ = ["DataSources"]


class DataSources:
    """The data of ``run``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loaders: list[Loader | Stream] = []
        self._positions: StreamPositions | None = None
        """Where all streams stand; None without any."""
        self._carried: CarriedStates | None = None
        """The states of loaders that the script owns; None without any."""

    def loader(self, dataset: MapDataset, **options: Any) -> Loader:
        """Return a loader of ``dataset``, as `Run.loader` says."""
        loader = Loader(self._run, dataset, **options)
        loader.number = len(self._loaders)
        self._loaders.append(loader)
        return loader

    def stream(self, make: Callable[[int, int], Any], **options: Any) -> Stream:
        """Return a loader of streams, as `Run.stream` says."""
        run = self._run
        self._refuse_late("run.stream")
        if run._order is not None:
            raise UsageError(
                "run.stream does not work where a framework decides about the samples of each step.",
                remedy="give the framework's trainer a map-style data set, or write the loop with @rackrun.elastic.",
            )
        if self._positions is None:
            self._positions = StreamPositions(run._batch.shards, run._batch.micro_batch)
            run._units.keeps("rackrun.streams", self._positions)
        stream = Stream(run, self._positions, make, number=len(self._loaders), **options)
        self._loaders.append(stream)
        return stream

    def carry(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """Carry the state of a loader, as `Run.carry` says."""
        run = self._run
        self._refuse_late(f"run.carry({name!r}, ...)")
        if run._units.is_exact:
            raise UsageError(
                'run.carry does not work with reduction="exact", which needs the micro-batches of run.loader or run.stream.',
                remedy='read the data through run.stream, or use reduction="fast".',
            )
        if self._carried is None:
            self._carried = CarriedStates(run._data_coordinate)
            run._units.keeps("rackrun.carried", self._carried)
            run._units.keep_size(
                "run.carry has the states of loaders for this number of ranks (run.stream would work on any)"
            )
            run._checks.own_data_is_carried = True
        self._carried.add(name, get, put)

    def begin_attempt(self) -> None:
        """Put what is carried where the last committed step has left it, before an attempt at a step."""
        if self._carried is not None:
            self._carried.begin()

    def close_streams(self) -> None:
        """Close what reads streams, with its processes."""
        if self._positions is not None:
            self._positions.close_readers()

    def let_go(self) -> None:
        """Close everything, because ``main`` is left."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def _refuse_late(self, what: str) -> None:
        if self._run._world.scope is not Scope.SETUP:
            raise StepError(
                f"{what} was called after run.steps(), so a process that takes a rank over would not know of it.",
                remedy="call it before run.steps().",
            )
