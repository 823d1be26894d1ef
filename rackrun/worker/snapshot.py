"""Snapshots of shards that have no live copy, in memory that the agent owns and that outlives this process.

Two slots are written in turn; a slot is sealed, in the heartbeat page, only when it is whole. All ranks take them after the
same steps (the interval is drawn from figures that every gate sums up), because all of them go back together.

The image: 8 bytes of manifest length, 8 bytes of the manifest's and the data's digest, the manifest (msgpack), then each
tensor's bytes, aligned to 64.
"""

from __future__ import annotations

import http.client
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator

import msgspec
import torch

from rackrun.core.ids import Position
from rackrun.errors import StateLost
from rackrun.worker.gate import GateSums
from rackrun.worker.runtime import Runtime
from rackrun.worker.state import Manifest, TrackedState
from rackrun.worker.tensor_bytes import dense_bytes, digest

__all__ = ["Snapshots"]

OVERHEAD_MAX = 0.02
_EVERY_MAX = 64
_HEAD = struct.Struct("<QQ")
_ALIGN = 64


class Snapshots:
    def __init__(self, runtime: Runtime, state: TrackedState, every: int | None) -> None:
        self._runtime, self._state, self._every = runtime, state, every
        self._fds = runtime.boot.snapshot_fds if runtime.boot else (-1, -1)
        self._held: dict[int, int] = {}  # step -> slot
        self.cost_s = 0.0
        """What the last one took on this rank."""

    def oldest_kept(self) -> Position | None:
        return Position(min(self._held)) if self._held else None

    def take_if_due(self, at: Position, gate: GateSums, *, now: bool) -> None:
        """``gate`` holds the sums of all ranks' snapshot costs and step times, so all ranks come to the same answer. ``now``:
        after a recovery, because a newcomer cannot go back to what is older than itself."""
        if self._fds[0] < 0:
            return
        if now:
            self.take(at.step)
            return
        every = self._every
        if every is None:
            ratio = gate.snapshot_cost_s / (OVERHEAD_MAX * gate.step_s) if gate.step_s > 0 else 1.0
            every = min(2 ** math.ceil(math.log2(max(ratio, 1.0))), _EVERY_MAX)
        if at.step % every == 0:
            self.take(at.step)

    def take(self, step: int) -> None:
        began = time.monotonic()
        slot = 0 if 0 not in self._held.values() else 1 if 1 not in self._held.values() else self._held[min(self._held)]
        self._held = {s: i for s, i in self._held.items() if i != slot}
        self._runtime.page.seal_snapshot(slot, -1)
        manifest, tensors = self._state.manifest(self._runtime.world.replica_class), self._state.tensors()
        encoded = msgspec.msgpack.encode(manifest)
        sizes = [tensor.nbytes for tensor in tensors.values()]
        total = _HEAD.size + len(encoded) + sum(sizes) + _ALIGN * (len(sizes) + 1)
        fd = self._fds[slot]
        if os.fstat(fd).st_size != total:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, total)  # out of memory shows here, not as SIGBUS later
        with mmap.mmap(fd, total) as image:
            image[_HEAD.size : _HEAD.size + len(encoded)] = encoded
            memory = torch.frombuffer(image, dtype=torch.uint8)
            for (start, stop), tensor in zip(_extents(len(encoded), sizes), tensors.values(), strict=True):
                flat = dense_bytes(tensor)
                memory[start:stop].copy_(
                    flat if flat is not None else tensor.contiguous().reshape(-1).view(torch.uint8)
                )
            mixed = digest(memory[_HEAD.size :])
            del memory
            image[: _HEAD.size] = _HEAD.pack(len(encoded), mixed % 2**64)
        self._held[step] = slot
        self._runtime.page.seal_snapshot(slot, step)
        self.cost_s = time.monotonic() - began

    def fetch(self, step: int, remote: str) -> bytearray:
        """The lost rank's snapshot, from its agent: ``host:port/tray/index/incarnation``. RuntimeError when that does not give
        it: the tray may be lost too."""
        try:
            return _fetch(remote, step, self._runtime.boot.token if self._runtime.boot else "")
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{remote} did not give its snapshot of step {step}: {error!r}") from error

    def load(self, step: int, fetched: bytearray | None) -> Manifest:
        """Put the state of ``step`` in place, from this rank's own snapshot or from what `fetch` gave.

        Raises `StateLost` when its digest is wrong.
        """
        image = self._own(step) if fetched is None else fetched
        length, expected = _HEAD.unpack_from(image)
        memory = torch.frombuffer(image, dtype=torch.uint8)
        if digest(memory[_HEAD.size :]) % 2**64 != expected:
            raise StateLost(
                f"the snapshot of step {step} is damaged.", remedy="check this host's memory; the job starts again."
            )
        manifest = msgspec.msgpack.decode(bytes(memoryview(image)[_HEAD.size : _HEAD.size + length]), type=Manifest)
        tensors = self._state.allocate(manifest)
        sizes = [info.nbytes for info in manifest.tensors]
        for (start, stop), info in zip(_extents(length, sizes), manifest.tensors, strict=True):
            tensors[info.path].copy_(info.view(memory[start:stop].clone()))
        self._state.load_plain(manifest, tensors)
        for other, slot in list(self._held.items()):
            if other != step:
                del self._held[other]
                self._runtime.page.seal_snapshot(slot, -1)
        if fetched is not None:
            self._runtime.world.replica_class = (
                manifest.replica_class
            )  # it goes into the copy, and says that snapshots are needed
            self.take(step)  # or this rank would be the one without, at the next failure
        return manifest

    def _own(self, step: int) -> mmap.mmap:
        slot = self._held.get(step)
        if slot is None:
            raise StateLost(
                f"this rank has no snapshot of step {step}.",
                remedy="please report this: the plan named one that is not there.",
            )
        return mmap.mmap(self._fds[slot], 0)


def _extents(manifest_bytes: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    at = _HEAD.size + manifest_bytes
    for size in sizes:
        at = -(-at // _ALIGN) * _ALIGN
        yield at, at + size
        at += size


def _fetch(remote: str, step: int, token: str) -> bytearray:
    """``remote`` is ``host:port/tray/index/incarnation``."""
    address, _, path = remote.partition("/")
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", f"/snapshot/{path}/{step}", headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        image = bytearray(int(response.headers["Content-Length"]))
        view, at = memoryview(image), 0
        while at < len(image):
            got = response.readinto(view[at:])
            if not got:
                raise http.client.IncompleteRead(b"", len(image) - at)
            at += got
        return image
    finally:
        connection.close()
