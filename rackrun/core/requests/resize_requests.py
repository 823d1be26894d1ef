"""Operators' requests for a number of ranks: ``rackctl shrink`` and ``rackctl grow``.

From the moment of a shrink request the world does not grow beyond the requested size. All ranks pause after a step.
Then the leaving ranks are let go like ranks whose replica has lost a rank: the next plan is made without them, and they
come back as spares. No rank is lost, and no step is repeated. A loss in between is recovered first, in whatever way the
policy decides; then the rest of the request is done. After a grow request the world grows as it does after a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.generation.restore_sources import named
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.requests.admission import Admission
from rackrun.core.requests.pending_requests import PendingGrow, PendingShrink, RequestRefused
from rackrun.core.requests.replies import Replies
from rackrun.core.resize.resizing import Resizing
from rackrun.protocol.events import GrowRequested, ShrinkRequested
from rackrun.protocol.ids import Rank
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung

__all__ = ["ResizeRequests"]

_OVER = (Phase.ENDING, Phase.STOPPED)


@dataclass(slots=True)
class ResizeRequests:
    """Carries out shrink and grow requests, one at a time."""

    config: JobConfig
    world: World
    rack: RackMachine
    resizing: Resizing
    admission: Admission
    replies: Replies
    under_way: PendingShrink | PendingGrow | None = None
    _looked: tuple[object, ...] = ()
    """What `look` depended on when it was last called."""

    # -- what is asked
    def ask(self, event: ShrinkRequested | GrowRequested) -> None:
        """Begin a shrink or a growth."""
        what = "grow" if isinstance(event, GrowRequested) else "shrink"
        try:
            if isinstance(event, GrowRequested):
                self._grow(event)
            else:
                self._shrink(event)
        except RequestRefused as refused:
            self.replies.refuse(event.request, what, refused)

    def _shrink(self, event: ShrinkRequested) -> None:
        world = self.world
        self.admission.check_not_held("go on without the lost ranks: rackctl policy swap,shrink,hold.")
        self.admission.check_may(Rung.SHRINK, event.steps)
        if isinstance(self.under_way, PendingShrink):
            raise RequestRefused("taken", "the world is being made smaller already", "wait until that is done.")
        if bool(event.ranks) == bool(event.to):
            raise RequestRefused(
                "unknown", "it is to be said which ranks go, or how many stay", "give RANK..., or --to N."
            )
        self._check_may_change()
        for rank in event.ranks:
            if not 0 <= rank < world.size:
                raise RequestRefused(
                    "unknown", f"there are ranks 0 to {world.size - 1}, and no rank {rank}", "name others of them."
                )
            if rank not in world.members:
                raise RequestRefused("taken", f"rank {rank} is being replaced", "wait until that is done.")
        going = self.resizing.bound_to(event.ranks)
        to = event.to or world.size - len(going)
        self._check_size(to)
        workers = tuple(world.members[rank].worker for rank in going if rank in world.members)
        one = PendingShrink(event.request, to, workers, wanted=world.wanted)
        if isinstance(self.under_way, PendingGrow):
            self._call_off(RequestRefused("taken", "fewer ranks are asked for now", "ask again."))
        world.wanted, self.under_way = to, one
        if leaving := self.leaving():
            told = f"shrink to {to} ranks: {named(leaving)} will leave at the next step boundary"
            self.replies.begin(one, told)
        else:
            self._done()

    def _grow(self, event: GrowRequested) -> None:
        world, to = self.world, event.to or self.world.full
        self.admission.check_not_over()
        self.admission.check_not_held(
            "the lost ranks are replaced when spares are ready: start a tray, or rackctl return; "
            "or go on without them: rackctl policy swap,shrink,hold."
        )
        self._check_may_change()
        self._check_size(to)
        if to < world.size and not self._is_leaving():
            raise RequestRefused("size", f"the world has {world.size} ranks", f"for fewer: rackctl shrink --to {to}.")
        if self.under_way is not None:
            self._call_off(RequestRefused("taken", f"up to {to} ranks are asked for now", "ask again."))
        world.wanted = 0 if to == world.full else to
        self.resizing.growth.forget()
        self.under_way = one = PendingGrow(event.request, to)
        if lost := world.lost():
            told = f"grow to {to} ranks: when it is decided what becomes of {named(list(lost))}"
            self.replies.begin(one, told)
        elif world.size < to and self._come():
            told = f"grow to {to} ranks: at a step boundary, as workers are ready ({self._come()} wait or start)"
            self.replies.begin(one, told)
        else:
            self._done()

    # -- what becomes of it
    def leaving(self) -> list[Rank]:
        """Return the ranks that should leave at the next step boundary."""
        one = self.under_way
        if not isinstance(one, PendingShrink):
            return []
        there = self.world.members.items()
        going = self.resizing.bound_to([rank for rank, record in there if record.worker in one.workers])
        return going or self.resizing.surplus(one.to)

    def answer_if_done(self) -> None:
        """Answer the request if it is done. Called after every event."""
        one, world = self.under_way, self.world
        if one is None or world.phase is not Phase.TRAINING:
            return
        now = (one.request, self.rack.edition, world.generation, world.learned, world.wanted)
        if now == self._looked:
            return
        self._looked = now
        if isinstance(one, PendingGrow):
            if world.size >= one.to or not self._come():
                self._done()
        elif not self.leaving():
            self._done()

    def called_off(self, why: str) -> None:
        """Call off a shrink, because the world could not go on without the leaving ranks."""
        self._call_off(RequestRefused("size", why, "see rackctl status."))

    # -- parts
    def _is_leaving(self) -> bool:
        return isinstance(self.under_way, PendingShrink) and bool(self.leaving())

    def _come(self) -> int:
        """Return how many workers could become ranks or could be started for it; 0 if they are too few for one
        replica."""
        rack = self.rack
        coming = len(rack.fit_spares()) + len(rack.free_slots()) + len(rack.clearing_slots())
        return coming if coming >= (self.resizing.replica() or 1) else 0

    def _check_may_change(self) -> None:
        world = self.world
        if world.phase in (Phase.FORMING, Phase.SETUP, Phase.RESTARTING) or not world.members:
            raise RequestRefused(
                "early", "it is not known yet which ranks come and go together", "ask again when all train."
            )
        if not self.config.min_ranks:
            raise RequestRefused(
                "size", "the number of ranks is fixed (--min-ranks 0)", "start the job with --min-ranks."
            )
        if fixed := next((one.fixed for _, one in sorted(self.world.members.items()) if one.fixed), ""):
            raise RequestRefused("size", f"the number of ranks is fixed: {fixed}", "see docs/shrink_and_grow.md.")
        if not self.resizing.replica():
            raise RequestRefused(
                "size", "the script's mesh has no axis of data parallelism", "name one dp, or dp_shard."
            )

    def _check_size(self, to: int) -> None:
        replica, full = self.resizing.replica() or 1, self.world.full
        least = max(self.config.min_ranks, 1)
        sizes = [size for size in range(replica, full + 1, replica) if size >= least]
        if to in sizes:
            return
        if 0 <= to < least:
            what = f"{to} ranks would be left, of {least} at the least (--min-ranks)"
        elif to > full:
            what = f"the world began with {full} ranks, and grows no larger"
        else:
            what = f"{to} ranks are not whole replicas of {replica}"
        raise RequestRefused("size", what, f"possible are {', '.join(map(str, sizes))}.")

    def _done(self) -> None:
        one, world = self.under_way, self.world
        assert one is not None
        self.under_way = None
        told = f"the world has {world.size} of {world.full} ranks"
        if world.size < world.most:
            told += f", and grows to {world.most} when workers come"
        elif world.most < world.full:
            told += ", until others are asked for (rackctl grow)"
        self.replies.finish(one, told)

    def _call_off(self, refused: RequestRefused) -> None:
        one, self.under_way = self.under_way, None
        if one is None:
            return
        if isinstance(one, PendingShrink):
            self.world.wanted = one.wanted
        self.replies.call_off(one, refused)
