"""A newcomer gets its state from live replicas, straight into its own tensors.

The sources split the bytes between them, in chunks, round robin; each chunk goes from the source's tensor into the
newcomer's without a copy between: over the world's communicator, or, where both are on one host's CPUs, read by the
newcomer itself. What comes from one source is checked against the digest of *another* (a replica is checked, not
assumed), so a diverged or damaged copy is found before anyone trains on it. Small tensors travel packed.

Everything here runs on the new generation's world communicator, between the step that was broken and its repetition: no
source changes its state meanwhile, because the next gate needs the newcomer too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from rackrun.core.commands import Plan, Restore
from rackrun.errors import StateLost
from rackrun.worker.communicator import COLLECTIVE_TIMEOUT, Communicator
from rackrun.worker.loop_end import Source
from rackrun.worker.manifest import Manifest, TensorInfo
from rackrun.worker.neighbour import Neighbour, readable
from rackrun.worker.state import TrackedState
from rackrun.worker.tensor_bytes import copy_bytes, dense_bytes, digest, digests, pack

__all__ = ["Callbacks", "landing_places", "run_restores", "settle_restores"]

CHUNK_BYTES = 8 * 2**20
SMALL_BYTES = 64 * 2**10
_HEADER, _MANIFEST, _SMALL, _DIGESTS, _OFFER, _ANSWER, _CHUNKS = 0, 1, 2, 3, 4, 5, 16  # message tags
_SEND, _HAVE_READ = 0, 1

_reads: set[Future[None]] = set()
_filling = threading.Lock()
"""Of this newcomer, perhaps for a generation that was overtaken: they end soon, but not before they have written."""


def settle_restores() -> None:
    """Nothing of a restore that was overtaken will write to this worker's state from here on."""
    wait(tuple(_reads))
    with _filling:
        pass


@dataclass(frozen=True)
class Callbacks:
    """What a restore asks of the worker, and tells it."""

    overtaken: Callable[[], bool]
    """Nobody waits for the outcome any more."""
    reached: Callable[[str], None] = lambda _: None
    """Told of the stages of the copy (`rackrun.worker.stages`)."""
    known_digests: Callable[[], Mapping[str, int]] = dict
    """The digests of this rank's own tensors that are known, by path. Asked of a source, while the newcomer reads."""
    source: Callable[[], Source] | None = None
    """What a source gives, where that is not its state as it is."""


def run_restores(
    plan: Plan,
    rank: int,
    world: Communicator,
    state: TrackedState,
    replica_class: str,
    device: torch.device,
    callbacks: Callbacks,
) -> Manifest | None:
    """This rank's part in every restore of the plan, as source or as newcomer (which gets the source's manifest back).

    RuntimeError when a peer is lost meanwhile.
    """
    received = None
    for restore in plan.restores:
        if not restore.sources:
            continue  # from a snapshot: rackrun.worker.snapshot
        if rank == restore.rank:
            received = _receive(restore, world, state, device, callbacks)
        elif rank in restore.sources:
            source = state if callbacks.source is None else callbacks.source()
            _send(restore, rank, world, source, replica_class, device, callbacks)
            callbacks.reached("served")
    return received


@dataclass(frozen=True)
class _Chunk:
    path: str
    start: int
    stop: int
    source: int


class _Layout:
    """How a manifest's bytes are split over the sources: a pure function, the same on both sides."""

    def __init__(self, manifest: Manifest, sources: tuple[Any, ...]) -> None:
        self.small: list[str] = []
        self.chunks: list[_Chunk] = []
        self.lead, self.second = sources[0], sources[1 % len(sources)]
        """Who sends the small ones, and whose digest of them counts."""
        self.large: list[str] = []
        self.checker: dict[str, int] = {}
        """Large tensor -> the source whose digest of it counts: not the one that gives its first chunk, if there is another.
        Buffers are each rank's own (see `rackrun.worker.unique`): there is nothing to compare them with."""
        self.infos = {info.path: info for info in manifest.tensors}
        turn = 0
        for info in manifest.tensors:
            size = info.nbytes
            if size <= SMALL_BYTES:
                self.small.append(info.path)
                continue
            self.large.append(info.path)
            if not _is_buffer(info.path):
                self.checker[info.path] = sources[(turn + 1) % len(sources)]
            for start in range(0, size, CHUNK_BYTES):
                self.chunks.append(
                    _Chunk(info.path, start, min(start + CHUNK_BYTES, size), sources[turn % len(sources)])
                )
                turn += 1

    def _lies_elsewhere(self, path: str, tensor: torch.Tensor, device: torch.device) -> bool:
        """It is a copy on the host of what belongs on ``device``, whose digests are others."""
        return not self.infos[path].on_host and tensor.device.type != device.type

    def digests(
        self,
        checker: int,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, int]:
        """What ``checker`` vouches for. ``known``: some of them."""
        mine = [path for path, source in self.checker.items() if source == checker]
        new = [path for path in mine if path not in known]
        elsewhere = [path for path in new if self._lies_elsewhere(path, tensors[path], device)]
        here = [path for path in new if path not in elsewhere]
        fresh = {**known, **dict(zip(here, digests([tensors[path] for path in here]), strict=True))}
        fresh |= {path: digest(tensors[path].to(device)) for path in elsewhere}  # one at a time: they are large
        found = {path: fresh[path] for path in mine}
        small = [path for path in self.small if not _is_buffer(path)]
        if small and checker == self.second:
            found[", ".join(small)] = digest(pack([tensors[path] for path in small], device))
        return found


def _send(
    restore: Restore,
    rank: int,
    world: Communicator,
    source: Source,
    replica_class: str,
    device: torch.device,
    callbacks: Callbacks,
) -> None:
    manifest, tensors = source.manifest(replica_class), source.tensors()
    layout = _Layout(manifest, restore.sources)
    works = []
    if rank == layout.lead:
        encoded = msgspec.msgpack.encode(manifest)
        header = torch.tensor([len(encoded)], dtype=torch.int64)
        works.append(_post(world, "send", header.to(device), restore.rank, _HEADER))
        works.append(_post(world, "send", _bytes_tensor(encoded, device), restore.rank, _MANIFEST))
        if layout.small:
            small = pack([tensors[path] for path in layout.small], device)
            works.append(_post(world, "send", small, restore.rank, _SMALL))
    with readable([tensors[path] for path in layout.large]) as offer:
        if device.type == "cpu":
            told = torch.zeros(4 + len(layout.large), dtype=torch.int64) if offer is None else offer
            works.append(_post(world, "send", told, restore.rank, _OFFER))
        vouched = layout.digests(rank, tensors, device, callbacks.known_digests())
        digests = torch.tensor(list(vouched.values()), dtype=torch.int64)
        answer = torch.tensor([_SEND])
        if device.type == "cpu":
            _post(world, "recv", answer, restore.rank, _ANSWER).wait()
    if int(answer) == _SEND:
        works += [
            _post(
                world,
                "send",
                _flat(tensors[chunk.path], device)[chunk.start : chunk.stop],
                restore.rank,
                _CHUNKS + index,
            )
            for index, chunk in enumerate(layout.chunks)
            if chunk.source == rank
        ]
    if len(digests):  # in the order in which the newcomer receives: NCCL knows no tags
        works.append(_post(world, "send", digests.to(device), restore.rank, _DIGESTS))
    for work in works:
        work.wait()


def _receive(
    restore: Restore,
    world: Communicator,
    state: TrackedState,
    device: torch.device,
    callbacks: Callbacks,
) -> Manifest:
    lead = restore.sources[0]
    header = torch.zeros(1, dtype=torch.int64, device=device)
    _post(world, "recv", header, lead, _HEADER).wait()
    encoded = torch.empty(int(header.item()), dtype=torch.uint8, device=device)
    _post(world, "recv", encoded, lead, _MANIFEST).wait()
    manifest = msgspec.msgpack.decode(encoded.cpu().numpy().tobytes(), type=Manifest)
    tensors = state.allocate(manifest)
    layout = _Layout(manifest, restore.sources)
    small = torch.empty(sum(tensors[path].nbytes for path in layout.small), dtype=torch.uint8, device=device)
    if layout.small:
        _post(world, "recv", small, lead, _SMALL).wait()

    dense = landing_places({path: (layout.infos[path], tensors[path]) for path in layout.large}, device)
    flat = {
        path: torch.empty(tensors[path].nbytes, dtype=torch.uint8, device=device) if block is None else block
        for path, block in dense.items()
    }
    neighbours = _neighbours(restore, layout, world) if device.type == "cpu" else {}
    works = [
        _post(world, "recv", flat[chunk.path][chunk.start : chunk.stop], chunk.source, _CHUNKS + index)
        for index, chunk in enumerate(layout.chunks)
        if chunk.source not in neighbours
    ]
    if neighbours:
        _read(layout, neighbours, flat, callbacks.overtaken)
        works += [_post(world, "send", torch.tensor([_HAVE_READ]), source, _ANSWER) for source in neighbours]
    for work in works:
        work.wait()
    callbacks.reached("copied")
    with _filling:
        if callbacks.overtaken():
            raise RuntimeError("a newer generation was announced")
        for path, block in dense.items():
            if block is None:
                tensors[path].copy_(layout.infos[path].view(flat[path]))
        copy_bytes(small, [tensors[path] for path in layout.small])
    _verify(restore, layout, tensors, world, device)
    callbacks.reached("verified")
    with _filling:
        if callbacks.overtaken():
            raise RuntimeError("a newer generation was announced")
        state.load_plain(manifest, tensors)
    return manifest


def landing_places(
    tensors: dict[str, tuple[TensorInfo, torch.Tensor]], device: torch.device
) -> dict[str, torch.Tensor | None]:
    """The memory of each tensor, as bytes, where what arrives can be written straight into it. None: it lies otherwise than at its source, so
    it needs a copy between."""
    return {
        path: dense_bytes(tensor) if info.lies_as(tensor) and tensor.device.type == device.type else None
        for path, (info, tensor) in tensors.items()
    }


def _neighbours(restore: Restore, layout: _Layout, world: Communicator) -> dict[int, Neighbour]:
    """The sources whose memory can be read; the others are told to send."""
    offers = {source: torch.zeros(4 + len(layout.large), dtype=torch.int64) for source in restore.sources}
    for source, offer in offers.items():
        _post(world, "recv", offer, source, _OFFER).wait()
    told: dict[int, Neighbour] = {source: Neighbour(offer) for source, offer in offers.items()}
    found = {source: neighbour for source, neighbour in told.items() if neighbour.is_there()}
    for remote in told.keys() - found.keys():
        _post(world, "send", torch.tensor([_SEND]), remote, _ANSWER).wait()
    return found


def _read(
    layout: _Layout, neighbours: dict[int, Neighbour], flat: dict[str, torch.Tensor], overtaken: Callable[[], bool]
) -> None:
    """RuntimeError when one of them is gone: it may have been, and its number another's, before the last byte was read."""
    places = {path: place for place, path in enumerate(layout.large)}

    def read_from(source: int) -> None:
        for chunk in layout.chunks:
            if chunk.source == source and not overtaken():
                neighbours[source].read(places[chunk.path], chunk.start, flat[chunk.path][chunk.start : chunk.stop])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "rackrun-read") as pool:
        reads = {pool.submit(read_from, source) for source in neighbours}
        _reads.update(reads)
        wait(reads)
        _reads.difference_update(reads)
    lost = next((error for read in reads if (error := read.exception()) is not None), None)
    if lost is not None or not all(neighbour.is_there() for neighbour in neighbours.values()):
        raise RuntimeError(f"a source was lost while its memory was read: {lost}")


def _verify(
    restore: Restore,
    layout: _Layout,
    tensors: dict[str, torch.Tensor],
    world: Communicator,
    device: torch.device,
) -> None:
    for source in restore.sources:
        mine = layout.digests(source, tensors, device)
        if not mine:
            continue
        theirs = torch.zeros(len(mine), dtype=torch.int64, device=device)
        _post(world, "recv", theirs, source, _DIGESTS).wait()
        wrong = [path for (path, a), b in zip(mine.items(), theirs.tolist(), strict=True) if a != b]
        if wrong:
            raise StateLost(
                f"{wrong[0]} differs between the replicas that rank {restore.rank} was restored from (ranks {list(restore.sources)}).",
                remedy="one of these GPUs computes wrongly, or the script updates replicas differently; check them.",
            )


def _is_buffer(path: str) -> bool:
    return "/buffer/" in path


def _flat(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    dense = dense_bytes(tensor)
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if dense is None else dense
    return flat.to(device)


class _Transfer:
    """In flight. gloo gives up a peer that is late by the limit of its *handshake*, unless it is told another one: a source may still be busy in
    its own code. Whoever is lost ends it, by the break of the generation."""

    def __init__(self, work: Any, *, limited: bool) -> None:
        self._work, self._limited = work, limited

    def wait(self) -> None:
        if self._limited:
            self._work.wait(COLLECTIVE_TIMEOUT)
        else:  # NCCL: given a limit, it would block, and abort its communicator
            self._work.wait()


def _post(world: Communicator, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> _Transfer:
    return _Transfer(world.call(kind, [tensor], peer, tag), limited=tensor.device.type == "cpu")


def _bytes_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
