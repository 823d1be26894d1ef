"""Transfers the bytes of a restore from sources' tensors into a newcomer's, in rounds of large pieces.

On a device two rounds are in flight at a time: one is posted while the one before it is transferred. Tensors that
cannot be sent from, or received into, their own memory take extra memory for two rounds only. Where the communicator
can, a round is posted as one group: NCCL then launches once for all of its pieces, and all sources send at the same
time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rackrun.worker.communicators.communicator import COLLECTIVE_TIMEOUT, Communicator
from rackrun.worker.device.device_queue import queue_of, wait_until
from rackrun.worker.restore.restore_layout import RestoreLayout, TensorPiece
from rackrun.worker.state.state_manifest import TensorInfo
from rackrun.worker.tensors.tensor_bytes import dense_bytes

__all__ = [
    "TransferPipeline",
    "SendBuffers",
    "ReceiveBuffers",
    "TensorMessage",
    "Transfer",
    "landing_places",
    "post",
    "post_together",
    "tell",
]

_ROUNDS_IN_FLIGHT = 2
_ROUNDS_OF_A_HOST = 8
"""Sockets accept whatever arrives, and hardly any transfer needs extra memory, so one slow source does not delay the
others."""


class TensorMessage(NamedTuple):
    """A tensor to be sent to ``peer`` or received from it. NCCL ignores tags: its messages are matched by their
    order."""

    tensor: torch.Tensor
    peer: int
    tag: int


class Transfer:
    """A send or receive in flight.

    Without a limit of its own, gloo gives up a late peer after the limit of its *handshake*, though a source may still
    be busy in its own code. The break of the generation ends a transfer with a lost peer.
    """

    def __init__(self, work: Any, *, limited: bool) -> None:
        self._work, self._limited = work, limited

    def wait(self) -> None:
        """Wait for the transfer. Raises `RuntimeError` if it failed."""
        if self._work is None:  # NCCL: it is in the current stream already
            return
        if self._limited:
            self._work.wait(COLLECTIVE_TIMEOUT)
        else:  # NCCL would block with a limit, and abort its communicator
            self._work.wait()


def post(world: Communicator, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
    """Start a transfer of ``tensor``. ``kind``: "send" or "recv". Raises `RuntimeError` where the communicator is
    broken."""
    return Transfer(world.call(kind, [tensor], peer, tag), limited=tensor.device.type == "cpu")


def tell(world: Communicator, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
    """Start a transfer from host to host, like `post`. It fails when the peer was broken, so its content can be
    trusted, unlike bytes from a device."""
    return Transfer(world.call(kind, [tensor], peer, tag, on_host=True), limited=True)


def post_together(world: Communicator, kind: str, messages: Sequence[TensorMessage]) -> list[Transfer]:
    """Start transfers like `post`, as one batch where a device moves them."""
    if not messages or not world.batches:
        return [post(world, kind, *message) for message in messages]
    work = world.batch([(kind, message.tensor, message.peer, message.tag) for message in messages])
    return [Transfer(work, limited=messages[0].tensor.device.type == "cpu")]


class TransferPipeline:
    """Rounds of transfers in flight, in order. ``overtaken``: returns whether a newer generation was announced; every
    method raises `RuntimeError` then."""

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
        """Add a round. ``then`` is called when its transfers are complete."""
        if not self._queue.is_host:
            for transfer in transfers:  # this makes the stream wait, not the host
                transfer.wait()
        self._rounds.append((transfers, self._queue.mark(), then))

    def finish(self) -> None:
        """Wait until all rounds are complete. If no newer generation was announced until then, a device has sent what
        it was given."""
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


class SendBuffers:
    """A source's tensors, as pieces on the device that sends them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._laid: tuple[str, torch.Tensor] | None = None
        """Path and bytes of the last tensor that had to be made contiguous, because its other pieces follow; None
        before."""

    def piece(self, piece: TensorPiece) -> torch.Tensor:
        """Return the bytes of ``piece``, 1-d uint8, on the sending device."""
        part = self._flat(piece.path)[piece.start : piece.stop]
        return part if part.device.type == self._device.type else part.to(self._device)

    def _flat(self, path: str) -> torch.Tensor:
        dense = dense_bytes(self._tensors[path])
        if dense is not None:
            return dense
        if self._laid is None or self._laid[0] != path:
            self._laid = path, self._tensors[path].detach().contiguous().reshape(-1).view(torch.uint8)
        return self._laid[1]


class ReceiveBuffers:
    """A newcomer's tensors, as places for received pieces: their own memory, or temporary memory on ``device``."""

    def __init__(self, layout: RestoreLayout, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._layout, self._tensors, self._device = layout, tensors, device
        self._straight = landing_places({path: (layout.infos[path], tensors[path]) for path in layout.large}, device)
        self._elsewhere: dict[str, torch.Tensor] = {}
        """Memory of the tensors whose bytes lie in the same order as at the source, but on another device."""
        for path in layout.large:
            if self._straight[path] is None and layout.infos[path].lies_as(tensors[path]):
                block = dense_bytes(tensors[path])
                assert block is not None, "it lies as one block does"
                self._elsewhere[path] = block
        self._missing: Counter[str] = Counter()
        """Bytes still to come of each tensor that needs all its bytes before its values can be copied."""
        self._whole: dict[str, torch.Tensor] = {}
        self._between: dict[int, torch.Tensor] = {}

    def place(self, index: int) -> torch.Tensor:
        """Return the memory for the piece ``index``, 1-d uint8. Not safe to call from two threads."""
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

    def finish(self, indices: Sequence[int]) -> None:
        """Finish these pieces, whose bytes have arrived at their `place`: copy those that are in temporary memory into
        their tensors."""
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
    """Return the memory of each tensor as bytes (1-d uint8), where received bytes can be written directly; None where a
    copy is needed, because its bytes lie in another order than at the source, or on another device."""
    return {
        path: dense_bytes(tensor) if info.lies_as(tensor) and tensor.device.type == device.type else None
        for path, (info, tensor) in tensors.items()
    }
