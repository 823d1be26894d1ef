"""Leaves the step loop before its end, on all ranks after the same step.

Ranks that leave the loop use only the exchange to agree on it: until all have left, some may run the next step and use
other collectives.
"""

from __future__ import annotations

import time

from rackrun.link.exchange import Exchange, ExchangeTimeout, ExchangeUnreachable
from rackrun.protocol.boot import Boot
from rackrun.protocol.ids import after_step
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.reports import say

__all__ = ["all_leave"]

_CONNECT_S = 10.0
_LOOK_S = 0.2
_TELL_S = 5.0


def all_leave(world: WorkerMembership, boot: Boot | None, step: int) -> None:
    """Wait until all ranks of this generation have left the loop; this rank leaves it after ``step``.

    After 5 s, prints once which ranks have not left. When the generation breaks meanwhile, abandons the attempt
    (`WorkerMembership.abandon`). Returns at once without an agent's exchange or in a world of one rank.
    """
    if boot is None or not boot.exchange or world.size == 1:
        return
    began, told = time.monotonic(), False
    room = Exchange(boot.exchange, boot.token, f"left/{world.generation}", _CONNECT_S)
    try:
        room.set(str(world.rank), str(step).encode())
        entered = world.progress.enter()  # so a hang detector sees that this rank waits for others
        while not world.broken:
            try:
                room.wait([str(rank) for rank in range(world.size)], _LOOK_S)
            except ExchangeUnreachable:
                pass  # the gate that follows notices the broken connection
            except ExchangeTimeout:
                if not told and time.monotonic() - began > _TELL_S:
                    told = True
                    others = [rank for rank in range(world.size) if not room.check([str(rank)])]
                    say(
                        f"rank {world.rank} has left the loop over run.steps() {after_step(step)}, and waits: rank "
                        f"{', '.join(map(str, others[:8]))}{' and others' if len(others) > 8 else ''} has not. All ranks have to leave it after "
                        "the same step. Remedy: decide by what is the same on all ranks, such as step.loss."
                    )
                continue
            world.progress.completed(entered)
            return
    finally:
        room.close()
    world.abandon()
