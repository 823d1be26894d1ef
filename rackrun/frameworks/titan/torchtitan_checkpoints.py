"""The states of loaders in torchtitan's own checkpoints."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from rackrun.errors import UsageError
from rackrun.worker.data.shard_reader import ShardReader
from rackrun.worker.data.stream_states import encode_state

if TYPE_CHECKING:
    from rackrun.frameworks.titan.training_session import TrainingSession

__all__ = ["LoaderStates"]


class LoaderStates:
    """Stands for this rank's loader in a checkpoint of torchtitan's, in the format of ``ParallelAwareDataloader``."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self.loaded = ""
        """The state that a checkpoint has for this rank, as JSON of `encode_state`; "" if none was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank's data shard stands after the last committed step; before training, where torchtitan
        asks what a checkpoint has to have, its beginning."""
        session = self._session
        if not session.opened:
            return dict(session.trainer.dataloader.state_dict())
        shard, shards = session.place
        return {f"dp_rank_{shard}": pickle.dumps(self._state(shard)), "world_size": shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a `state_dict`, of torchtitan's loader or of this. Raises `UsageError` if it is of other ranks."""
        shard, shards = self._session.place
        if state["world_size"] != shards:
            raise UsageError(
                f"the checkpoint of torchtitan's is of {state['world_size']} data-parallel ranks, and there are {shards}.",
                remedy="begin with as many ranks, or leave the data out with --checkpoint.exclude_from_loading dataloader.",
            )
        self.loaded = encode_state(pickle.loads(state[f"dp_rank_{shard}"])).decode()  # noqa: S301 - torchtitan's format

    def _state(self, shard: int) -> dict[str, Any]:
        data = self._session.data
        position = data._positions.position(data._index, shard)
        reader = data._readers.get(shard)
        if reader is not None and reader.stream is not None and reader._position == position:
            return dict(reader.stream.state_dict())
        probe = ShardReader(data._source, shard)  # it has read ahead, or has not read this data shard yet
        try:
            probe._go_to(position, data._known(shard))
            return dict(probe.stream.state_dict())
        finally:
            probe.close()
