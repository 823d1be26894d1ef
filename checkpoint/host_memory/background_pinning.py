"""Host memory is registered with a GPU's driver beside training, in pieces: large memory takes the driver tens of seconds.

Until a piece is registered, copies to it are slower, and no less right. A copy must not cross from one piece to the next: the driver takes the
memory of one copy to be of one kind. `Pinning.cuts` says where to cut it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rackrun.checkpoint.host_memory.host_registration import Runtime, register_memory, unregister_memory

__all__ = ["PIECE_BYTES", "Pinning"]

PIECE_BYTES = 256 * 2**20
"""The driver may hold launches up while it registers one: a tenth of a second, at 2 to 8 GB/s."""


@dataclass
class _Memory:
    address: int
    size: int
    thread: threading.Thread | None = None
    gone: bool = False
    pieces: list[int] = field(default_factory=list)
    """The addresses of those that are registered."""


class Pinning:
    """``use_device`` is called first in each thread that asks the driver. ``tell`` is called once, when something cannot be registered."""

    def __init__(
        self, use_device: Callable[[], None], tell: Callable[[str], None], runtime: Runtime | None = None
    ) -> None:
        self._use_device, self._tell, self._runtime = use_device, tell, runtime
        self._memories: dict[int, _Memory] = {}
        self._told = False

    def pin(self, address: int, size: int) -> None:
        """Begin; returns at once."""
        memory = self._memories[address] = _Memory(address, size)
        memory.thread = threading.Thread(
            target=self._register, args=[memory], name=f"rackrun-pin-{address:x}", daemon=True
        )
        memory.thread.start()

    def unpin(self, address: int) -> None:
        """Before that memory goes: waits for the piece in hand. Nothing may be copied to it any more."""
        memory = self._memories.pop(address, None)
        if memory is None or memory.thread is None:
            return
        memory.gone = True
        memory.thread.join()
        for piece in memory.pieces:
            unregister_memory(piece, self._runtime)

    def cuts(self, address: int, size: int) -> list[int]:
        """Where a copy to these bytes, of memory that was given to `pin` or not, is to be cut: offsets between 0 and ``size``."""
        for memory in tuple(self._memories.values()):  # others may pin meanwhile
            if memory.address <= address < memory.address + memory.size:
                first = PIECE_BYTES - (address - memory.address) % PIECE_BYTES
                return list(range(first, size, PIECE_BYTES))
        return []

    def _register(self, memory: _Memory) -> None:
        self._use_device()
        for start in range(0, memory.size, PIECE_BYTES):
            if memory.gone:
                return
            size = min(PIECE_BYTES, memory.size - start)
            if not register_memory(memory.address + start, size, self._runtime):
                self._failed(memory.size - start)
                return
            memory.pieces.append(memory.address + start)

    def _failed(self, size: int) -> None:
        """What the driver has refused once it refuses again."""
        if not self._told:
            self._told = True
            self._tell(
                f"{size / 2**30:.1f} GiB of this host's memory stay unpinned, as the GPU's driver does not register them: copies to them are "
                "slower. See the limit of locked memory (ulimit -l)"
            )
