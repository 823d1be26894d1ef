"""A policy of one's own, for a job of which every GPU-hour counts and which nobody watches at night.

    rackrun --nnodes 4 --nproc-per-node 4 --spares 2 --checkpoint-dir /shared/ckpt --wait-for-hardware 1800 \\
            --policy examples.policy:choose ... train.py

It runs in a process of its own, has a second for each answer, and must not need torch.
"""

from __future__ import annotations

from rackrun.policy import ClusterView, Decision, Failure, FailureCause, Rung, options

LOSE_AT_MOST_S = 600.0


def choose(failure: Failure, view: ClusterView) -> Decision | None:
    """None leaves a failure to the default: the smallest expected loss."""
    possible = {option.rung: option for option in options(failure, view) if option.possible}
    if failure.whose is FailureCause.STORAGE and Rung.WAIT in possible:
        return Decision(rung=Rung.WAIT, deadline_s=120.0, reason="the file system comes back, usually")
    if failure.whose is FailureCause.PREEMPTION and len(failure.ranks) > view.world_size // 2:
        return Decision(rung=Rung.STOP, reason="most of the machine is taken away: the queue starts us again")
    going_back_s = (view.rollback_steps or 0) * (view.costs.step_s or 1.0)
    if Rung.RESTART in possible and going_back_s > LOSE_AT_MOST_S:
        return Decision(rung=Rung.RESTART, reason=f"a rollback would take {going_back_s:.0f} s of training back")
    return None
