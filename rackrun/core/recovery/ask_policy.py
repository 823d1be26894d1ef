"""Decision by the rules or by the user's function, which is asked by a command and answers by an event.

The answer is an event like any other, so it is in the journal, and a replay of the same events gives the same
decisions. It holds for the situation that was asked about. If that changes, the function is asked again, and an older
answer is ignored. If there is no answer, or it is invalid or impossible, the default decides, and a notice says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from rackrun.core.generation.outbox import Outbox
from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.core.policy.choice import choose, one_line, refusal, settled
from rackrun.core.policy.rungs import options
from rackrun.protocol.commands import AskPolicy, Decided, Notice, SetTimer
from rackrun.protocol.events import PolicyAnswered
from rackrun.protocol.policy_types import ClusterView, Decision, Failure, FailureCause, Rung
from rackrun.protocol.timers import PolicyOver, RepairOver

__all__ = ["ANSWER_MS", "DecisionMaker"]

ANSWER_MS = 5_000
"""Milliseconds after which the core gives up waiting for an answer. The coordinator ends a function after one second
(two, if it was still busy with an older question); this limit is for the case that no answer comes at all."""

_Situation: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class DecisionMaker:
    """Asks the user's function, if there is one, and reports decisions."""

    policy: ActivePolicy
    out: Outbox
    _question: int = 0
    _asked: _Situation = ()
    _open: bool = False
    _answer: Decision | None = None
    """The answer to the latest question; None: the default decides."""
    _decided: _Situation = field(default=())

    def decide(self, failure: Failure, view: ClusterView, at_ms: int) -> Decision | None:
        """Return the decision; None while an answer is awaited. The user's function is not asked about the script's own
        errors."""
        decision = choose(failure, view, self.policy.rules, self.policy.weights)
        if self.policy.function and failure.whose is not FailureCause.USER:
            situation = _situation(failure, view)
            if situation != self._asked:
                self._ask(situation, failure, view, at_ms)
            if self._open:
                return None
            decision = self._hear(failure, view) or decision
        self._tell(failure, view, decision, at_ms)
        return decision

    @property
    def asks(self) -> bool:
        """Whether an answer is still awaited."""
        return self._open

    def answered(self, event: PolicyAnswered) -> bool:
        """Take an answer; return whether it was awaited."""
        if not self._open or event.question != self._question:
            return False
        self._open = False
        self._answer = event.decision
        if event.trouble:
            self._answer = None
            self._complain(event.trouble)
        return True

    def overdue(self, question: int) -> bool:
        """End the wait for the policy function's answer to ``question``: the default decides, and a notice says so.

        Return False, with no effect, if that answer is no longer awaited.
        """
        return self.answered(PolicyAnswered(question=question, trouble=f"gave no answer within {ANSWER_MS} ms"))

    def forget(self) -> None:
        """Forget the answer, so that the function is asked again."""
        self._asked, self._decided, self._open = (), (), False

    def _ask(self, situation: _Situation, failure: Failure, view: ClusterView, at_ms: int) -> None:
        self._asked, self._open, self._answer = situation, True, None
        self._question += 1
        self.out.emit(AskPolicy(question=self._question, function=self.policy.function, failure=failure, view=view))
        self.out.emit(SetTimer(timer=PolicyOver(self._question), at_ms=at_ms + ANSWER_MS))

    def _hear(self, failure: Failure, view: ClusterView) -> Decision | None:
        if self._answer is None:
            return None
        if why_not := refusal(self._answer, failure, view):
            self._complain(f"asks for what cannot be: {why_not}")
            self._answer = None
            return None
        return settled(self._answer, failure, view, self.policy.weights)

    def _complain(self, what: str) -> None:
        self.out.emit(Notice(text=f"the policy {self.policy.function} {one_line(what)}; the default decides"))

    def _tell(self, failure: Failure, view: ClusterView, decision: Decision, at_ms: int) -> None:
        """Emit `Decided` if the decision has changed since the last call. If the user's function set a deadline for
        waiting, set a timer that asks it again."""
        answer = self._question if decision.by == "user" else 0
        decided = (view.generation, failure.ranks, decision.rung, answer, *sorted(decision.targets.items()))
        if decided != self._decided:
            self._decided = decided
            self.out.emit(Decided(generation=view.generation, failure=failure, decision=decision))
            stands_still = decision.rung is Rung.WAIT or decision.meanwhile == "wait"
            if decision.by == "user" and stands_still:
                due_ms = at_ms + math.ceil(decision.deadline_s * 1e3)
                self.out.emit(SetTimer(timer=RepairOver(view.generation), at_ms=due_ms))


def _situation(failure: Failure, view: ClusterView) -> _Situation:
    """Return a value that is equal as long as the question and the possible answers stay the same."""
    possible = tuple(one.rung for one in options(failure, view) if one.possible and one.rung is not Rung.STOP)
    takeovers = (*sorted(view.takeovers.items()), *sorted(view.uprooted.items()))
    return (view.generation, failure.ranks, failure.what, view.short, view.rollback_steps, *possible, *takeovers)
