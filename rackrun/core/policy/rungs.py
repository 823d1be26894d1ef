"""Predicted cost of each rung, or why the rung is impossible: one small pure function each.

A loss is in GPU-seconds, in three kinds that `Weights` weigh:

========== ==========================================================================================================
goodput    ranks x (the time until all compute again + the time of what they compute again); after a shrink also the
           time of missing ranks (*away*), as after an acquire that trains on
cost       (ranks + spares) x the same time; for a stop, only the time after the job has been started again
resilience the chance that another GPU fails before one is repaired, x ranks x the repair, when no slot is left over
========== ==========================================================================================================

Time that has already passed in a wait (`ClusterView.patience_used_s`) is lost whatever is decided, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from rackrun.protocol.policy_types import ClusterView, Failure, Option, Priors, Rung, Weights

__all__ = ["options"]


class _Price(NamedTuple):
    """Cost of a rung before it is weighted.

    ``seconds`` are those of all ranks, by name. In ``unpaid_s`` of them the job holds no GPUs. ``away_gpu_s`` are
    GPU-seconds of ranks that are missing meanwhile.
    """

    seconds: dict[str, float]
    unpaid_s: float = 0.0
    away_gpu_s: float = 0.0


def options(
    failure: Failure,
    view: ClusterView,
    weights: Weights | None = None,
    priors: Priors | None = None,
    *,
    meanwhile: Literal["", "wait", "train"] = "",
) -> tuple[Option, ...]:
    """Return an option for every rung, in the order of `Rung`.

    ``meanwhile`` selects what the ranks do until an acquired rack comes; "": the cheaper choice.
    """
    weights, priors = weights or Weights(), priors or Priors()
    return tuple(
        _acquires(failure, view, weights, priors, meanwhile)
        if rung is Rung.ACQUIRE
        else _option(rung, failure, view, weights, priors)
        for rung in Rung
    )


def _acquires(
    failure: Failure, view: ClusterView, weights: Weights, priors: Priors, meanwhile: Literal["", "wait", "train"]
) -> Option:
    waiting = _option(Rung.ACQUIRE, failure, view, weights, priors)
    if not waiting.possible:
        return waiting
    waiting = msgspec.structs.replace(waiting, meanwhile="wait")
    if meanwhile == "wait":
        return waiting
    if why_not := _may_shrink(failure, view):
        return waiting if not meanwhile else Option(rung=Rung.ACQUIRE, why_not=why_not)
    training = _priced(Rung.ACQUIRE, _acquire_training(failure, view, priors), view, weights, priors)
    training = msgspec.structs.replace(training, meanwhile="train")
    return training if meanwhile or training.cost_gpu_s < waiting.cost_gpu_s else waiting


def _option(rung: Rung, failure: Failure, view: ClusterView, weights: Weights, priors: Priors) -> Option:
    obstacle, price = _RUNGS[rung]
    if why_not := obstacle(failure, view):
        return Option(rung=rung, why_not=why_not)
    return _priced(rung, price(failure, view, priors), view, weights, priors)


def _priced(rung: Rung, price: _Price, view: ClusterView, weights: Weights, priors: Priors) -> Option:
    seconds, unpaid_s, away_gpu_s = price
    down_s = sum(seconds.values())
    goodput = view.world_size * down_s
    paid = (view.world_size + len(view.spares)) * (down_s - unpaid_s)
    exposed = 0.0 if rung is Rung.STOP else _exposure(view, priors)
    lost = {
        "goodput_gpu_s": weights.goodput * goodput,
        "away_gpu_s": weights.goodput * away_gpu_s,
        "paid_gpu_s": weights.cost * paid,
        "exposure_gpu_s": weights.resilience * exposed,
    }
    figures = {name: value for name, value in (seconds | lost).items() if value}
    return Option(rung=rung, cost_gpu_s=sum(lost.values()), figures=figures)


def _exposure(view: ClusterView, priors: Priors) -> float:
    if view.usable_slots > view.world_size:
        return 0.0
    repair_s = _known(view.costs.repair_s, priors.repair_s)
    chance = min(1.0, view.world_size * repair_s / priors.mtbf_gpu_s)
    return chance * view.world_size * repair_s


# -- why not -----------------------------------------------------------------------------------------------------------
def _may_absorb(failure: Failure, view: ClusterView) -> str:
    if failure.ranks:
        return f"{len(failure.ranks)} ranks are lost" if len(failure.ranks) > 1 else "a rank is lost"
    return _state(view)


def _may_swap(failure: Failure, view: ClusterView) -> str:
    if view.moved:
        return f"rank {', '.join(map(str, view.moved))} moves with its group"
    if obstacle := _may_take_over(failure, view):
        return obstacle
    if view.uprooted:
        return f"no spare in the NVLink clique: rank {', '.join(map(str, view.uprooted))} would have to move too"
    return ""


def _may_move(failure: Failure, view: ClusterView) -> str:
    if not view.uprooted and not view.moved:
        return "no group has to leave its NVLink clique"
    return _may_take_over(failure, view)


def _may_take_over(failure: Failure, view: ClusterView) -> str:
    if not failure.ranks:
        return "nobody is lost"
    if obstacle := _state(view):
        return obstacle
    return "" if view.takeovers else view.why_short or "no spare is ready"


def _may_acquire(failure: Failure, view: ClusterView) -> str:
    if view.provider is None:
        return "there is no provider (--provider)"
    if not failure.ranks:
        return "nobody is lost"
    if obstacle := _state(view):
        return obstacle
    if view.takeovers:
        return "there is nothing to wait for"
    if view.obstacle:
        return view.obstacle
    if view.provider.came and view.coming < view.short:
        return f"with the rack that came {view.coming} of {view.short} workers that are missing can come"
    return view.provider.why_not


def _may_shrink(failure: Failure, view: ClusterView) -> str:
    if not failure.ranks:
        return "nobody is lost"
    return "" if view.shrink_to else view.why_no_shrink


def _may_wait(failure: Failure, view: ClusterView) -> str:
    if not failure.ranks:
        return "nobody is lost"
    if obstacle := _state(view):
        return obstacle
    if view.takeovers:
        return "there is nothing to wait for"
    if view.obstacle:
        return view.obstacle
    if max(view.start_patience_s if view.comes_by_itself else 0.0, view.repair_patience_s) > view.patience_used_s:
        return ""
    if view.comes_by_itself:
        return f"no worker was ready within {view.start_patience_s:.0f} s"
    if view.repair_patience_s:
        return f"no hardware came within {view.repair_patience_s:.0f} s"
    return f"{view.coming} of {view.short} workers that are missing can come (--wait-for-hardware is not given)"


def _may_hold(failure: Failure, view: ClusterView) -> str:
    if not failure.ranks:
        return "nobody is lost"
    if obstacle := _state(view):
        return obstacle
    return "" if _may_swap(failure, view) else "there is nothing to wait for"


def _may_restart(failure: Failure, view: ClusterView) -> str:  # noqa: ARG001
    if not view.may_begin_again:
        return "no checkpoint is on disk, and beginning again from step 0 is not allowed (--lost-state)"
    if not view.restarts_left:
        return "no restart is left (--max-restarts)"
    if view.usable_slots + view.returning_slots < view.world_size:
        return f"{view.world_size} ranks need a slot, {view.usable_slots} can be used"
    return "" if view.placeable else "the ranks' groups find no room inside NVLink cliques"


def _may_stop(failure: Failure, view: ClusterView) -> str:  # noqa: ARG001
    return ""


def _state(view: ClusterView) -> str:
    return "no copy of some state is left in memory" if view.rollback_steps is None else ""


# -- how much ----------------------------------------------------------------------------------------------------------
def _absorb(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    return _Price(
        {"regroup_s": _known(view.costs.regroup_s, priors.regroup_s), "redone_s": _redone_s(failure, view, priors)}
    )


def _swap(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    return _Price({"takeover_s": _takeover_s(view, priors), "redone_s": _redone_s(failure, view, priors)})


def _move(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    """Return the cost of a move. The ranks that move are ended first; their break and parking, about one regroup, is
    added until that is done."""
    price = _swap(failure, view, priors)
    if view.uprooted:
        price.seconds["regroup_s"] = _known(view.costs.regroup_s, priors.regroup_s)
    return price


def _acquire(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    """Return the cost of waiting until the rack has come and its workers have started."""
    if view.provider is not None and view.provider.came:
        return _wait(failure, view, priors)
    coming = {"request_s": _request_s(view, priors), "start_s": _known(view.costs.start_s, priors.start_s)}
    return _Price(coming | _swap(failure, view, priors).seconds)


def _acquire_training(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    """Return the cost of training on without the lost ranks until the rack has come or the lost hardware is repaired,
    whichever is first.

    Workers that come by themselves are not waited for.
    """
    away_s = _request_s(view, priors) + _known(view.costs.start_s, priors.start_s)
    if not view.comes_by_itself:
        away_s = min(away_s, _known(view.costs.repair_s, priors.repair_s))
    return _smaller(failure, view, priors, away_s)


def _request_s(view: ClusterView, priors: Priors) -> float:
    """Return the remaining seconds of the pending request, or the seconds of a whole one."""
    provider = view.provider
    if provider is None or provider.came:
        return 0.0
    expected_s = priors.acquire_s if provider.expected_s is None else provider.expected_s
    return max(_known(view.costs.acquire_s, expected_s) - (provider.asked_s or 0.0), 0.0)


def _shrink(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    """Return the cost of a shrink: the world is smaller until workers can join, and then all ranks stop once more to
    let them join."""
    if view.comes_by_itself:
        return _smaller(failure, view, priors, _known(view.costs.start_s, priors.start_s))
    return _smaller(failure, view, priors, _known(view.costs.repair_s, priors.repair_s))


def _smaller(failure: Failure, view: ClusterView, priors: Priors, away_s: float) -> _Price:
    regroup_s = _known(view.costs.regroup_s, priors.regroup_s)
    return _Price(
        {"regroup_s": regroup_s, "redone_s": _redone_s(failure, view, priors), "rejoin_s": _takeover_s(view, priors)},
        away_gpu_s=(view.world_size - view.shrink_to) * away_s,
    )


def _wait(failure: Failure, view: ClusterView, priors: Priors) -> _Price:
    usual_s = _known(view.costs.start_s, priors.start_s)
    if view.coming < view.short <= view.coming + view.returning_slots:
        usual_s *= 2  # an agent's start is about as long as a worker's
    elif view.coming < view.short:
        repair_s = _known(view.costs.repair_s, priors.repair_s)
        usual_s += min(repair_s, view.start_patience_s) if view.comes_by_itself else repair_s
    return _Price({"wait_s": max(usual_s - view.patience_used_s, 0.0)} | _swap(failure, view, priors).seconds)


def _restart(failure: Failure, view: ClusterView, priors: Priors) -> _Price:  # noqa: ARG001
    return _Price(_again(view, priors))


def _stop(failure: Failure, view: ClusterView, priors: Priors) -> _Price:  # noqa: ARG001
    return _Price({"relaunch_s": priors.relaunch_s} | _again(view, priors), unpaid_s=priors.relaunch_s)


def _again(view: ClusterView, priors: Priors) -> dict[str, float]:
    """Return the seconds of a restart.

    Its load time is never less than a takeover, because groups are built in a restart too, and disks are slower.
    """
    load_s = _known(view.costs.state_bytes, priors.state_bytes) / priors.load_bytes_per_s if view.checkpoint else 0.0
    step_s = _known(view.costs.step_s, priors.step_s)
    since_s = view.costs.checkpoint_age_s
    return {
        "start_s": _known(view.costs.start_s, priors.start_s),
        "load_s": max(load_s, _takeover_s(view, priors)),
        "redone_s": (view.step + 1) * step_s + step_s if since_s is None else since_s + step_s,
    }


def _takeover_s(view: ClusterView, priors: Priors) -> float:
    if view.costs.takeover_s is not None:
        return view.costs.takeover_s
    state_bytes = _known(view.costs.state_bytes, priors.state_bytes)
    copy_s = state_bytes / _known(view.costs.copy_bytes_per_s, priors.copy_bytes_per_s)
    return _known(view.costs.regroup_s, priors.regroup_s) + copy_s


def _redone_s(failure: Failure, view: ClusterView, priors: Priors) -> float:
    """Return the time to repeat the step that broke and the steps since a rollback."""
    steps = (view.rollback_steps or 0) + (0 if failure.planned else 1)
    return steps * _known(view.costs.step_s, priors.step_s)


def _known(measured: float | None, prior: float) -> float:
    return prior if measured is None else measured


_RUNGS: dict[Rung, tuple[Callable[[Failure, ClusterView], str], Callable[[Failure, ClusterView, Priors], _Price]]] = {
    Rung.ABSORB: (_may_absorb, _absorb),
    Rung.SWAP: (_may_swap, _swap),
    Rung.MOVE: (_may_move, _move),
    Rung.ACQUIRE: (_may_acquire, _acquire),
    Rung.SHRINK: (_may_shrink, _shrink),
    Rung.WAIT: (_may_wait, _wait),
    Rung.HOLD: (_may_hold, _wait),
    Rung.RESTART: (_may_restart, _restart),
    Rung.STOP: (_may_stop, _stop),
}
