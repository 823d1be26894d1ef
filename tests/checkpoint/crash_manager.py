"""Lives of a job with a `CheckpointManager`, its ranks on a stage (`crash_stage`)."""

from __future__ import annotations

import atexit
import contextlib
import io
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from rackrun.checkpoint import CheckpointManager
from rackrun.checkpoint.base.errors import NoUsableCheckpoint
from rackrun.checkpoint.commit import peers as peers_module
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.checkpoint.manager import manager, restoring, save_handle, saver, user_state
from rackrun.protocol import crash_points
from tests.checkpoint.crash_job import Oracle, draw, entries_with_boxes, make, script
from tests.checkpoint.crash_stage import Actor, Fate, SimFuture, SimThread, SimTime, Stage, Store, on_stage

__all__ = ["Managers", "install"]

POINTS = ("save.", "commit.", "flush.", "restore.", "close.", "arena.", "durable.", "retention.")


class Managers:
    """All lives over one folder. `install` comes first."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.oracle = Oracle(folder, self.rng)
        self.life = 0

    @staticmethod
    def points() -> list[str]:
        return [name for name in crash_points.CRASH_POINTS if name.startswith(POINTS)]

    def fate(self) -> Fate:
        rng = self.rng
        rest = rng.choice([0, rng.randint(1, 60), None])
        everyone = rng.random() < 0.3
        if rng.random() < 0.5:
            return Fate(rng.choice(self.points()), rng.randint(1, 3), everyone=everyone, rest=rest)
        return Fate(None, rng.randint(1, 500), everyone=everyone, rest=rest)

    def live(self) -> str:
        """Where fate struck; "": nowhere."""
        self.life += 1
        plan, fate, oracle = draw(self.rng, self.life), self.fate(), self.oracle
        oracle.begin(plan)
        ones: dict[Actor, CheckpointManager] = {}
        failed: list[NoUsableCheckpoint] = []

        def seen(actor: Actor, point: str) -> None:
            if point == "restore.counting" and (restored := ones[actor]._restored) is not None:
                oracle.tried[restored.number] += 1
            if point == "commit.retired" and (newest := ones[actor]._saver.newest) is not None:
                oracle.committed(newest.number)

        stage = SimThread.stage = Stage(self.rng, fate, seen)
        store = Store(stage)

        def work(rank: int, actor: Actor) -> None:
            actor.peers = Peers(store, rank, plan.world)  # type: ignore[arg-type]
            one = ones[actor] = make(plan, oracle.folder)
            one._store.files = actor.files
            actor.at_end.append(lambda: atexit.unregister(one._break_off))
            try:
                script(rank, plan, one, oracle)
            except NoUsableCheckpoint as error:
                failed.append(error)
                one.__exit__(NoUsableCheckpoint, error, None)
            except PeersGone as error:  # the script ends; what it has committed stays
                if not fate.struck:
                    raise
                one.__exit__(PeersGone, error, None)

        for rank in range(plan.world):
            stage.actor(f"rank {rank}", lambda actor, rank=rank: work(rank, actor))  # type: ignore[misc]
        crash_points.enable(stage.passes)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                stage.play()
            if failed:
                oracle.nothing_usable(failed[0])
                oracle.begin_anew()
        except BaseException as error:
            error.add_note("\n".join([*oracle.story, f"{plan}", str(vars(fate)), said.getvalue()[-2000:]]))
            raise
        finally:
            crash_points.enable(None)
        oracle.end(fate.struck)
        return fate.struck

    def mishap(self) -> str:
        return self.oracle.mishap()

    def close(self) -> None:
        """What the last stage holds is let go."""
        SimThread.stage = Stage(self.rng, Fate(None, 0))


def install(patch: pytest.MonkeyPatch) -> None:
    """The manager on the stage: its threads, futures, clock and process group."""
    on_stage(patch)
    patch.setattr(saver, "threading", SimpleNamespace(Thread=SimThread))
    patch.setattr(save_handle, "Future", SimFuture)
    patch.setattr(manager, "time", SimTime)
    patch.setattr(peers_module, "time", SimTime)
    patch.setattr(user_state, "entries_of", entries_with_boxes)
    patch.setattr(restoring, "entries_of", entries_with_boxes)

    def of_default_group(_: str) -> Peers:
        assert SimThread.stage.current is not None
        peers = SimThread.stage.current.actor.peers
        assert peers is not None
        return peers

    patch.setattr(Peers, "of_default_group", staticmethod(of_default_group))
