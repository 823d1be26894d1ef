"""The build of the newest plan's communicators: begun when the plan is here, awaited by the main thread, reported when
it fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rackrun.link.exchange import ExchangeUnreachable
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import WorkerUnbuilt
from rackrun.protocol.ids import BEGIN, Incarnation, SlotId
from rackrun.worker.communicators.communicator import OWN_FAULTS
from rackrun.worker.communicators.handshakes import Handshakes
from rackrun.worker.device.device_queue import DeviceQueue
from rackrun.worker.membership.communicator_builder import Builder
from rackrun.worker.membership.decisions.interruptions import Superseded
from rackrun.worker.membership.decisions.membership_machine import MembershipMachine

if TYPE_CHECKING:
    from rackrun.worker.communicators.communicator import Communicator
    from rackrun.worker.membership.elastic_group import ElasticGroup

__all__ = ["GenerationBuild"]


class GenerationBuild:
    """Builds the communicators of a plan. A newer plan's build replaces it.

    ``changed`` guards ``machine``; it is notified when a build is over, too. Methods are called without its lock unless
    they say so.
    """

    def __init__(
        self,
        slot: SlotId,
        incarnation: Incarnation,
        token: str,
        device: torch.device,
        queue: DeviceQueue,
        machine: MembershipMachine,
        changed: threading.Condition,
    ) -> None:
        self.builder: Builder | None = None
        """Of the newest plan whose build has begun; None before the first, and since ``main`` was left."""
        self.handshakes = Handshakes()
        self._slot, self._incarnation, self._token = slot, incarnation, token
        self._device, self._queue, self._machine, self._changed = device, queue, machine, changed
        self._unbuilt: WorkerUnbuilt | None = None

    def start(self, plan: GenerationPlan, groups: Sequence[ElasticGroup]) -> None:
        """Start to build ``groups`` for ``plan``. To be called under the lock."""
        if self.builder is not None:
            self.builder.abandon()
        enters = plan.reshard is not None or plan.layout > 0  # ranks that enter main arrive as late as at the start
        patient = plan.generation == 1 or enters or (not plan.restores and plan.committed == BEGIN)
        self.builder = self._new_builder(plan, list(groups), patient=patient)
        self.builder.start()

    def drop(self) -> None:
        """Abandon the build, and forget it. To be called under the lock."""
        if self.builder is not None:
            self.builder.abandon()
        self.builder = None

    def build_group(self, plan: GenerationPlan, group: ElasticGroup, rank: int) -> Communicator | None:
        """Build one more group for ``plan``, in whose generation this process is ``rank``; None for a group of one.
        Raises as `wait` does."""
        builder = self._new_builder(plan, [group], patient=True)
        builder.start()
        try:
            self.wait(plan, builder, rank)
        except Superseded:
            builder.abandon()
            raise
        return builder.communicators.get(group)

    def wait(self, plan: GenerationPlan, builder: Builder, rank: int) -> None:
        """Wait until ``builder`` is done. A failed build of this ``rank`` is reported; raises `Superseded` when a newer
        generation is announced, and errors that are this process's own fault."""
        with self._changed:
            self._changed.wait_for(lambda: builder.over or self._machine.is_superseded(plan.generation))
            if self._machine.is_superseded(plan.generation):
                raise Superseded
        if isinstance(builder.error, OWN_FAULTS):
            raise builder.error
        if builder.error is not None:
            print(
                f"rackrun: rank {rank} could not build generation {plan.generation}: {builder.error}",
                file=sys.stderr,
                flush=True,
            )
            with self._changed:  # a peer did not come or cannot be reached; the next generation leaves it out
                self._unbuilt = WorkerUnbuilt(
                    slot=self._slot,
                    incarnation=self._incarnation,
                    generation=plan.generation,
                    cut_off=isinstance(builder.error, ExchangeUnreachable),
                    because=str(builder.error)[:300],
                )
                self._changed.wait_for(lambda: self._machine.is_superseded(plan.generation))
            raise Superseded

    def take_failure(self) -> WorkerUnbuilt | None:
        """Return the report of a failed build once, unless a newer generation is announced. To be called under the
        lock."""
        unbuilt, self._unbuilt = self._unbuilt, None
        return None if unbuilt is None or self._machine.is_superseded(unbuilt.generation) else unbuilt

    def _new_builder(self, plan: GenerationPlan, groups: Sequence[ElasticGroup], *, patient: bool) -> Builder:
        return Builder(
            plan,
            groups,
            self._device,
            self._token,
            patient=patient,
            done=self._wake,
            queue=self._queue,
            handshakes=self.handshakes,
        )

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
