"""Faults that strike from inside a worker, at an exact place of its script or of rackrun itself.

A worker passes named *places*; a fault (`Fault`) names one, and what must hold there. It is claimed by making its mark, a
file, with O_EXCL: so it strikes once, whoever passes the place later, in whichever incarnation. Faults come in
``RACKRUN_TEST_FAULTS`` (JSON), marks lie in ``RACKRUN_TEST_MARKS``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rackrun.chaos.faults.crash_points import FUNCTIONS, surround

if TYPE_CHECKING:
    import rackrun

__all__ = ["ANYONE", "CLOCK", "IN_COLLECTIVE", "IN_GATE", "Fault", "Striker", "faults_to_json"]

ANYONE = -1
CLOCK = "clock"
"""No place of the script: a thread strikes, ``delay_ms`` after the fault named by ``after`` did."""
IN_COLLECTIVE, IN_GATE = "in a collective", "in the gate's collective"
"""While the main thread waits for its peers: have one of them ``wait`` for this fault's mark, or nobody may be waited for."""
PLACES_INSIDE = {name: path for name, path in FUNCTIONS.items() if path.startswith("worker.")}
"""Functions of rackrun.worker with two places each: ``before NAME``, ``after NAME``."""
WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    """Of its mark."""
    place: str
    rank: int | None
    """Who, by its rank at that moment; `ANYONE`: whoever comes first. None: a spare that waits."""
    step: int | None = None
    """The step in hand; between units, the last committed one."""
    after: str = ""
    """Not before the fault of this name has struck, or what ``until`` may name is in the journal."""
    delay_ms: float = 0.0
    then: str = "KILL"
    """``KILL``, ``STOP``; ``AGENT``, ``LAUNCHER``: kill that instead; ``CUT``: its connections break, it lives on; ``sleep``: for ``delay_ms``; ``slow``: so again whenever this process
    passes here; ``wait``: until ``until``
    has struck, and for ``delay_ms``; ``mark``: nothing, for others to come after; ``GPU``: the driver says ``gpu`` of its GPU from
    now on, and it hangs until ``until``; ``ASK``: the coordinator is asked ``ask``, and it hangs until ``until``; ``LEAVE``: its agent is told
    to leave; ``FLIP``: a bit of its state is another, in ``tensor``."""
    until: str = ""
    """A fault's name, or ``command NAME``, ``event NAME``: the coordinator has written that into its journal since. Or ``command NAME 3``,
    ``answer done 2``: so many of them are there, from the beginning."""
    ask: dict[str, str | int] = dataclasses.field(default_factory=dict)
    """``what`` (``drain``, ...), and the fields of the request; ``TRAY`` stands for one's own."""
    tensor: str = ""
    """A part of its path."""
    gpu: dict[str, int | dict[str, int]] = dataclasses.field(default_factory=dict)
    """As `FakeTray.put` has it, and ``xid``: one that it reports."""


def faults_to_json(faults: list[Fault]) -> str:
    return json.dumps([dataclasses.asdict(fault) for fault in faults])


class Striker:
    """``here(place)`` in the script; the places inside rackrun are patched in."""

    def __init__(self, run: rackrun.Run) -> None:
        self._units, self._world = run._units, run._world
        self._faults = [Fault(**fault) for fault in json.loads(os.environ.get("RACKRUN_TEST_FAULTS", "[]"))]
        self._marks = Path(os.environ.get("RACKRUN_TEST_MARKS", "."))
        self._in_gate = False
        self._slow: list[Fault] = []
        if not self._faults:
            return
        wanted = {fault.place for fault in self._faults}
        for name, path in PLACES_INSIDE.items():
            if wanted & {f"before {name}", f"after {name}"}:
                surround(
                    path,
                    functools.partial(self.here, f"before {name}"),
                    functools.partial(self.here, f"after {name}"),
                )
        if wanted & {"entering a collective", IN_COLLECTIVE, IN_GATE, "gate entered", "gate reduced"}:
            self._patch_collectives()
        if "snapshot half written" in wanted:
            self._patch_snapshots()
        for fault in self._faults:
            if fault.place == CLOCK:
                threading.Thread(target=self._on_the_clock, args=[fault], daemon=True).start()

    def here(self, place: str) -> None:
        for fault in self._faults:
            if fault.place == place and self._is_met(fault) and self._claim(fault):
                self._strike(fault)
                self._slow += [fault] if fault.then == "slow" else []
        for fault in self._slow:
            if fault.place == place:
                time.sleep(fault.delay_ms / 1e3)

    # -- when
    def _is_met(self, fault: Fault) -> bool:
        units, world = self._units, self._world
        spare = units.waiting_spare and world.machine.plan is None
        if (fault.rank is None) is not spare or fault.rank not in {None, ANYONE, world.rank}:
            return False
        step = units.step_in_hand._at.step if units.step_in_hand is not None else world.passed.step
        return fault.step in {None, step} and (not fault.after or self._has_struck(fault.after))

    def _has_struck(self, name: str) -> bool:
        return self._journalled(name) > 0 or (self._marks / name).exists()

    def _claim(self, fault: Fault) -> bool:
        passed = self._world.passed
        told = {"wall": time.time(), "rank": self._world.rank, "passed": [passed.step, passed.phase]}
        try:
            fd = os.open(self._marks / fault.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(fd, json.dumps(told).encode())
        os.close(fd)
        return True

    # -- what
    def _strike(self, fault: Fault) -> None:  # noqa: PLR0912 - one line for each fault
        match fault.then:
            case "KILL" | "STOP":
                os.kill(os.getpid(), signal.SIGKILL if fault.then == "KILL" else signal.SIGSTOP)
                time.sleep(WAIT_S)  # another thread may run on for a moment; this one does not
            case "AGENT" | "LAUNCHER":
                agent = _parent(os.getppid())  # a worker's parent is its agent's fork server
                os.kill(agent if fault.then == "AGENT" else _parent(agent), signal.SIGKILL)
            case "AGENT AND HOLDER":
                own, launcher = _parent(os.getppid()), _parent(_parent(os.getppid()))
                agents = sorted(
                    _children(launcher)
                )  # started in the order of their trays; the next one holds our copies
                for agent in (agents[agents.index(own) + 1], own):
                    os.kill(agent, signal.SIGKILL)
            case "TERM":
                os.kill(_parent(_parent(os.getppid())), signal.SIGTERM)  # the launcher
            case "CUT":
                for group in self._world.groups:
                    if group.communicator is not None:
                        group.communicator.break_()
            case "sleep":
                time.sleep(fault.delay_ms / 1e3)
            case "wait":
                _wait_for(lambda: self._has_struck(fault.until))
                time.sleep(fault.delay_ms / 1e3)
            case "GPU":
                before = self._journalled(fault.until)
                self._break_gpu(fault.gpu)
                _wait_for(lambda: bool(fault.until) and self._journalled(fault.until) > before)
            case "ASK":
                before = self._journalled(fault.until)
                self._ask(fault.ask)
                _wait_for(lambda: self._journalled(fault.until) > before)
            case "LEAVE":
                os.kill(_parent(os.getppid()), signal.SIGTERM)
            case "FLIP":
                self._flip(fault.tensor)
            case "mark" | "slow":
                pass
            case other:
                raise ValueError(f"no such fault: {other}")

    def _flip(self, path: str) -> None:
        """One bit, unseen: no version is counted up."""
        tensor = next(tensor for name, tensor in self._units._state.tensors().items() if path in name)
        tensor.data.view(dtype=torch.int32).view(-1)[0] ^= 1 << 20

    def _break_gpu(self, changes: dict[str, int | dict[str, int]]) -> None:
        from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack

        name, _, index = self._units._runtime.boot.slot.partition("/")  # type: ignore[union-attr]
        tray = FakeRack.open(Path(os.environ["FAKE_NVML_STATE"])).tray(name)
        tray.put(int(index), {name: value for name, value in changes.items() if name != "xid"})
        if "xid" in changes:
            tray.xid(int(index), changes["xid"])  # type: ignore[arg-type]

    def _ask(self, ask: dict[str, str | int]) -> None:
        tray = self._units._runtime.boot.slot.partition("/")[0]  # type: ignore[union-attr]
        fields = {name: tray if value == "TRAY" else value for name, value in ask.items() if name != "what"}
        place = Path(os.environ["RACKRUN_TEST_JOURNAL"]).parent
        url, token = json.loads((place / "endpoint.json").read_text())["url"], (place / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = json.dumps(fields).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/api/{ask['what']}", data=data, headers=headers), timeout=WAIT_S
        ) as answer:
            assert answer.status == 200

    def _journalled(self, what: str) -> int:
        """How often ``command NAME`` or ``event NAME`` is in the journal; with a number: 1, if that often."""
        kind, _, name = what.partition(" ")
        name, _, least = name.partition(" ")
        if kind not in ("command", "event", "answer"):
            return 0
        if kind == "answer":
            with contextlib.closing(sqlite3.connect(os.environ["RACKRUN_TEST_JOURNAL"], timeout=5.0)) as journal:
                query = "SELECT count(*) FROM events WHERE name = 'Answer' AND json_extract(body, '$.outcome') = ?"
                return int(journal.execute(query, (name,)).fetchone()[0] >= int(least or 1))
        with contextlib.closing(sqlite3.connect(os.environ["RACKRUN_TEST_JOURNAL"], timeout=5.0)) as journal:
            query = "SELECT count(*) FROM events WHERE kind = ? AND name = ?"
            found = int(journal.execute(query, (kind, name)).fetchone()[0])
        return int(found >= int(least)) if least else found

    def _on_the_clock(self, fault: Fault) -> None:
        while not self._has_struck(fault.name):
            if not self._has_struck(fault.after):
                time.sleep(0.02 if " " in fault.after else 0.001)  # a journal is opened to look
                continue
            time.sleep(fault.delay_ms / 1e3)
            if self._is_met(fault) and self._claim(fault):
                self._strike(fault)
                return
            time.sleep(0.001)

    # -- places inside rackrun
    def _patch_collectives(self) -> None:
        from rackrun.worker.membership import collective_work
        from rackrun.worker.membership import elastic_group as group
        from rackrun.worker.membership import worker_membership as world

        run, pass_gate, sum_on_host = (
            group.ElasticGroup._run,
            world.WorkerMembership.pass_gate,
            group.ElasticGroup.sum_on_host,
        )

        def patched_run(*args: Any, **more: Any) -> Any:
            if not self._in_gate:
                self.here("entering a collective")
            work = run(*args, **more)
            if isinstance(work, collective_work.GuardedWork):
                self._strike_soon(IN_GATE if self._in_gate else IN_COLLECTIVE)
            return work

        def patched_pass_gate(*args: Any, **more: Any) -> None:
            self._in_gate = True
            try:
                pass_gate(*args, **more)
            finally:
                self._in_gate = False

        def patched_sum_on_host(*args: Any, **more: Any) -> None:
            if self._in_gate:
                self.here("gate entered")
            sum_on_host(*args, **more)
            if self._in_gate:
                self.here("gate reduced")

        group.ElasticGroup._run = patched_run  # type: ignore[method-assign]
        world.WorkerMembership.pass_gate = patched_pass_gate  # type: ignore[method-assign]
        group.ElasticGroup.sum_on_host = patched_sum_on_host  # type: ignore[method-assign]

    def _patch_snapshots(self) -> None:
        """After its head and what may change next; its other tensors and the seal are to come."""
        from rackrun.checkpoint.image.host_copies import ImageCopy
        from rackrun.worker.snapshots import shard_snapshots

        image_copy = ImageCopy

        def patched(*args: Any) -> Any:
            begun = image_copy(*args)
            self.here("snapshot half written")
            return begun

        shard_snapshots.ImageCopy = patched  # type: ignore[attr-defined,assignment]  # its import, replaced

    def _strike_soon(self, place: str) -> None:
        """From another thread, when this one waits in the collective that it has just entered."""
        due = [fault for fault in self._faults if fault.place == place and self._is_met(fault)]

        def strike() -> None:
            time.sleep(0.02)
            for fault in due:
                if self._claim(fault):
                    self._strike(fault)

        if due:
            threading.Thread(target=strike, daemon=True).start()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
