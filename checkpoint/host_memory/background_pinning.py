"""Register host memory with a GPU's driver in the background, piece by piece: large memory takes tens of seconds.

Until a piece is registered, copies to it are slower but correct. A copy must not cross from one piece to the next,
because the driver assumes that the memory of one copy is of one kind. `Pinning.cuts` says where to cut it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rackrun.checkpoint.host_memory.host_registration import CudaRuntime, register_memory, unregister_memory

__all__ = ["PIECE_BYTES", "Pinning"]

PIECE_BYTES = 256 * 2**20
"""Size of a piece. The driver may delay launches while it registers one: a tenth of a second, at 2 to 8 GB/s."""


@dataclass
class _Memory:
    address: int
    size: int
    thread: threading.Thread | None = None
    gone: bool = False
    pieces: list[int] = field(default_factory=list)
    """The addresses of the registered pieces."""


class Pinning:
    """Registers and unregisters memory in the background.

    ``use_device`` is called first in each thread that calls the driver. ``tell`` is called once, with a message, when
    memory cannot be registered.
    """

    def __init__(
        self, use_device: Callable[[], None], tell: Callable[[str], None], runtime: CudaRuntime | None = None
    ) -> None:
        self._use_device, self._tell, self._runtime = use_device, tell, runtime
        self._memories: dict[int, _Memory] = {}
        self._told = False

    def pin(self, address: int, size: int) -> None:
        """Begin to register memory. Returns at once."""
        memory = self._memories[address] = _Memory(address, size)
        memory.thread = threading.Thread(
            target=self._register, args=[memory], name=f"rackrun-pin-{address:x}", daemon=True
        )
        memory.thread.start()

    def unpin(self, address: int) -> None:
        """Unregister memory before it is freed, after waiting for the piece in progress.

        Nothing may be copied to it any more.
        """
        memory = self._memories.pop(address, None)
        if memory is None or memory.thread is None:
            return
        memory.gone = True
        memory.thread.join()
        for piece in memory.pieces:
            unregister_memory(piece, self._runtime)

    def cuts(self, address: int, size: int) -> list[int]:
        """Return the offsets between 0 and ``size`` at which a copy to these bytes must be split, because one copy may
        not cross from one piece of `PIECE_BYTES` to the next.

        Empty within one piece, and for memory not given to `pin`.
        """
        for memory in tuple(self._memories.values()):  # another thread may pin meanwhile
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
        """Report once that memory cannot be registered. The driver refuses later requests as well."""
        if not self._told:
            self._told = True
            self._tell(
                f"{size / 2**30:.1f} GiB of this host's memory stay unpinned, as the GPU's driver does not register them: copies to them are "
                "slower. See the limit of locked memory (ulimit -l)"
            )
