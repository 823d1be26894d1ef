"""Copies a newcomer's state from live replicas, straight into its own tensors.

The sources share the bytes between them, in pieces (`rackrun.worker.restore.restore_layout`). Each piece goes from the
source's tensor into the newcomer's without an intermediate copy: over the world's communicator
(`rackrun.worker.restore.restore_transfer`), or read by the newcomer itself where both run on the CPUs of one host. What
comes from one source is checked against the digest of *another*, so a diverged or damaged replica is found before
anyone trains on it. Small tensors travel packed.

Everything here runs on the new generation's world communicator, between the step that was broken and its repetition. No
source changes its state meanwhile, because the next gate needs the newcomer too.

When another loss breaks a source meanwhile, a send from a device does not fail: NCCL's kernel exits, and the newcomer's
kernel ends with whatever is in its buffers, perhaps before the newcomer learns of the break. So everything that decides
something goes from host to host: the manifest, and the digests at the end, once the source's device has passed all its
sends. A source that was broken before that sends no digests, because its host communicator is broken first.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.errors import StateLost
from rackrun.protocol.commands import GenerationPlan, Restore
from rackrun.worker.communicators.communicator import Communicator
from rackrun.worker.restore.loop_end import StateSource
from rackrun.worker.restore.process_vm import PeerProcess, readable
from rackrun.worker.restore.restore_layout import RestoreLayout
from rackrun.worker.restore.restore_transfer import (
    ReceiveBuffers,
    SendBuffers,
    TensorMessage,
    TransferPipeline,
    post,
    post_together,
    tell,
)
from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import refuse_freed
from rackrun.worker.tensors.tensor_bytes import copy_bytes, pack

__all__ = ["RestoreCallbacks", "run_restores", "settle_restores"]

_HEADER, _MANIFEST, _SMALL, _DIGESTS, _OFFER, _ANSWER, _PIECES = 0, 1, 2, 3, 4, 5, 16  # message tags
_SEND, _HAVE_READ = 0, 1
_GIVEN = 0
"""Precedes the digests, so that a source with no digests also confirms that it has sent everything."""

_reads: set[Future[None]] = set()
_filling = threading.Lock()
"""Reads into this newcomer's state, perhaps for a replaced generation. They end soon, but not before they have
written."""


def settle_restores() -> None:
    """Wait until no restore for a replaced generation can write to this worker's state any more."""
    wait(tuple(_reads))
    with _filling:
        pass


@dataclass(frozen=True)
class RestoreCallbacks:
    """Functions of the worker that a restore calls."""

    overtaken: Callable[[], bool]
    """Returns whether a newer generation was announced, so that nobody waits for the outcome any more."""
    reached: Callable[[str], None] = lambda _: None
    """Called with each stage of the copy when it is reached (`rackrun.worker.membership.recovery_stages`)."""
    known_digests: Callable[[], Mapping[str, int]] = dict
    """Returns digests of this rank's tensors that are known, by path. Called on a source, while the newcomer reads."""
    source: Callable[[], StateSource] | None = None
    """Returns what a source gives, where that is not its current state; None: the current state."""


def run_restores(
    plan: GenerationPlan,
    rank: int,
    world: Communicator,
    state: TrackedState,
    replica_class: str,
    device: torch.device,
    callbacks: RestoreCallbacks,
) -> StateManifest | None:
    """Take part in all restores of the plan, as source or as newcomer. Returns the source's manifest on a newcomer,
    else None.

    Raises `RuntimeError` when a peer is lost or a newer generation is announced meanwhile, and `StateLost` when
    replicas differ.
    """
    use_device(device)
    received = None
    for restore in plan.restores:
        if not restore.sources:
            continue  # restored from a snapshot: rackrun.worker.snapshots.shard_snapshots
        if rank == restore.rank:
            received = _receive(restore, world, state, device, callbacks)
        elif rank in restore.sources:
            source = state if callbacks.source is None else callbacks.source()
            _send(restore, rank, world, source, replica_class, device, callbacks)
            callbacks.reached("served")
    return received


def _send(
    restore: Restore,
    rank: int,
    world: Communicator,
    source: StateSource,
    replica_class: str,
    device: torch.device,
    callbacks: RestoreCallbacks,
) -> None:
    manifest, tensors = source.manifest(replica_class), source.tensors()
    refuse_freed(tensors)
    layout = RestoreLayout(manifest, restore.sources)
    works = []
    if rank == layout.lead:
        encoded = msgspec.msgpack.encode(manifest)
        works.append(tell(world, "send", torch.tensor([len(encoded)]), restore.rank, _HEADER))
        works.append(
            tell(world, "send", torch.frombuffer(bytearray(encoded), dtype=torch.uint8), restore.rank, _MANIFEST)
        )
        if layout.small:
            small = pack([tensors[path] for path in layout.small], device)
            works.append(post(world, "send", small, restore.rank, _SMALL))
    with readable([tensors[path] for path in layout.large]) as offer:
        if device.type == "cpu":
            told = torch.zeros(4 + len(layout.large), dtype=torch.int64) if offer is None else offer
            works.append(post(world, "send", told, restore.rank, _OFFER))
        vouched = layout.digests(rank, tensors, device, callbacks.known_digests())
        answer = torch.tensor([_SEND])
        if device.type == "cpu":
            post(world, "recv", answer, restore.rank, _ANSWER).wait()
    if int(answer) == _SEND:
        _send_pieces(world, layout, tensors, rank, restore.rank, device, callbacks.overtaken)
    flow = TransferPipeline(device, callbacks.overtaken)
    flow.add(works)
    flow.finish()
    tell(world, "send", torch.tensor([_GIVEN, *vouched.values()]), restore.rank, _DIGESTS).wait()


def _receive(
    restore: Restore,
    world: Communicator,
    state: TrackedState,
    device: torch.device,
    callbacks: RestoreCallbacks,
) -> StateManifest:
    lead = restore.sources[0]
    header = torch.zeros(1, dtype=torch.int64)
    tell(world, "recv", header, lead, _HEADER).wait()
    encoded = torch.empty(int(header), dtype=torch.uint8)
    tell(world, "recv", encoded, lead, _MANIFEST).wait()
    manifest = msgspec.msgpack.decode(encoded.numpy().tobytes(), type=StateManifest)
    tensors = state.allocate(manifest)
    layout = RestoreLayout(manifest, restore.sources)
    small = torch.empty(sum(tensors[path].nbytes for path in layout.small), dtype=torch.uint8, device=device)
    if layout.small:
        post(world, "recv", small, lead, _SMALL).wait()

    landing = ReceiveBuffers(layout, tensors, device)
    neighbours = _neighbours(restore, layout, world) if device.type == "cpu" else {}
    with _reading(layout, neighbours, landing, callbacks.overtaken):
        _receive_pieces(world, layout, landing, neighbours.keys(), device, callbacks.overtaken)
    for source in neighbours:
        post(world, "send", torch.tensor([_HAVE_READ]), source, _ANSWER).wait()
    callbacks.reached("copied")
    with _filling:
        if callbacks.overtaken():
            raise RuntimeError("a newer generation was announced")
        copy_bytes(small, [tensors[path] for path in layout.small])
    _verify(restore, layout, tensors, world, device)
    callbacks.reached("verified")
    with _filling:
        if callbacks.overtaken():
            raise RuntimeError("a newer generation was announced")
        state.load_plain(manifest, tensors)
    return manifest


def _send_pieces(
    world: Communicator,
    layout: RestoreLayout,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    newcomer: int,
    device: torch.device,
    overtaken: Callable[[], bool],
) -> None:
    given, flow = SendBuffers(tensors, device), TransferPipeline(device, overtaken)
    for indices in layout.rounds():
        mine = [index for index in indices if layout.pieces[index].source == rank]
        flow.make_room()
        messages = [TensorMessage(given.piece(layout.pieces[index]), newcomer, _PIECES + index) for index in mine]
        flow.add(post_together(world, "send", messages), functools.partial(messages.clear))
        del messages
    flow.finish()


def _receive_pieces(
    world: Communicator,
    layout: RestoreLayout,
    landing: ReceiveBuffers,
    besides: Collection[int],
    device: torch.device,
    overtaken: Callable[[], bool],
) -> None:
    """Receive the pieces of all sources that are not in ``besides``."""
    flow = TransferPipeline(device, overtaken)

    def land(indices: Sequence[int]) -> None:
        with _filling:
            if overtaken():
                raise RuntimeError("a newer generation was announced")
            landing.finish(indices)

    for indices in layout.rounds():
        theirs = [index for index in indices if layout.pieces[index].source not in besides]
        flow.make_room()
        messages = [
            TensorMessage(landing.place(index), layout.pieces[index].source, _PIECES + index) for index in theirs
        ]
        flow.add(post_together(world, "recv", messages), functools.partial(land, theirs))
    flow.finish()


def _neighbours(restore: Restore, layout: RestoreLayout, world: Communicator) -> dict[int, PeerProcess]:
    """Return the sources whose memory this process can read, by rank. The others are asked to send."""
    offers = {source: torch.zeros(4 + len(layout.large), dtype=torch.int64) for source in restore.sources}
    for source, offer in offers.items():
        post(world, "recv", offer, source, _OFFER).wait()
    told: dict[int, PeerProcess] = {source: PeerProcess(offer) for source, offer in offers.items()}
    found = {source: neighbour for source, neighbour in told.items() if neighbour.is_there()}
    for remote in told.keys() - found.keys():
        post(world, "send", torch.tensor([_SEND]), remote, _ANSWER).wait()
    return found


@contextmanager
def _reading(
    layout: RestoreLayout, neighbours: dict[int, PeerProcess], landing: ReceiveBuffers, overtaken: Callable[[], bool]
) -> Iterator[None]:
    """Context manager that reads from all ``neighbours`` in threads, and ends when the reads and the body are over.

    Raises `RuntimeError` when a neighbour is gone: it may have ended, and its pid may have been reused, before the last
    byte was read.
    """
    if not neighbours:
        yield
        return
    numbers = {path: number for number, path in enumerate(layout.large)}
    theirs = [index for index, piece in enumerate(layout.pieces) if piece.source in neighbours]
    places = {index: landing.place(index) for index in theirs}

    def read_from(source: int) -> None:
        for index, place in places.items():
            piece = layout.pieces[index]
            if piece.source == source and not overtaken():
                neighbours[source].read(numbers[piece.path], piece.start, place)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "rackrun-read") as pool:
        reads = {pool.submit(read_from, source) for source in neighbours}
        _reads.update(reads)
        try:
            yield
        finally:
            wait(reads)
            _reads.difference_update(reads)
    lost = next((error for read in reads if (error := read.exception()) is not None), None)
    if lost is not None or not all(neighbour.is_there() for neighbour in neighbours.values()):
        raise RuntimeError(f"a source was lost while its memory was read: {lost}")
    with _filling:
        if overtaken():
            raise RuntimeError("a newer generation was announced")
        landing.finish(theirs)


def _verify(
    restore: Restore,
    layout: RestoreLayout,
    tensors: dict[str, torch.Tensor],
    world: Communicator,
    device: torch.device,
) -> None:
    """Compare the received tensors with the sources' digests, and raise `StateLost` if they differ.

    Waits first until each source has confirmed that nothing was broken off, so a difference means that the sources'
    states differ.
    """
    mine = {source: layout.digests(source, tensors, device) for source in restore.sources}
    theirs = {source: torch.zeros(1 + len(digests), dtype=torch.int64) for source, digests in mine.items()}
    for source, told in theirs.items():
        tell(world, "recv", told, source, _DIGESTS).wait()
    for source, digests in mine.items():
        wrong = [path for (path, a), b in zip(digests.items(), theirs[source].tolist()[1:], strict=True) if a != b]
        if wrong:
            raise StateLost(
                f"{wrong[0]} differs between the replicas that rank {restore.rank} was restored from (ranks {list(restore.sources)}).",
                remedy="one of these GPUs computes wrongly, or the script updates replicas differently; check them.",
            )
