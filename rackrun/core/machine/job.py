"""All parts of the core of one job, and what each of them is given.

`rackrun.core.lifecycle.forming` forms a world, `rackrun.core.lifecycle.beginning` begins it,
`rackrun.core.recovery.recovery` recovers in place (a swap), `rackrun.core.lifecycle.restart` starts all workers anew,
and `rackrun.core.lifecycle.shutdown` ends the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.faults.corruption import Corruption
from rackrun.core.faults.standstills import Standstills
from rackrun.core.faults.start_bugs import StartBugs
from rackrun.core.faults.triage import Triage
from rackrun.core.generation.facts import Facts
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.lifecycle.batch_notices import BatchNotices
from rackrun.core.lifecycle.beginning import WorldStart
from rackrun.core.lifecycle.forming import WorldForming
from rackrun.core.lifecycle.numerics_notices import NumericsNotices
from rackrun.core.lifecycle.restart import Restart
from rackrun.core.lifecycle.shutdown import Shutdown
from rackrun.core.machine.losses import LossResponse
from rackrun.core.members.rack import RackMachine
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.core.policy.measured_costs import CostMeter
from rackrun.core.recovery.ask_policy import DecisionMaker
from rackrun.core.recovery.recovery import Recovery
from rackrun.core.recovery.view_builder import ViewBuilder
from rackrun.core.requests.operator_requests import OperatorRequests
from rackrun.core.requests.planned_swap import PlannedSwap
from rackrun.core.requests.resize_requests import ResizeRequests
from rackrun.core.resize.acquiring import RackAcquisition
from rackrun.core.resize.spare_top_up import SpareTopUp
from rackrun.core.stragglers.shifting import Shifting
from rackrun.core.stragglers.straggler_response import StragglerResponse
from rackrun.protocol.job_config import JobConfig

__all__ = ["CoreParts"]


@dataclass(slots=True)
class CoreParts:
    """All parts of one job. A part is given the parts below it, and never calls one above it."""

    config: JobConfig
    rack: RackMachine = field(default_factory=RackMachine)
    out: Outbox = field(default_factory=Outbox)
    facts: Facts = field(default_factory=Facts)
    cost_meter: CostMeter = field(default_factory=CostMeter)
    world: World = field(default_factory=World)
    end: JobEnd = field(init=False)
    seating: Seating = field(init=False)
    recovery: Recovery = field(init=False)
    operator_requests: OperatorRequests = field(init=False)
    resize_requests: ResizeRequests = field(init=False)
    swap: PlannedSwap = field(init=False)
    triage: Triage = field(init=False)
    standstills: Standstills = field(init=False)
    straggler_response: StragglerResponse = field(init=False)
    batches: BatchNotices = field(init=False)
    numerics: NumericsNotices = field(init=False)
    shifting: Shifting = field(init=False)
    corruption: Corruption = field(init=False)
    beginning: WorldStart = field(init=False)
    forming: WorldForming = field(init=False)
    start_bugs: StartBugs = field(init=False)
    shutdown: Shutdown = field(init=False)
    acquiring: RackAcquisition = field(init=False)
    spare_top_up: SpareTopUp = field(init=False)
    restart: Restart = field(init=False)
    losses: LossResponse = field(init=False)

    @property
    def may_drain(self) -> bool:
        """Whether a stop can wait for a step boundary: all train, or will train again by what is under way."""
        waits = self.world.phase is Phase.PARKING and self.recovery.nothing_comes
        return self.world.phase in IN_PLACE and not waits

    def __post_init__(self) -> None:
        config, world, rack, out, facts = self.config, self.world, self.rack, self.out, self.facts
        world.policy = ActivePolicy.of(config)
        self.seating = seating = Seating(config, rack)
        self.end = end = JobEnd(world, out)
        outlook = ViewBuilder(config, world, rack, seating, self.cost_meter)
        self.triage = Triage(rack, out, facts)
        self.standstills = Standstills(rack, out, facts)
        self.batches = BatchNotices(out)
        self.numerics = NumericsNotices(out)
        self.start_bugs = StartBugs(world, out)
        self.corruption = Corruption(config, world, rack, seating, out, facts, end)
        self.straggler_response = StragglerResponse(config, rack.devices, out, facts)
        self.shifting = Shifting(config, world, seating, out)
        self.acquiring = RackAcquisition(config, world, rack, out, facts)
        self.spare_top_up = SpareTopUp(world, rack, self.acquiring, self.cost_meter, out)
        self.recovery = Recovery(
            config,
            world,
            rack,
            seating,
            out,
            facts,
            end,
            outlook,
            DecisionMaker(world.policy, out),
            self.triage,
            self.shifting,
            self.acquiring,
            self.spare_top_up,
        )
        self.operator_requests = OperatorRequests(config, world, rack, seating, self.recovery, out, facts)
        self.resize_requests = ResizeRequests(
            config,
            world,
            rack,
            self.recovery.resizing,
            self.operator_requests.admission,
            self.operator_requests.replies,
        )
        self.swap = PlannedSwap(
            config, world, rack, seating, self.operator_requests, self.resize_requests, self.recovery, out, facts
        )
        self.shutdown = Shutdown(config, world, rack, out, end)
        self.beginning = WorldStart(
            config, world, rack, seating, self.recovery, self.shutdown, self.shifting, out, facts, end
        )
        self.forming = WorldForming(config, world, rack, seating, self.triage, out, self.beginning, end)
        self.restart = Restart(config, world, rack, seating, outlook, out, self.beginning, self.triage, facts, end)
        self.losses = LossResponse(
            config, world, facts, end, self.recovery, self.restart, self.shutdown, self.start_bugs
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the core contradicts itself."""
        self.rack.check_invariants()
        self.world.check_invariants()
        self.shifting.check_invariants()
        self.recovery.fencing.check_invariants()
        self.recovery.hold.check_invariants()
        self.recovery.stalls.window.check_invariants()
        self.operator_requests.check_invariants()
