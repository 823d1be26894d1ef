"""What a data-parallel rank reads in each step, from a loader of torchtitan's, as a stream of rackrun's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from rackrun.errors import StepError

__all__ = ["RankBatch", "ShardBatches"]


class RankBatch(Mapping[int, Any]):
    """All micro-batches of one data-parallel rank in one step: number -> what the loader gave.

    It is no plain dictionary, so that the stream leaves the tensors on the host: torchtitan counts labels there.
    """

    def __init__(self, micro_batches: Sequence[Any]) -> None:
        self._micro_batches = list(micro_batches)

    def __getitem__(self, number: int) -> Any:
        return self._micro_batches[number]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._micro_batches)))

    def __len__(self) -> int:
        return len(self._micro_batches)


class ShardBatches:
    """Reads ``loader``, one of torchtitan's for a data shard, ``micro_batches`` at a time."""

    def __init__(self, loader: Any, micro_batches: int) -> None:
        self.loader, self._micro_batches = loader, micro_batches

    def __iter__(self) -> Iterator[RankBatch]:
        """Return an iterator without end. Raises `StepError` when the data end."""
        batches = iter(self.loader)
        while True:
            read = []
            for _ in range(self._micro_batches):
                try:
                    read.append(next(batches))
                except StopIteration:
                    raise StepError(
                        "the data of a rank have ended before the last step, and torchtitan would drop that step on this rank alone.",
                        remedy="let the dataloader begin anew at its end (infinite), or train fewer steps with --training.steps.",
                    ) from None
            yield RankBatch(read)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as plain values: torchtitan's own ``state_dict`` returns a pickle of them."""
        return dict(StatefulDataLoader.state_dict(self.loader))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a `state_dict`."""
        StatefulDataLoader.load_state_dict(self.loader, state)
