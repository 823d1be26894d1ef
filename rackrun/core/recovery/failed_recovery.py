"""Stopping the job when a recovery fails, with the reason and what the reader can do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.world import World
from rackrun.core.members.rack import RackMachine
from rackrun.core.recovery.view_builder import DecisionInputs
from rackrun.protocol.ids import Position, at_step
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import ClusterView, Decision, Failure, FailureCause, Rung

__all__ = ["FailedRecovery"]


@dataclass(slots=True)
class FailedRecovery:
    """Stops the job when a recovery cannot go on."""

    config: JobConfig
    world: World
    rack: RackMachine
    end: JobEnd

    def decided(self, prospect: DecisionInputs, decision: Decision, failure: Failure, view: ClusterView) -> None:
        """Stop because no other rung is possible, or the rules or the user's function do not want another."""
        rungs = [one.rung for one in decision.options if one.possible and not one.rung.only_by_name]
        others = [rung for rung in rungs if rung is not Rung.STOP]
        if failure.whose is FailureCause.USER:
            self._stop(
                f"the same step was done again {view.absorbs} times and failed again: {failure.what}",
                remedy="look for a collective that not every rank enters, or for a broken fabric (rackctl report).",
            )
        elif others:
            allowed = ", ".join(rung.value for rung in others)
            remedy = f"allow {allowed} (--policy)." if len(others) == 1 else f"allow one of {allowed} (--policy)."
            self._stop(f"{failure.what}; {decision.reason}", remedy=remedy)
        elif prospect.state is None:
            self._stop(
                self.no_copy_left(failure.what, prospect.committed),
                remedy="keep checkpoints on disk (--checkpoint-dir), or let it begin again from step 0 (--lost-state restart).",
            )
        elif view.comes_by_itself:
            self.not_in_time(failure.what)
        else:
            remedy = (
                "hold back spares in every NVLink domain (--spares), or let their group go on over the network "
                "(--cross-clique)."
                if prospect.enough
                else "hold back more spares (--spares), start with more trays, or wait for one (--wait-for-hardware)."
            )
            self._stop(f"{failure.what}: {view.why_short}", remedy=remedy)

    def not_in_time(self, told: str) -> None:
        """Stop because the lost ranks could not be replaced within `JobConfig.join_timeout_ms`."""
        lost, ready, unfit = self.world.lost(), len(self.rack.ready_spares()), self.rack.unfit()
        counted = f"{len(lost)} ranks to replace, {ready} spares are ready"
        self._stop(
            f"generation {self.world.generation} was not recovered within {self.config.join_timeout_ms} ms: "
            f"{told}; {counted}{f'; not fit: {unfit}' if unfit else ''}",
            remedy="repair the GPUs that are not fit, or start more trays."
            if unfit
            else "look at the output of the spares; raise join_timeout_ms if a start takes longer.",
        )

    def no_progress(self, told: Sequence[str]) -> None:
        """Stop after too many recoveries without a committed step. ``told`` lists their reasons."""
        self._stop(
            f"{self.config.no_progress_max} recoveries without one committed step: {'; '.join(dict.fromkeys(told))}",
            remedy="look at these ranks' output and at the health of their devices.",
        )

    def _stop(self, because: str, *, remedy: str) -> None:
        """Stop the job. If somebody has asked for a stop before, this is it, with that request's exit code."""
        asked = self.world.stopping
        if asked is None:
            self.end.stop(3, because, remedy=remedy)
        else:
            self.end.stop(asked.exit_code, f"{asked.because}; no step boundary came: {because}")

    def no_copy_left(self, told: str, committed: Position) -> str:
        """Return the reason text for a stop, or a restart, because no copy of some state is left."""
        if self.world.stateful():
            told += f" {at_step(committed.step)}"
        if self.world.unsure:
            return f"{told}; nobody can say which state in memory is right, and no snapshot of a good one is left"
        return f"{told}, and no copy of its state is left"
