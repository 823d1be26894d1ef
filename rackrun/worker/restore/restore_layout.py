"""Splits a state's bytes over the replicas that give them: a pure function of the manifest, the same on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.tensors.tensor_bytes import digest, digests, pack

__all__ = [
    "PIECE_BYTES_MAX",
    "PIECE_BYTES_MIN",
    "ROUND_BYTES",
    "ROUND_PIECES",
    "SMALL_BYTES",
    "RestoreLayout",
    "TensorPiece",
]

SMALL_BYTES = 64 * 2**10
"""Tensors of up to this many bytes are sent packed together."""
PIECE_BYTES_MIN = 8 * 2**20
PIECE_BYTES_MAX = 128 * 2**20
"""The limits of a piece, in bytes. Large pieces take few launches on a device; smaller ones share a small state evenly
between its sources."""
_PIECES_A_SOURCE = 8
ROUND_BYTES = 256 * 2**20
ROUND_PIECES = 64
"""The limits of what one source sends in one round, which is posted together: bytes, and number of pieces."""


@dataclass(frozen=True)
class TensorPiece:
    """Bytes ``start`` to ``stop`` of the tensor at ``path``, and the rank that gives them."""

    path: str
    start: int
    stop: int
    source: int

    @property
    def nbytes(self) -> int:
        """The size of the piece in bytes."""
        return self.stop - self.start


class RestoreLayout:
    """The pieces of a state, and which source checks which tensor. ``sources``: the ranks that give it, in the plan's
    order."""

    def __init__(self, manifest: StateManifest, sources: Sequence[int]) -> None:
        self.infos = {info.path: info for info in manifest.tensors}
        self.small = [info.path for info in manifest.tensors if info.nbytes <= SMALL_BYTES]
        self.large = [info.path for info in manifest.tensors if info.nbytes > SMALL_BYTES]
        self.lead, self.second = sources[0], sources[1 % len(sources)]
        """The source that sends the small tensors, and the source whose digest of them counts."""
        self.pieces: list[TensorPiece] = []
        self.checker: dict[str, int] = {}
        """Path of each large tensor -> the source whose digest counts: not the one that gives its first piece, if there
        is another.

        Buffers are each rank's own (`rackrun.worker.integrity.unshared_buffers`), so there is nothing to compare them
        with.
        """
        step = _piece_bytes(sum(self.infos[path].nbytes for path in self.large), len(sources))
        given = dict.fromkeys(sources, 0)
        for path in self.large:
            size = self.infos[path].nbytes
            for start in range(0, size, step):
                source = min(sources, key=lambda one: (given[one], sources.index(one)))
                piece = TensorPiece(path, start, min(start + step, size), source)
                given[source] += piece.nbytes
                self.pieces.append(piece)
                if not start and not _is_buffer(path):
                    self.checker[path] = sources[(sources.index(source) + 1) % len(sources)]

    def rounds(self) -> list[list[int]]:
        """Return the rounds in the order in which they travel; each is a list of indices into ``pieces``."""
        found: list[list[int]] = []
        taken: dict[int, tuple[int, int]] = {}
        for index, piece in enumerate(self.pieces):
            count, size = taken.get(piece.source, (0, 0))
            full = count == ROUND_PIECES or (count and size + piece.nbytes > ROUND_BYTES)
            if full or not found:
                found.append([])
                taken.clear()
                count = size = 0
            found[-1].append(index)
            taken[piece.source] = count + 1, size + piece.nbytes
        return found

    def digests(
        self,
        checker: int,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, int]:
        """Return the digests that ``checker`` vouches for, by path; the small tensors have one together. ``known``:
        digests by path that need not be computed."""
        mine = [path for path, source in self.checker.items() if source == checker]
        new = [path for path in mine if path not in known]
        elsewhere = [path for path in new if self._lies_elsewhere(path, tensors[path], device)]
        here = [path for path in new if path not in elsewhere]
        fresh = {**known, **dict(zip(here, digests([tensors[path] for path in here]), strict=True))}
        fresh |= {path: digest(tensors[path].to(device)) for path in elsewhere}  # one at a time, because they are large
        found = {path: fresh[path] for path in mine}
        small = [path for path in self.small if not _is_buffer(path)]
        if small and checker == self.second:
            found[", ".join(small)] = digest(pack([tensors[path] for path in small], device))
        return found

    def _lies_elsewhere(self, path: str, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether ``tensor`` is a host copy of a tensor that belongs on ``device``; digests differ between the two."""
        return not self.infos[path].on_host and tensor.device.type != device.type


def _piece_bytes(total: int, sources: int) -> int:
    """Return the size of the pieces in bytes, a multiple of the smallest size."""
    fair = -(-total // (sources * _PIECES_A_SOURCE * PIECE_BYTES_MIN)) * PIECE_BYTES_MIN
    return min(max(fair, PIECE_BYTES_MIN), PIECE_BYTES_MAX)


def _is_buffer(path: str) -> bool:
    return "/buffer/" in path
