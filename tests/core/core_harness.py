"""A control plane that tests tell events to, and its answers. The invariants are checked after every event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rackrun.core.machine.control_plane import ControlPlane, View
from rackrun.protocol.commands import (
    Command,
    CondemnWorker,
    FenceWorker,
    GenerationPlan,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import (
    DeviceChecked,
    DeviceJudged,
    Event,
    ScriptFailure,
    SlowRank,
    SlowRanksChanged,
    SnapshotDamaged,
    SnapshotMirrored,
    SourcesDiffer,
    TimerFired,
    TrayJoined,
    TrayLost,
    TrayStoodStill,
    WorkerBusy,
    WorkerElastic,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WorkerSevered,
    WorkerStalled,
    WorkerUnbuilt,
)
from rackrun.protocol.gpu_health import Evidence, GpuVerdict, Health, Scope, response_to
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, Step, TrayId, snapshot_id
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import StandstillsGathered, timer_named
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.partial_topology import FoundGpu, FoundTray, PartialTopology

C = TypeVar("C")


class CoreHarness:
    """A control plane and what it has answered. Workers are named by their slot: the current incarnation is meant."""

    def __init__(self, config: JobConfig) -> None:
        self.core = ControlPlane(config)
        self.now = 0
        self.incarnation: dict[str, Incarnation] = {}
        self.answers: list[Command] = []
        self.resizes = ""
        """How the script's world changes its size: "in place", by "entering main again"; "": not at all."""
        self.shards = 0
        """Micro-batches of its global batch; 0: it does not say."""

    def tell(self, event: Event) -> Sequence[Command]:
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
        commands = self.core.handle(type(event)(**fields | {"at_ms": self.now}))
        self.core.check_invariants()
        for command in commands:
            if isinstance(command, StartWorker):
                self.incarnation[command.slot] = command.incarnation
        self.answers.extend(commands)
        return commands

    def _who(self, slot: str) -> dict[str, Any]:
        return {"slot": SlotId(slot), "incarnation": self.incarnation[slot]}

    # -- what happens ----------------------------------------------------------------------------------------------
    def join(
        self, tray: str, slots: int = 4, *, clique: str = "", unfit: Mapping[int, str] | None = None
    ) -> Sequence[Command]:
        """``clique``: of its GPUs, of which it tells then."""
        return self.tell(
            TrayJoined(
                tray=TrayId(tray),
                host=tray,
                slots=slots,
                store=f"{tray}:1",
                snapshots=f"{tray}:2",
                codec=True,
                topology=topology_of(tray, slots, clique) if clique else b"",
                unfit={index: (why,) for index, why in (unfit or {}).items()},
            )
        )

    def judges(self, slot: str, health: Health, *, fabric: bool = False, scope: Scope = "gpu") -> Sequence[Command]:
        """The agent of its tray says how the GPU of ``slot`` is."""
        tray, _, index = slot.partition("/")
        return self.tell(DeviceJudged(tray=TrayId(tray), verdict=verdict_on(int(index), health, fabric, scope)))

    def stands_still(
        self, *trays: str, for_ms: int | Sequence[int] = 4_000, ran: bool | None = False
    ) -> Sequence[Command]:
        """The trays stand still together. ``ran``: whether their workers ran meanwhile."""
        times = [for_ms] * len(trays) if isinstance(for_ms, int) else for_ms
        answers = [
            self.tell(TrayStoodStill(tray=TrayId(tray), for_ms=each, workers_ran=ran))
            for tray, each in zip(trays, times, strict=True)
        ]
        told = self.tell(TimerFired(timer=StandstillsGathered()))
        assert [type(one) for each in answers for one in each] == [SetTimer], "all are told in one notice"
        return told

    def checks(self, slot: str, *unfit: str) -> Sequence[Command]:
        tray, _, index = slot.partition("/")
        return self.tell(DeviceChecked(tray=TrayId(tray), index=int(index), unfit=unfit))

    def are_slow(
        self, *slow: int, times: float = 1.5, everybody: float = 0.0, rest: float = 0.0, meets: bool = False
    ) -> Sequence[Command]:
        """These ranks, and no others."""
        found = tuple(slow_rank(rank, self.view.ranks[rank].slot, times) for rank in slow)
        generation = Generation(self.view.generation)
        return self.tell(
            SlowRanksChanged(generation=generation, slow=found, everybody=everybody, rest=rest, meets=meets)
        )

    def pauses(self, slot: str) -> Sequence[Command]:
        return self.tell(WorkerPaused(**self._who(slot), generation=Generation(self.view.generation)))

    def pause_all(self) -> Sequence[Command]:
        return [command for slot in self.members for command in self.pauses(slot)]

    def tray_lost(self, tray: str, *, returns: bool = False) -> Sequence[Command]:
        return self.tell(TrayLost(tray=TrayId(tray), because="lease lapsed", returns=returns))

    def elastic(self, slot: str) -> Sequence[Command]:
        return self.tell(WorkerElastic(**self._who(slot)))

    def ready(
        self, slot: str, replica_class: str = "", mesh: Mapping[str, int] | None = None, *, setup_ms: int = 400
    ) -> Sequence[Command]:
        self.elastic(slot)
        axes = tuple((mesh or {}).items())
        fixed = "" if self.resizes else "it is fixed"
        reenters = self.resizes == "entering main again"
        return self.tell(
            WorkerReady(
                **self._who(slot),
                replica_class=replica_class,
                mesh=axes,
                fixed=fixed,
                reenters=reenters,
                shards=self.shards,
                setup_ms=setup_ms,
            )
        )

    def exits(
        self,
        slot: str,
        *,
        signal: int | None = None,
        code: int | None = None,
        bug: str = "",
        failure: ScriptFailure | None = None,
        step: int = 5,
        snapshots: Sequence[int] = (),
        early: bool = False,
    ) -> Sequence[Command]:
        if bug:
            failure = ScriptFailure(type="builtins.ValueError", message="no", traceback="", where=bug)
        if signal is None and code is None and failure is None:
            signal = 9
        steps = tuple(Step(step) for step in snapshots)
        return self.tell(
            WorkerExited(
                **self._who(slot),
                signal=signal,
                exit_code=code,
                failure=failure,
                early=early,
                step=Step(step),
                snapshots=steps,
            )
        )

    def parks(
        self,
        slot: str,
        passed: int = 4,
        entered: int | None = None,
        snapshots: Sequence[int] = (),
        layout: int = 0,
        resumed: int = 0,
        good: int | None = None,
    ) -> Sequence[Command]:
        return self.tell(
            WorkerParked(
                **self._who(slot),
                generation=Generation(self.view.generation),
                passed=Position(passed),
                entered=Position(passed if entered is None else entered),
                gate=(float(passed),),
                snapshots=tuple(snapshot_id(Generation(layout), Step(step)) for step in snapshots),
                layout=Generation(layout),
                resumed=Generation(resumed),
                good=None if good is None else Position(good),
            )
        )

    def resumes(self, slot: str) -> Sequence[Command]:
        return self.tell(WorkerResumed(**self._who(slot), generation=Generation(self.view.generation)))

    def stalls(self, slot: str, collective: int = 10, *, silent: bool = False, **further: Any) -> Sequence[Command]:
        """``further``: fields of `WorkerStalled`."""
        told = {"step": Step(5), "collective": collective, "silent": silent, "for_ms": 700, **further}
        return self.tell(WorkerStalled(**self._who(slot), **told))

    def works(self, slot: str, *, awaited: bool = False) -> Sequence[Command]:
        busy = {"unit": "phase save", "where": "train.py:7 in save", "for_ms": 4000, "allowed_ms": 30000}
        return self.tell(WorkerBusy(**self._who(slot), **busy, awaited=awaited))  # type: ignore[arg-type]

    def is_severed(self, slot: str, generation: int | None = None) -> Sequence[Command]:
        of = Generation(generation or self.view.generation)
        return self.tell(WorkerSevered(**self._who(slot), generation=of, because="connection reset"))

    def is_unbuilt(self, slot: str, *, cut_off: bool = False) -> Sequence[Command]:
        """Its groups, in the newest generation."""
        generation = Generation(self.view.generation)
        return self.tell(WorkerUnbuilt(**self._who(slot), generation=generation, cut_off=cut_off, because="no route"))

    def mirrors(self, slot: str, holder: str, *steps: int, generation: int | None = None) -> Sequence[Command]:
        who = self._who(slot)
        return self.tell(
            SnapshotMirrored(
                **who,
                generation=Generation(generation or self.view.generation),
                holder=TrayId(holder),
                where=f"{holder}:2/{slot}/{who['incarnation']}",
                steps=tuple(Step(step) for step in steps),
            )
        )

    def finds_damaged(self, slot: str, step: int, where: str = "") -> Sequence[Command]:
        """``where``: of the lost worker that ``slot`` replaces; its own if empty."""
        generation = Generation(self.view.generation)
        return self.tell(
            SnapshotDamaged(**self._who(slot), generation=generation, step=Step(step), where=where, because="chunk 0")
        )

    def finds_sources_differ(self, slot: str, generation: int | None = None) -> Sequence[Command]:
        of = Generation(self.view.generation if generation is None else generation)
        return self.tell(SourcesDiffer(**self._who(slot), generation=of, because="its sources differ"))

    def finishes(self, slot: str, *, took_ms: int = 0) -> Sequence[Command]:
        return self.tell(WorkerFinished(**self._who(slot), took_ms=took_ms))

    def timer(self, kind: str) -> Sequence[Command]:
        """The timer of this kind for the present generation fires."""
        return self.tell(TimerFired(timer=timer_named(f"{kind}:{self.view.generation}")))

    # -- several at once -------------------------------------------------------------------------------------------
    @property
    def view(self) -> View:
        return self.core.view()

    @property
    def members(self) -> list[str]:
        return [rank.slot for rank in self.view.ranks if rank.incarnation is not None]

    def train(self, classes: str = "all") -> None:
        """Everybody is ready, the spares too."""
        for number, slot in enumerate(self.members):
            self.ready(slot, "" if classes == "unique" else f"{classes}-{number % 2 if classes == 'pair' else 0}")
        assert self.view.phase == "training"
        for spare in self.view.spares:
            self.ready(spare.slot)

    def park_all(self, passed: int = 4, snapshots: Sequence[int] = (), layout: int = 0) -> Sequence[Command]:
        """The window closes, and all survivors answer."""
        out = [*self.timer("gather")]
        for rank in self.view.ranks:
            if rank.state == "breaking":
                out += self.parks(rank.slot, passed, snapshots=snapshots, layout=layout)
        return out

    def resume_all(self) -> Sequence[Command]:
        return [command for slot in self.members for command in self.resumes(slot)]


def topology_of(tray: str, slots: int, clique: str) -> bytes:
    """A tray of a rack of its clique's name, as its agent tells of it."""
    gpus = tuple(FoundGpu(index=index, uuid=f"GPU-{tray}-{index}") for index in range(slots))
    found = FoundTray(host=tray, rack=f"rack of {clique}", gpus=gpus, clique=CliqueId(clique, 1))
    return msgspec.json.encode([PartialTopology(kind="nvml", where=f"NVML on {tray}", trays=(found,))])


def verdict_on(index: int, health: Health, fabric: bool = False, scope: Scope = "gpu") -> GpuVerdict:
    response, usual, repair = response_to(health)
    what = "it was tested" if health is not Health.OK else ""
    evidence = Evidence(at_ms=0, source="nvml", what=what, health=health, fabric=fabric)
    return GpuVerdict(
        at_ms=0,
        uuid="",
        index=index,
        health=health,
        response=response,
        scope=scope if scope != "gpu" else usual,
        repair=repair,
        evidence=(evidence,) if what else (),
    )


def slow_rank(rank: int, slot: str, times: float = 1.5) -> SlowRank:
    return SlowRank(rank=Rank(rank), slot=SlotId(slot), times=times, own_ms=48.0, past=1.5, rows=15, window=20)


def only(kind: type[C], commands: Sequence[Command]) -> C:
    """The one command of this kind."""
    (command,) = [command for command in commands if isinstance(command, kind)]
    return command


def every(kind: type[C], commands: Sequence[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def condemned(commands: Sequence[Command]) -> list[CondemnWorker | FenceWorker]:
    """Who counts as lost while it lives, each once: killed at once, or when the others have left the generation."""
    found: dict[tuple[str, int], CondemnWorker | FenceWorker] = {}
    for command in commands:
        if isinstance(command, CondemnWorker | FenceWorker):
            found.setdefault((command.slot, command.incarnation), command)
    return [*found.values()]


def only_condemned(commands: Sequence[Command]) -> CondemnWorker | FenceWorker:
    (one,) = condemned(commands)
    return one


def plan_in(commands: Sequence[Command]) -> GenerationPlan:
    return only(ResumeGeneration, commands).plan


def stop_in(commands: Sequence[Command]) -> StopJob:
    return only(StopJob, commands)


def ranks(plan: GenerationPlan) -> dict[Rank, str]:
    return {member.rank: member.slot for member in plan.members}
