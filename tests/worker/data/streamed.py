"""Streams for tests: of numbers, with and without a state, in which every sample says where it comes from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from tests.worker.scripts import WIDTH

__all__ = [
    "CountsEpochs",
    "Forgets",
    "KeepsStart",
    "Numbers",
    "Refills",
    "Shuffled",
    "Stateless",
    "Vectors",
    "one_shot",
]


class Stateless:
    """The numbers ``shard``, ``shard + shards``, ... below ``count``."""

    def __init__(self, shard: int, shards: int, count: int = 60) -> None:
        self._numbers = range(shard, count, shards)

    def __iter__(self) -> Iterator[Any]:
        return map(self.sample, self._numbers)

    def sample(self, number: int) -> Any:
        return number


class Numbers(Stateless):
    """With a state, and another order in each epoch."""

    def __init__(self, shard: int, shards: int, count: int = 60) -> None:
        super().__init__(shard, shards, count)
        self._at = self._epoch = self._start = 0
        self.loaded: list[Any] = []

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(self._numbers)
        random.Random(self._epoch).shuffle(order)
        self._at, self._start = self._start, 0
        while self._at < len(order):
            self._at += 1
            yield self.sample(order[self._at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self._start = state["at"]


class Vectors(Numbers):
    """Vectors, augmented at random by three generators."""

    def sample(self, number: int) -> Any:
        vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
        return vector + torch.randn(WIDTH) * random.random()


class KeepsStart(Vectors):
    """Which begins every iteration where a state was loaded."""

    def __iter__(self) -> Iterator[Any]:
        for at in range(self._start, len(self._numbers)):
            self._at = at + 1
            yield self.sample(self._numbers[at])


class CountsEpochs(Vectors):
    """Which counts epochs itself, and leaves them out of its state."""

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return super().__iter__()


class Refills(Stateless):
    """Of micro-batches in one buffer for each iteration."""

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.zeros(1)
        for number in super().__iter__():
            yield buffer.fill_(number)


class Shuffled(Numbers):
    """Through a buffer that is not in the state, as many libraries have it."""

    def __iter__(self) -> Iterator[Any]:
        draw, held = random.Random(3), []
        for number in super().__iter__():
            held.append(number)
            if len(held) == 4:
                yield held.pop(draw.randrange(4))
        yield from held


class Forgets(Vectors):
    """Whose state is right for the first samples only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"at": state["at"] + (state["at"] > 3)})


def one_shot(shard: int, shards: int) -> Iterator[int]:
    """A generator: it can be read only once."""
    yield from range(shard, 24, shards)
