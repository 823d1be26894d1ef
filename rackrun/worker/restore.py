"""A newcomer gets its state from live replicas, straight into its own tensors.

The sources split the bytes between them, in chunks, round robin; each chunk goes from the source's tensor into the
newcomer's without a copy between. What is sent by one source is checked against the digest of *another* (a replica is
checked, not assumed), so a diverged or damaged copy is found before anyone trains on it. Small tensors travel packed.

Everything here runs on the new generation's world communicator, between the step that was broken and its repetition: no
source changes its state meanwhile, because the next gate needs the newcomer too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rackrun.core.commands import Plan, Restore
from rackrun.errors import StateLost
from rackrun.worker.communicator import Communicator
from rackrun.worker.state import Manifest, TrackedState
from rackrun.worker.tensor_bytes import copy_bytes, dense_bytes, digest, pack

__all__ = ["run_restores"]

CHUNK_BYTES = 8 * 2**20
SMALL_BYTES = 64 * 2**10
_HEADER, _MANIFEST, _SMALL, _DIGESTS, _CHUNKS = 0, 1, 2, 3, 16  # message tags


def run_restores(
    plan: Plan, rank: int, world: Communicator, state: TrackedState, replica_class: str, device: torch.device
) -> Manifest | None:
    """This rank's part in every restore of the plan, as source or as newcomer (which gets the source's manifest back).

    RuntimeError when a peer is lost meanwhile.
    """
    received = None
    for restore in plan.restores:
        if not restore.sources:
            continue  # from a snapshot: rackrun.worker.snapshot
        if rank == restore.rank:
            received = _receive(restore, world, state, device)
        elif rank in restore.sources:
            _send(restore, rank, world, state, replica_class, device)
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
        self.checker: dict[str, int] = {}
        """Large tensor -> the source whose digest of it counts: not the one that sends its first chunk, if there is another."""
        turn = 0
        for info in manifest.tensors:
            dtype = getattr(torch, info.dtype)
            size = dtype.itemsize
            for extent in info.shape:
                size *= extent
            if size <= SMALL_BYTES:
                self.small.append(info.path)
                continue
            self.checker[info.path] = sources[(turn + 1) % len(sources)]
            for start in range(0, size, CHUNK_BYTES):
                self.chunks.append(
                    _Chunk(info.path, start, min(start + CHUNK_BYTES, size), sources[turn % len(sources)])
                )
                turn += 1


def _send(
    restore: Restore, rank: int, world: Communicator, state: TrackedState, replica_class: str, device: torch.device
) -> None:
    manifest, tensors = state.manifest(replica_class), state.tensors()
    layout = _Layout(manifest, restore.sources)
    works = []
    encoded = msgspec.msgpack.encode(manifest)
    if rank == restore.sources[0]:
        header = torch.tensor([len(encoded)], dtype=torch.int64)
        works.append(_post(world, "send", header.to(device), restore.rank, _HEADER))
        works.append(_post(world, "send", _bytes_tensor(encoded, device), restore.rank, _MANIFEST))
        if layout.small:
            works.append(
                _post(world, "send", pack([tensors[path] for path in layout.small], device), restore.rank, _SMALL)
            )
    for index, chunk in enumerate(layout.chunks):
        if chunk.source == rank:
            flat = dense_bytes(tensors[chunk.path])
            if flat is None:
                flat = tensors[chunk.path].contiguous().reshape(-1).view(torch.uint8)
            works.append(_post(world, "send", flat[chunk.start : chunk.stop], restore.rank, _CHUNKS + index))
    digests = [digest(tensors[path]) for path, checker in layout.checker.items() if checker == rank]
    if digests:
        works.append(_post(world, "send", torch.tensor(digests, dtype=torch.int64).to(device), restore.rank, _DIGESTS))
    for work in works:
        work.wait()


def _receive(restore: Restore, world: Communicator, state: TrackedState, device: torch.device) -> Manifest:
    lead = restore.sources[0]
    header = torch.zeros(1, dtype=torch.int64, device=device)
    _post(world, "recv", header, lead, _HEADER).wait()
    encoded = torch.empty(int(header.item()), dtype=torch.uint8, device=device)
    _post(world, "recv", encoded, lead, _MANIFEST).wait()
    manifest = msgspec.msgpack.decode(encoded.cpu().numpy().tobytes(), type=Manifest)
    tensors = state.allocate(manifest)
    layout = _Layout(manifest, restore.sources)

    works, staged = [], []
    for index, chunk in enumerate(layout.chunks):
        flat = dense_bytes(tensors[chunk.path])
        if flat is None:
            flat = torch.empty(tensors[chunk.path].nbytes, dtype=torch.uint8, device=device)
            staged.append((chunk.path, flat))
        works.append(_post(world, "recv", flat[chunk.start : chunk.stop], chunk.source, _CHUNKS + index))
    if layout.small:
        packed = torch.empty(sum(tensors[path].nbytes for path in layout.small), dtype=torch.uint8, device=device)
        _post(world, "recv", packed, lead, _SMALL).wait()
        copy_bytes(packed, [tensors[path] for path in layout.small])
    for work in works:
        work.wait()
    for path, flat in staged:
        tensors[path].copy_(flat.view(tensors[path].dtype).view(tensors[path].shape))
    _verify(restore, layout, tensors, world, device)
    state.load_plain(manifest, tensors)
    return manifest


def _verify(
    restore: Restore, layout: _Layout, tensors: dict[str, torch.Tensor], world: Communicator, device: torch.device
) -> None:
    for source in restore.sources:
        checked = [path for path, checker in layout.checker.items() if checker == source]
        if not checked:
            continue
        theirs = torch.zeros(len(checked), dtype=torch.int64, device=device)
        _post(world, "recv", theirs, source, _DIGESTS).wait()
        mine = [digest(tensors[path]) for path in checked]
        wrong = [path for path, a, b in zip(checked, mine, theirs.tolist(), strict=True) if a != b]
        if wrong:
            raise StateLost(
                f"{wrong[0]} differs between the replicas that rank {restore.rank} was restored from (ranks {list(restore.sources)}).",
                remedy="one of these GPUs computes wrongly, or the script updates replicas differently; check them.",
            )


def _post(world: Communicator, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    return getattr(world.inner, kind)([tensor], peer, tag)


def _bytes_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
