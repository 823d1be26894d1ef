"""All parts of the core of one job, and what each of them is given.

`rackrun.core.lifecycle.forming` forms a world, `rackrun.core.lifecycle.beginning` begins it,
`rackrun.core.recovery.recovery` recovers in place (a swap), `rackrun.core.lifecycle.restart` starts all workers anew,
and `rackrun.core.lifecycle.shutdown` ends the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.faults.corruption import Corruption
from rackrun.core.faults.start_bugs import StartBugs
from rackrun.core.faults.triage import Triage
from rackrun.core.generation.facts import Facts
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import World
from rackrun.core.lifecycle.batch_notices import BatchNotices
from rackrun.core.lifecycle.beginning import Beginning
from rackrun.core.lifecycle.forming import Forming
from rackrun.core.lifecycle.numerics_notices import NumericsNotices
from rackrun.core.lifecycle.restart import Restart
from rackrun.core.lifecycle.shutdown import Finale
from rackrun.core.machine.losses import Losses
from rackrun.core.members.rack import RackMachine
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.active_policy import Mandate
from rackrun.core.policy.measured_costs import Meter
from rackrun.core.recovery.ask_policy import Council
from rackrun.core.recovery.recovery import Recovery
from rackrun.core.recovery.view_builder import Outlook
from rackrun.core.requests.operator_requests import Control
from rackrun.core.requests.planned_swap import PlannedSwap
from rackrun.core.requests.resize_requests import Sizes
from rackrun.core.resize.acquiring import Acquiring
from rackrun.core.resize.spare_top_up import Background
from rackrun.core.stragglers.shifting import Shifting
from rackrun.core.stragglers.straggler_response import Slowness
from rackrun.protocol.job_config import JobConfig

__all__ = ["Job"]


@dataclass(slots=True)
class Job:
    """All parts of one job. A part is given the parts below it, and never calls one above it."""

    config: JobConfig
    rack: RackMachine = field(default_factory=RackMachine)
    out: Outbox = field(default_factory=Outbox)
    facts: Facts = field(default_factory=Facts)
    meter: Meter = field(default_factory=Meter)
    world: World = field(default_factory=World)
    end: JobEnd = field(init=False)
    seating: Seating = field(init=False)
    recovery: Recovery = field(init=False)
    control: Control = field(init=False)
    sizes: Sizes = field(init=False)
    swap: PlannedSwap = field(init=False)
    triage: Triage = field(init=False)
    slowness: Slowness = field(init=False)
    batches: BatchNotices = field(init=False)
    numerics: NumericsNotices = field(init=False)
    shifting: Shifting = field(init=False)
    corruption: Corruption = field(init=False)
    beginning: Beginning = field(init=False)
    forming: Forming = field(init=False)
    start_bugs: StartBugs = field(init=False)
    finale: Finale = field(init=False)
    acquiring: Acquiring = field(init=False)
    background: Background = field(init=False)
    restart: Restart = field(init=False)
    losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        config, world, rack, out, facts = self.config, self.world, self.rack, self.out, self.facts
        world.policy = Mandate.of(config)
        self.seating = seating = Seating(config, rack)
        self.end = end = JobEnd(world, out)
        outlook = Outlook(config, world, rack, seating, self.meter)
        self.triage = Triage(rack, out, facts)
        self.batches = BatchNotices(out)
        self.numerics = NumericsNotices(out)
        self.start_bugs = StartBugs(world, out)
        self.corruption = Corruption(config, world, rack, seating, out, facts, end)
        self.slowness = Slowness(config, rack.devices, out, facts)
        self.shifting = Shifting(config, world, seating, out)
        self.acquiring = Acquiring(config, world, rack, out, facts)
        self.background = Background(world, rack, self.acquiring, self.meter, out)
        self.recovery = Recovery(
            config,
            world,
            rack,
            seating,
            out,
            facts,
            end,
            outlook,
            Council(world.policy, out),
            self.triage,
            self.shifting,
            self.acquiring,
            self.background,
        )
        self.control = Control(config, world, rack, seating, self.recovery, out, facts)
        self.sizes = Sizes(config, world, rack, self.recovery.resizing, self.control.admission, self.control.replies)
        self.swap = PlannedSwap(config, world, rack, seating, self.control, self.sizes, self.recovery, out, facts)
        self.finale = Finale(config, world, rack, out, end)
        self.beginning = Beginning(
            config, world, rack, seating, self.recovery, self.finale, self.shifting, out, facts, end
        )
        self.forming = Forming(config, world, rack, seating, self.triage, out, self.beginning, end)
        self.restart = Restart(config, world, rack, seating, outlook, out, self.beginning, self.triage, facts, end)
        self.losses = Losses(config, world, facts, end, self.recovery, self.restart, self.finale, self.start_bugs)

    def check_invariants(self) -> None:
        """Raise AssertionError if the core contradicts itself."""
        self.rack.check_invariants()
        self.world.check_invariants()
        self.shifting.check_invariants()
        self.recovery.fencing.check_invariants()
