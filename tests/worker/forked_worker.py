"""The life of a forked worker of a `TinyCluster`: it runs the script, counts its moments, and dies at one of them.

It says by a memory file how it ended, with hashes of what it holds then and with what the script has handed to `say`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads do not survive a fork
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import contextlib
import faulthandler
import hashlib
import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import rackrun
from rackrun.protocol import boot
from rackrun.protocol.ids import Position
from rackrun.worker.loop import elastic as _elastic  # noqa: F401 - here, not in every worker
from rackrun.worker.loop import main_entry as _main_entry  # noqa: F401
from rackrun.worker.loop.run import Run
from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.state.tracked_state import TrackedState
from tests.worker.nccl_double import install

__all__ = ["hash_of", "live", "say"]


def live(
    main: Callable[[Run], None],
    elastic: dict[str, Any],
    booted: boot.Boot,
    dies_at: int | str | None,
    hold: Position | None,
    result_fd: int,
) -> None:
    """The whole life of a forked worker."""
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        os.environ |= {
            "RANK": str(booted.rank),
            "WORLD_SIZE": str(booted.world_size),
            "LOCAL_RANK": str(booted.local_rank),
        }
        boot.install(booted)
        result: dict[str, Any] = {}
        lived = _count_moments(dies_at)
        if hold is not None:
            _wait_to_pause(hold)

        @rackrun.elastic(**elastic)
        def started(run: Run) -> None:
            main(run)
            result.update(rank=run.rank, state=_bits_of(run._state), moments=lived, said=_said)

        mode = os.environ.get("RACKRUN_NCCL_DOUBLE")
        try:
            with install(mode) if mode else contextlib.nullcontext():
                started()
        except Exception as error:  # noqa: BLE001 - told to the core
            traceback.print_exc()
            frame_ = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error)
            result["failure"] = {
                "type": f"{kind.__module__}.{kind.__qualname__}",
                "message": str(error),
                "traceback": traceback.format_exc(),
                "where": f"{frame_.filename}:{frame_.lineno}",
            }
        else:
            code = 0
        os.write(result_fd, json.dumps(result).encode())
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001 - the child ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_said: dict[str, Any] = {}


def say(**values: Any) -> None:
    """For scripts: what the test shall see of this rank (`Ended.said`). Plain data."""
    _said.update(values)


def _count_moments(dies_at: int | str | None) -> list[str]:
    lived: list[str] = []

    def note(what: str) -> None:
        lived.append(what)
        if dies_at == len(lived) - 1 or (isinstance(dies_at, str) and what.startswith(dies_at)):
            print(f"dies at moment {dies_at}: {what}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def enter_collective(
        world: WorkerMembership, *args: Any, _original: Any = WorkerMembership.enter_collective
    ) -> int | None:
        if world.scope is Scope.UNIT:
            note(f"enters a collective after {world.passed}")
        generation: int | None = _original(world, *args)
        return generation

    def pass_gate(
        world: WorkerMembership, at: Position, *more: Any, _original: Any = WorkerMembership.pass_gate
    ) -> None:
        _original(world, at, *more)
        note(f"passed the gate of {at}")

    def begin_shard(run: Run, step: Any, shard: Any, _original: Any = Run._begin_shard, **more: Any) -> None:
        _original(run, step, shard, **more)
        note(f"batch {shard} of {step}")

    def committed(units: UnitRunner, at: Position, *more: Any, _original: Any = UnitRunner._committed) -> None:
        _original(units, at, *more)
        note(f"committed {at}")

    WorkerMembership.enter_collective = enter_collective  # type: ignore[method-assign,assignment]
    WorkerMembership.pass_gate = pass_gate  # type: ignore[method-assign,assignment]
    Run._begin_shard = begin_shard  # type: ignore[method-assign,assignment]
    UnitRunner._committed = committed  # type: ignore[method-assign,assignment]
    return lived


def _wait_to_pause(hold: Position) -> None:
    """Before the unit after ``hold`` each rank waits until it has been told to pause: so short a job would be over."""

    def run(units: UnitRunner, *args: Any, _original: Any = UnitRunner.run, **more: Any) -> Any:
        while hold == units.passed and not units._world.pausing and units._world.generation == 1:
            time.sleep(0.001)  # the control thread hears of it, and tells nobody
        return _original(units, *args, **more)

    UnitRunner.run = run  # type: ignore[method-assign,assignment]


def _bits_of(state: TrackedState) -> dict[str, str]:
    """Path -> hash of every tensor, and of everything that is not a tensor."""
    tensors = {
        path: hash_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for path, tensor in state.tensors().items()
    }
    return {**tensors, "plain": hash_of(state.encode_plain())}


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
