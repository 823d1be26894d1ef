"""A stage on which the processes of a job play, and die: one runs at a time, and who is next is drawn from a seed.

Each task is a real thread that waits for its turn, so that code under test may block anywhere; what it blocks on (a thread's
end, a future, a store) is replaced by what gives the turn away. An actor is a process: its tasks, and what the kernel closes
when it dies. A dead actor's tasks end before anyone else goes on, and every call that they still make is one too many.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rackrun.checkpoint.arena import arena_file
from rackrun.checkpoint.arena.arena_file import ArenaFile
from rackrun.checkpoint.base import process_identity
from rackrun.checkpoint.commit.peers import Peers
from tests.checkpoint.storage import Hooked

__all__ = ["Actor", "Fate", "Killed", "SimFuture", "SimThread", "SimTime", "Stage", "Store", "on_stage"]

SWITCH = 0.15
"""How often the turn goes to somebody else, at a point where it may."""


class Killed(BaseException):
    """The process is dead."""


class Fate:
    """Strikes when ``name`` (None: anything) is passed for the n-th time, at ``victims``: one, or all. The others are ended
    ``rest`` points later, as torchrun does, or never (None)."""

    def __init__(self, name: str | None, nth: int, *, everyone: bool = False, rest: int | None = 0) -> None:
        self.name, self.left, self.everyone, self.rest = name, nth, everyone, rest
        self.struck = ""
        self.at = ""
        """The last point that was passed."""

    def strikes(self, what: str) -> bool:
        self.at = what
        if not self.struck and self.name in (None, what):
            self.left -= 1
            if self.left == 0:
                self.struck = what
                return True
        return False

    def ends_the_rest(self) -> bool:
        if self.struck and self.rest is not None:
            self.rest -= 1
            return self.rest < 0
        return False


class Actor:
    """One process."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.name = stage, name
        self.dead = False
        self.files = _Files(self)
        self.arenas: list[ArenaFile] = []
        self.fds: set[int] = set()
        self.sessions: set[int] = set()
        self.peers: Peers | None = None
        self.at_end: list[Callable[[], object]] = []

    def bury(self) -> None:
        """What the kernel does."""
        for file in self.arenas:
            file.close()
        for fd in self.fds:
            os.close(fd)
        for session in self.sessions:
            process_identity._sessions.discard(session)
        for last in self.at_end:
            last()
        for left in (self.arenas, self.fds, self.sessions, self.at_end):
            left.clear()


class _Files(Hooked):
    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        actor = self.actor
        if operation == "close":
            actor.fds.discard(args[0])
            return real(*args)
        try:
            actor.stage.passes(operation)
        except Killed:
            if operation == "write" and actor.stage.just_struck:
                real(args[0], args[1][: len(args[1]) // 2])
            raise
        found = real(*args)
        if operation == "open":
            actor.fds.add(found)
        return found


class Task:
    def __init__(self, actor: Actor, work: Callable[[], object]) -> None:
        self.actor, self._work = actor, work
        self.turn = threading.Semaphore(0)
        self.done = False
        self.ready: Callable[[], bool] = lambda: True
        self.deadline: float | None = None
        self.thread = threading.Thread(target=self._run, name=f"stage-{actor.name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        stage = self.actor.stage
        try:
            if not self.actor.dead:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the play was begun
            stage.error = stage.error or error
            for actor in stage.actors:
                actor.dead = True
        self.done = True
        stage.tasks.remove(self)
        if self.actor.dead and not any(task.actor is self.actor for task in stage.tasks):
            self.actor.bury()
        stage.give_away(None)


class Stage:
    def __init__(self, rng: random.Random, fate: Fate, seen: Callable[[Actor, str], object] = lambda *_: None) -> None:
        self.rng, self.fate, self._seen = rng, fate, seen
        self.now = 0.0
        self.tasks: list[Task] = []
        self.actors: list[Actor] = []
        self.current: Task | None = None
        self.just_struck = False
        self.error: BaseException | None = None
        self._curtain = threading.Semaphore(0)

    def actor(self, name: str, work: Callable[[Actor], object]) -> Actor:
        made = Actor(self, name)
        self.actors.append(made)
        self.tasks.append(Task(made, lambda: work(made)))
        return made

    def spawn(self, work: Callable[[], object]) -> Task:
        """A thread of the actor whose turn it is."""
        assert self.current is not None
        task = Task(self.current.actor, work)
        self.tasks.append(task)
        return task

    def play(self) -> None:
        """Until nobody has anything to do. Raises what an actor raised."""
        self.give_away(None)
        self._curtain.acquire()
        if self.error is not None:
            raise self.error

    # -- what tasks call
    def passes(self, what: str) -> None:
        """The task whose turn it is comes to a point: it may die here, or others, or others may go on."""
        assert self.current is not None, what
        actor = self.current.actor
        self.just_struck = False
        if actor.dead:
            raise Killed
        self._seen(actor, what)
        if self.fate.strikes(what):
            self.just_struck = True
            self.kill([one for one in self.actors if self.fate.everyone or one is actor])
        elif self.fate.ends_the_rest():
            self.kill(self.actors)
        if actor.dead:
            raise Killed
        if not what.startswith("arena.") and self.rng.random() < SWITCH:  # locks may be held there
            self.block(lambda: True)

    def kill(self, actors: list[Actor]) -> None:
        for actor in actors:
            actor.dead = True

    def block(self, ready: Callable[[], bool], deadline: float | None = None) -> bool:
        """Let others go on until ``ready``. False: the deadline came first."""
        task = self.current
        assert task is not None
        if task.actor.dead:
            raise Killed
        task.ready, task.deadline = ready, deadline
        self.give_away(task)
        if task.actor.dead:
            raise Killed
        return task.ready()

    def give_away(self, mine: Task | None) -> None:
        chosen = self._choose()
        if chosen is mine and mine is not None:
            return
        self.current = chosen
        (chosen.turn if chosen is not None else self._curtain).release()
        if mine is not None:
            mine.turn.acquire()

    def _choose(self) -> Task | None:
        for task in self.tasks:
            if task.actor.dead:
                return task
        able = [task for task in self.tasks if task.ready()]
        if able:
            return self.rng.choice(able)
        waiting = [task for task in self.tasks if task.deadline is not None]
        if waiting:  # nothing happens any more: time goes by
            self.now = max(self.now, min(task.deadline for task in waiting if task.deadline is not None)) + 1000.0
            return self.rng.choice(waiting)
        if self.tasks:
            self.error = self.error or AssertionError(f"stuck: {[task.actor.name for task in self.tasks]}")
            self.kill(self.actors)
            return self._choose()
        return None


# -- what takes the place of threads, futures, time and the store


class SimThread:
    stage: Stage

    def __init__(self, target: Callable[[], object], name: str = "", daemon: bool = True) -> None:
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self.stage.spawn(self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        self.stage.block(lambda: not self.is_alive(), None if timeout is None else self.stage.now + timeout)


class SimFuture(Future):  # type: ignore[type-arg]
    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            SimThread.stage.block(self.done)
        return super().result(0)


class SimTime:
    """Takes the place of the module ``time``."""

    @staticmethod
    def monotonic() -> float:
        return SimThread.stage.now

    time = monotonic

    @staticmethod
    def time_ns() -> int:
        return 0

    @staticmethod
    def sleep(seconds: float) -> None:
        SimThread.stage.block(lambda: False, SimThread.stage.now + seconds)


class Store:
    """The store of one start's process group."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._said: dict[str, bytes] = {}

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        self._stage.passes("store.set")
        self._said[key] = value.encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._stage.passes("store.wait")
        deadline = self._stage.now + timeout.total_seconds()
        if not self._stage.block(lambda: all(key in self._said for key in keys), deadline):
            raise dist.DistStoreError("wait timeout")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._said[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        return self._said.pop(key, None) is not None


class _Sessions(set[int]):
    """Whose each is."""

    def add(self, session: int) -> None:
        super().add(session)
        if SimThread.stage.current is not None:
            SimThread.stage.current.actor.sessions.add(session)


def on_stage(patch: pytest.MonkeyPatch) -> None:
    """Sessions and arena files of whoever makes them end with it; waits give the turn away."""
    real = ArenaFile.__init__

    def made(self: ArenaFile, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        if SimThread.stage.current is not None:
            SimThread.stage.current.actor.arenas.append(self)

    patch.setattr(ArenaFile, "__init__", made)
    patch.setattr(process_identity, "_sessions", _Sessions())
    patch.setattr(arena_file, "time", SimTime)
