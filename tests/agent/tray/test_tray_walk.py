"""A tray's machine is told facts in any order: its invariants hold, and every worker comes to its end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rackrun.agent.tray import tray_facts as t
from rackrun.agent.tray.tray_machine import TrayMachine
from rackrun.protocol.commands import FenceWorker, ReleaseWorkers, Worker, WorkerCommand
from rackrun.protocol.events import WorkerReady
from tests.agent.tray.test_tray_machine import GRACE_S, TRAY, committed, plan, said_exit, start, worker


class Walk:
    """A tray with the processes that the machine asks for, told of what can happen to them in any order."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.machine = TrayMachine(TRAY, GRACE_S)
        self.now_s = 0.0
        self.newest = 0
        self.admitted: dict[Worker, None] = {}
        self.finding: dict[Worker, None] = {}
        self.forking: dict[Worker, bool] = {}
        """Whether it is killed when it exists."""
        self.living: dict[Worker, bool] = {}
        """Whether it was killed."""
        self.reported: dict[Worker, int] = {}
        self.buried: dict[Worker, None] = {}
        self.deadlines: list[tuple[float, t.TrayDeadline]] = []
        self.emptied = 0
        self.stopped = False

    def tell(self, fact: t.TrayFact) -> None:
        for effect in self.machine.handle(fact, self.now_s):
            self.carry_out(effect)

    def carry_out(self, effect: t.TrayEffect) -> None:
        match effect:
            case t.AdmitWorker(command=command):
                at = Worker(command.slot, command.incarnation)
                assert at not in self.admitted, "admitted twice"
                self.admitted[at] = None
            case t.FindStore(command=command):
                at = Worker(command.slot, command.incarnation)
                busy = self.forking.keys() | self.living.keys() | self.finding.keys()
                assert not [one for one in busy if one.slot == at.slot], "two processes in a slot"
                assert at not in self.buried
                self.finding[at] = None
            case t.ForkWorker(command=command):
                at = Worker(command.slot, command.incarnation)
                assert at not in self.buried
                self.forking[at] = False
            case t.KillWorker(worker=at) | t.TerminateWorker(worker=at):
                if at in self.forking:
                    self.forking[at] = True
                else:
                    assert at in self.living, "a signal to nobody"
                    self.living[at] = True
            case t.ReportExit(worker=at):
                assert at in self.admitted
                assert at not in self.buried, "reported after it was buried"
                self.reported[at] = self.reported.get(at, 0) + 1
            case t.BuryWorker(worker=at):
                assert at not in self.buried, "buried twice"
                assert at not in self.living, "buried alive"
                self.buried[at] = None
                self.finding.pop(at, None)
                self.forking.pop(at, None)
            case t.ForgetWorker(worker=at):
                assert at in self.buried, "forgotten before it was gone"
            case t.PassOn(workers=workers):
                assert not self.buried.keys() & set(workers), "a message to the dead"
            case t.SetDeadline(deadline=deadline, at_s=at_s):
                assert at_s > self.now_s
                self.deadlines.append((at_s, deadline))
            case t.Emptied():
                self.emptied += 1
            case t.Forward() | t.SendEvent() | t.SpareWaits() | t.SpareLeaves() | t.PrintLine() | t.Leave():
                pass

    def step(self) -> None:
        self.now_s += self.draw.random()
        due = [deadline for at_s, deadline in self.deadlines if at_s <= self.now_s]
        self.deadlines = [(at_s, deadline) for at_s, deadline in self.deadlines if at_s > self.now_s]
        for deadline in due:
            self.tell(t.DeadlinePassed(deadline))
        what = self.draw.choice([self.order, self.order, self.answer, self.answer, self.die, self.say, self.odd])
        what()

    def order(self) -> None:
        self.newest += 1
        index = self.draw.randrange(2)
        any_ = worker(self.draw.randint(1, self.newest), index)
        commands: list[WorkerCommand] = [
            start(self.newest, index, spare=self.draw.random() < 0.5),
            start(any_.incarnation, index),
            FenceWorker(slot=any_.slot, incarnation=any_.incarnation, because="a test"),
            plan(*(worker(one, index) for one in range(1, self.newest))),
            ReleaseWorkers(workers=(any_,)),
        ]
        self.tell(t.CommandArrived(self.draw.choice(commands)))

    def answer(self) -> None:
        """What was asked for is answered, or fails."""
        fails = self.draw.random() < 0.2
        if self.finding and self.draw.random() < 0.5:
            at = self.draw.choice([*self.finding])
            del self.finding[at]
            self.tell(t.WorkerStartFailed(at, "no store") if fails else t.StoreFound(at))
        elif self.forking:
            at = self.draw.choice([*self.forking])
            killed = self.forking.pop(at)
            if not fails:
                self.living[at] = killed
            self.tell(t.WorkerStartFailed(at, "no memory") if fails else t.WorkerBorn(at))

    def die(self) -> None:
        if self.living:
            at = self.draw.choice([*self.living])
            if self.draw.random() < 0.5:
                self.tell(t.EndSeen(at, None, 11))
            del self.living[at]
            self.tell(t.ProcessReaped(at, None, 9, self.draw.random() < 0.5))

    def say(self) -> None:
        if self.living:
            at = self.draw.choice([*self.living])
            of: dict[str, Any] = {"slot": at.slot, "incarnation": at.incarnation}
            says = self.draw.choice([WorkerReady(**of), committed(at), said_exit(at).message])
            self.tell(t.WorkerSaid(at, says) if self.draw.random() < 0.9 else t.WorkerGarbled(at, "no message"))

    def odd(self) -> None:
        if self.draw.random() < 0.2:
            self.forking.clear()
            self.tell(t.ForkServerDied())
        elif self.draw.random() < 0.05 and len(self.admitted) > 4 and not self.stopped:
            self.stop()

    def stop(self) -> None:
        self.stopped = True
        self.tell(t.StopBegun(self.draw.random() < 0.5))

    def end(self) -> None:
        """Stop, and let everybody who was killed end."""
        if not self.stopped:
            self.stop()
        self.now_s += 20.0
        self.tell(t.DeadlinePassed(t.StopGraceOver()))
        for at, killed in {**self.living, **self.forking}.items():
            assert killed, f"{at} was not killed"
            if at in self.forking:
                del self.forking[at]
                self.tell(t.WorkerBorn(at))
            self.living.pop(at, None)
            self.tell(t.ProcessReaped(at, None, 9, False))


@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_of_facts_a_slot_has_one_process_and_every_worker_is_reported_once(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(150):
        walk.step()
    walk.end()
    assert walk.admitted, "nothing was started"
    assert walk.reported == dict.fromkeys(walk.admitted, 1), "not reported, or more than once"
    assert walk.buried == walk.admitted
    assert walk.emptied == 1
