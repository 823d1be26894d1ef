"""The bytes of a restore on their way: from a source's tensors into a newcomer's, in rounds of large pieces.

On a device two rounds are on their way at a time, so that one is posted while the one before it travels, and memory for what cannot be
sent from, or received into, the place where it lies is that of two rounds. Where the communicator can, a round is posted as one group: NCCL then launches
once for all of its pieces, and all sources send at the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rackrun.worker.communicators.communicator import COLLECTIVE_TIMEOUT, Communicator
from rackrun.worker.device.device_queue import queue_of, wait_until
from rackrun.worker.restore.restore_layout import Layout, Piece
from rackrun.worker.state.state_manifest import TensorInfo
from rackrun.worker.tensors.tensor_bytes import dense_bytes

__all__ = ["Flow", "Given", "Landing", "Message", "Transfer", "landing_places", "post", "post_together", "tell"]

_ROUNDS_IN_FLIGHT = 2
_ROUNDS_OF_A_HOST = 8
"""Its sockets take what comes, and hardly anything needs memory between: one slow source does not hold the others up."""


class Message(NamedTuple):
    """To be sent to ``peer``, or received from it. NCCL knows no tags: there the order counts."""

    tensor: torch.Tensor
    peer: int
    tag: int


class Transfer:
    """In flight. gloo gives up a peer that is late by the limit of its *handshake*, unless it is told another one: a source may still be busy in
    its own code. Whoever is lost ends it, by the break of the generation."""

    def __init__(self, work: Any, *, limited: bool) -> None:
        self._work, self._limited = work, limited

    def wait(self) -> None:
        if self._work is None:  # NCCL: it stands in the current stream already
            return
        if self._limited:
            self._work.wait(COLLECTIVE_TIMEOUT)
        else:  # NCCL: given a limit, it would block, and abort its communicator
            self._work.wait()


def post(world: Communicator, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
    """``kind``: "send" or "recv". RuntimeError where the communicator is broken."""
    return Transfer(world.call(kind, [tensor], peer, tag), limited=tensor.device.type == "cpu")


def tell(world: Communicator, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
    """As `post`, from host to host. It ends with an error where the peer was broken: what it says can be believed, other than a device's bytes."""
    return Transfer(world.call(kind, [tensor], peer, tag, on_host=True), limited=True)


def post_together(world: Communicator, kind: str, messages: Sequence[Message]) -> list[Transfer]:
    """As `post`; as one batch, where a device moves them."""
    if not messages or not world.batches:
        return [post(world, kind, *message) for message in messages]
    work = world.batch([(kind, message.tensor, message.peer, message.tag) for message in messages])
    return [Transfer(work, limited=messages[0].tensor.device.type == "cpu")]


class Flow:
    """Rounds on their way, in order. ``overtaken``: nobody waits for the outcome any more; then whatever is called here raises RuntimeError."""

    def __init__(self, device: torch.device, overtaken: Callable[[], bool]) -> None:
        self._queue, self._overtaken = queue_of(device), overtaken
        self._most = _ROUNDS_OF_A_HOST if self._queue.is_host else _ROUNDS_IN_FLIGHT
        self._rounds: deque[tuple[list[Transfer], Callable[[], bool], Callable[[], None]]] = deque()

    def make_room(self) -> None:
        """Wait until another round may be posted."""
        while len(self._rounds) >= self._most:
            self._settle_oldest()
        self._check()

    def add(self, transfers: list[Transfer], then: Callable[[], None] = lambda: None) -> None:
        """``then`` is called once they are over."""
        if not self._queue.is_host:
            for transfer in transfers:  # the stream waits, not the host
                transfer.wait()
        self._rounds.append((transfers, self._queue.mark(), then))

    def finish(self) -> None:
        """All are over, and nobody was overtaken until then: what a device has sent before that is what it was given."""
        while self._rounds:
            self._settle_oldest()
        self._check()

    def _settle_oldest(self) -> None:
        transfers, passed, then = self._rounds.popleft()
        if self._queue.is_host:
            for transfer in transfers:
                transfer.wait()
        wait_until(passed, self._overtaken)
        self._check()
        then()

    def _check(self) -> None:
        if self._overtaken():
            raise RuntimeError("a newer generation was announced")


class Given:
    """A source's tensors, as pieces on the device that sends them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._laid: tuple[str, torch.Tensor] | None = None
        """The last that had to be laid out anew: its other pieces follow."""

    def piece(self, piece: Piece) -> torch.Tensor:
        part = self._flat(piece.path)[piece.start : piece.stop]
        return part if part.device.type == self._device.type else part.to(self._device)

    def _flat(self, path: str) -> torch.Tensor:
        dense = dense_bytes(self._tensors[path])
        if dense is not None:
            return dense
        if self._laid is None or self._laid[0] != path:
            self._laid = path, self._tensors[path].detach().contiguous().reshape(-1).view(torch.uint8)
        return self._laid[1]


class Landing:
    """A newcomer's tensors, as the places that pieces are received into: their own memory, or memory of ``device`` between."""

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._layout, self._tensors, self._device = layout, tensors, device
        self._straight = landing_places({path: (layout.infos[path], tensors[path]) for path in layout.large}, device)
        self._elsewhere: dict[str, torch.Tensor] = {}
        """The memory of those that lie as at their source, but on another device."""
        for path in layout.large:
            if self._straight[path] is None and layout.infos[path].lies_as(tensors[path]):
                block = dense_bytes(tensors[path])
                assert block is not None, "it lies as one block does"
                self._elsewhere[path] = block
        self._missing: Counter[str] = Counter()
        """Of those that need all their bytes before they can be laid out: so many are still to come."""
        self._whole: dict[str, torch.Tensor] = {}
        self._between: dict[int, torch.Tensor] = {}

    def place(self, index: int) -> torch.Tensor:
        """Where the bytes of this piece go, uint8. Not from two threads."""
        piece = self._layout.pieces[index]
        if (straight := self._straight[piece.path]) is not None:
            return straight[piece.start : piece.stop]
        if piece.path in self._elsewhere:
            self._between[index] = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
            return self._between[index]
        if piece.path not in self._whole:
            size = self._missing[piece.path] = self._layout.infos[piece.path].nbytes
            self._whole[piece.path] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._whole[piece.path][piece.start : piece.stop]

    def land(self, indices: Sequence[int]) -> None:
        """These pieces are where `place` said: put what is not in its tensor yet there."""
        for index in indices:
            piece = self._layout.pieces[index]
            if piece.path in self._elsewhere:
                self._elsewhere[piece.path][piece.start : piece.stop].copy_(self._between.pop(index))
            elif self._straight[piece.path] is None:
                self._missing[piece.path] -= piece.nbytes
                if not self._missing[piece.path]:
                    laid = self._layout.infos[piece.path].view(self._whole.pop(piece.path))
                    self._tensors[piece.path].copy_(laid)


def landing_places(
    tensors: dict[str, tuple[TensorInfo, torch.Tensor]], device: torch.device
) -> dict[str, torch.Tensor | None]:
    """The memory of each tensor, as bytes, where what arrives can be written straight into it. None: it lies otherwise than at its source, so
    it needs a copy between."""
    return {
        path: dense_bytes(tensor) if info.lies_as(tensor) and tensor.device.type == device.type else None
        for path, (info, tensor) in tensors.items()
    }
