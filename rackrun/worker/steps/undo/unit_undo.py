"""Records what a unit changes before its gate, and puts it back when the unit does not count.

Every tracked tensor is *copied* when a unit begins, known by a *digest*, or *trusted* until a unit is abandoned:

- Copied: small buffers and small tensors of other tracked objects, always. Tensors that no optimizer trains (a moving
  average, a momentum encoder, a codebook, a queue), once they were seen to change anywhere in a step: a step that skips
  its optimizer has its gate at the end, after all such changes. Tensors that an optimizer trains, once they were seen
  to change before a gate. And everything in the first step, in steps of several parts
  (`rackrun.worker.steps.multi_part_steps`), and in phases until it is known what they change.
- Known by a digest: large tensors that no optimizer trains and that were never seen to change (a frozen model). When a
  unit is abandoned they are digested again.
- Trusted: tensors that optimizers train. As far as versions and audits tell, they change after the gate only. When a
  unit was abandoned, the next attempt at it is audited: the same code with the same numbers writes the same tensors. A
  tensor that changes before the gate then has changed in the abandoned attempt, too. This rank's state is not the
  assumed one in that case, and no gate is passed.

A tensor's version that has moved proves a change, but one that has not proves nothing (``.data``, a custom kernel of
the script). So in the first three steps, and then in ever fewer, everything is *audited*: digests at the beginning, at
the gate, and at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch import nn

from rackrun.checkpoint.image.plain_values import flatten
from rackrun.errors import StepError
from rackrun.worker.state.objects.module_structure import ModuleStructure
from rackrun.worker.state.objects.optimizer_state import HeldObjects, put_held_objects
from rackrun.worker.state.objects.scaler_state import ScalerState
from rackrun.worker.state.state_manifest import ChangedTensors
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.undo.abandoned_places import AbandonedPlaces
from rackrun.worker.steps.undo.between_units import BetweenUnits, Look, changed_between
from rackrun.worker.steps.undo.data_accesses import DataAccesses
from rackrun.worker.steps.undo.gradients_at_begin import GradientsAtBegin
from rackrun.worker.tensors.freed_tensors import refuse_freed
from rackrun.worker.tensors.tensor_bytes import digests_by_path
from rackrun.worker.tensors.tensor_lists import (
    Mark,
    are_plain,
    local_parts,
    marks,
    nbytes,
    versions,
    versions_of_plain,
)
from rackrun.worker.tensors.undo_copies import NoMemoryForCopies, UndoCopies, place_for
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp

__all__ = ["UnitUndo"]

_SMALL_BYTES = 2**20
_PHASE_RUNS_COPIED = 3
"""The number of runs of a phase that begin with a copy of everything. After them it is assumed to change only what it
has changed so far."""
_ROOM_FOR_UNKNOWN = 2
_ROOM_BYTES = 64 * 2**20
"""Tensors that no optimizer trains and that were never seen to change are copied once, too, unless they exceed both
``_ROOM_BYTES`` and ``_ROOM_FOR_UNKNOWN`` times the size of what optimizers train."""

_TRAINING = attrgetter("training")


class UnitUndo:
    """Remembers the state at the beginning of a unit, and restores it. ``say``: prints once what the copies cost."""

    def __init__(self, state: TrackedState, say: Callable[[str], None] = lambda _: None) -> None:
        self._state, self._say = state, say
        self._copies = UndoCopies()
        self.accesses = DataAccesses(self._copies, self._has_room)
        """What the script accesses through ``.data``."""
        self._filled = -1
        self._structure = ModuleStructure({})
        self._made_of: ModuleStructure | None = None
        """The structure of the tracked modules when the last unit began."""
        self._trained_objects: list[torch.Tensor] = []
        self._phase = ""
        self._whole = self._audits = False
        """For the current unit: whether everything that optimizers train is copied, and whether its changes are found
        by comparing content."""
        self._places = AbandonedPlaces()
        self._everywhere = False
        self._parameters: dict[str, nn.Parameter] = {}
        """Parameters that optimizers train, by path."""
        self._trained: list[nn.Parameter] = []
        """The same without their paths."""
        self._are_plain = True
        """Whether all of these are of torch's own classes."""
        self._free_parameters: dict[str, nn.Parameter] = {}
        """All other parameters, by path."""
        self._trained_bytes = 0
        """Size of the parameters that optimizers train."""
        self._versions: list[int] = []
        """Versions of the parameters that optimizers train, when the unit began."""
        self._marks: dict[str, Mark] = {}
        """Address and version, when the unit began, of tensors that no optimizer trains and that are not known to
        change."""
        self._static: dict[str, int] = {}
        """Digests of those among them for whose copies there is no room, from whenever they were taken."""
        self._first: dict[str, int] = {}
        """Digests of everything when the unit began, in the first step."""
        self._begun: dict[str, int] = {}
        """Digests, when the unit began, of uncopied tensors that optimizers train or hold; empty where they are not
        needed."""
        self._begun_tensors: dict[str, torch.Tensor] = {}
        """The tensors that had these digests: a step may replace what optimizers hold by other tensors."""
        self._ahead: tuple[int, dict[str, int]] = -1, {}
        """Digests taken in advance for the next attempt, and how often the state had been filled by then."""
        self._ended: dict[str, int] = {}
        """Digests of everything at the end of the unit before, if that was audited."""
        self._found_early: set[str] = set()
        self._changed_between = ""
        self._phase_runs: dict[str, int] = {}
        self._place: tuple[int, torch.device | None] = 0, None
        self._told_bytes = 0
        self._state_keys: dict[str, dict[int, set[str]]] = {}
        self._held: dict[str, HeldObjects] = {}
        """What optimizers held for which parameters when the unit began; empty between units."""
        self._saved_plain = b""
        self._submodules: Sequence[nn.Module] = ()
        self._modes: list[bool] = []
        self._gradients = GradientsAtBegin()
        self._between = BetweenUnits(state)

    # -- between units
    @property
    def changed_between(self) -> str:
        """Path of a tensor whose content differs from the end of the unit before; "" for none. To be read when the
        device has come to where the unit has begun.

        If all ranks find one, the script has changed it; if one rank does, its memory may be faulty."""
        return self._changed_between or self.accesses.changed_between()

    def committed(self) -> None:
        """Record the state at the end of a unit (`BetweenUnits.committed`)."""
        self._between.committed()
        self.accesses.begin_between()

    def accept(self) -> None:
        """Accept what the script has done to tracked state since the loop ended as the current state."""
        self._between.committed()
        self._ended.clear()
        self.accesses.forget()

    def let_go(self) -> None:
        """Keep nothing alive of what optimizers hold: the script may drop it after its loop to have the memory, and a
        recovery may replace it."""
        self._held, self._begun, self._begun_tensors = {}, {}, {}
        self._between.forget_look()
        self.accesses.forget()

    def check_stands(self, *, glance: bool = False, accessed: bool = False) -> None:
        """Raise `StepError` if tracked state has changed since the last unit, as far as versions tell; `begin` compares
        content in some units. ``glance``: see `TrackedState.structure`. ``accessed``: compare the content of what was
        accessed through ``.data`` as well, and wait for the device."""
        if changed := self._between.changed_since(glance=glance):
            raise changed_between(changed)
        if accessed and (written := self.accesses.changed()):
            raise changed_between(min(written))

    def changed_since(self, *, glance: bool = False) -> str:
        """Return what has changed since the last unit ended (`BetweenUnits.changed_since`)."""
        changed = self._between.changed_since(glance=glance)
        self._between.forget_look()
        return changed

    # -- a unit begins
    def begin(
        self,
        *,
        whole: bool = False,
        audit: bool = False,
        phase: str = "",
        everywhere: bool = False,
        share: tuple[float, ...] = (),
    ) -> None:
        """Remember everything that the unit may change.

        ``whole``: copy everything, if there is memory for it. ``audit``: find by content what the unit changes; with
        ``everywhere``, at each place where it may be left and not only at its gate. ``phase``: the phase's name; "" for
        a step. ``share``: what decides how many micro-batches this rank has. Raises `StepError` when the last unit has
        changed the structure of tracked modules.
        """
        self._phase = phase
        runs = self._phase_runs.get(phase, 0)
        self._audits = audit or (bool(phase) and (runs < _PHASE_RUNS_COPIED or not runs & (runs - 1)))
        self._whole = whole or (bool(phase) and runs < _PHASE_RUNS_COPIED)
        look = self._between.look()
        self._check_made_of(look.structure)
        joined: list[torch.Tensor] = []
        filled = self._filled != self._state.filled
        self.accesses.end()
        if filled:
            self.accesses.forget()
        if filled or not self._trains_the_same(look):
            before = self._trained_objects
            self._reset(look)
            if before:
                trained = set(map(id, before))
                joined = [parameter for parameter in self._trained_objects if id(parameter) not in trained]
        for wrapper in look.structure.wrappers:
            ddp.begin(wrapper)
        if look.structure.fsdp:
            fsdp.begin(look.structure.fsdp)
            shards = self._state.structure()
            # parameters are shards from here on
            look = look._replace(structure=shards, of_parameters=shards.versions())
        looks = self._audits or self._whole or look.structure is not self._structure
        if self._audits or look.structure is not self._structure:
            self._find_tensors(look.structure)
        self._everywhere = everywhere
        self._places.begin(share)
        self._saved_plain = look.plain
        self._held = look.held
        self._modes = list(map(_TRAINING, self._submodules))
        self._found_early.clear()
        self._take_copies(look, exactly=looks)
        own = self._free_parameters
        self._versions = versions(self._trained) if own else look.of_parameters
        self._gradients.begin(look.structure.parameters, own.values(), joined, filled=filled)
        if not phase:  # of what a phase may change there are copies or digests
            self.accesses.begin_unit(self._versions, self._state.lineage.changes.early)

    def _trains_the_same(self, look: Look) -> bool:
        """Whether optimizers train what they trained when the unit before began. The plain values name it, where it is
        not what they were made with."""
        same = look.plain == self._saved_plain and look.structure is self._structure
        return same or self._state.trains(self._trained_objects)

    def _check_made_of(self, structure: ModuleStructure) -> None:
        """Raise `StepError` if a unit has changed the structure of the tracked modules."""
        before, self._made_of = self._made_of, structure
        if before is not None and structure is not before and (difference := structure.differs(before)):
            raise StepError(
                f"a step, or a phase, has changed what tracked modules are made of: {difference}. A process that takes a rank over has what main "
                "builds, and a step that is done again would begin with the change.",
                remedy="build it in main, in its full size, and have forward() choose: by the step's number, or by a tracked tensor.",
            )
        if before is not None and structure is not before:
            for module, key in fsdp.exchanged(structure.fsdp):
                raise StepError(
                    f"{structure.name_of(module, key)} was exchanged for another parameter. {fsdp.PUTS_BACK}",
                    remedy=fsdp.WRITE_INTO,
                )

    def _reset(self, look: Look) -> None:
        """Drop all that is known, because the state was filled from outside, or optimizers train other parameters than
        before."""
        self._filled, self._trained_objects = self._state.filled, self._state.trained()
        self._copies.clear()
        self._static.clear()
        self._ended.clear()
        self._nothing_is_suspect()
        fsdp.reshard(look.structure.fsdp)
        self._find_tensors(self._state.structure())

    def _find_tensors(self, structure: ModuleStructure) -> None:
        """Find the tracked tensors, except those that are looked up in every unit."""
        self._structure, self._submodules = structure, structure.modules
        self._parameters, self._free_parameters = self._state.trained_and_free()
        self._trained = list(self._parameters.values())
        self.accesses.find(self._parameters)
        self._are_plain = are_plain(self._trained)
        self._trained_bytes = sum(nbytes(self._trained))

    def _take_copies(self, look: Look, *, exactly: bool) -> None:
        """Take copies and digests of the current state. ``exactly``: query the size of every storage first, not only
        its address, to detect freed tensors."""
        began = time.perf_counter()
        changes = self._state.lineage.changes
        wanted = {*changes.early, *changes.moving, *changes.phases.get(self._phase, ())}
        free = self._free_tensors(look.dicts, look.structure)
        self._check_between(free)
        self._copies.begin()
        looks = self._audits or bool(self._places) or bool(self._phase)
        if not (free or wanted or looks or self._whole):
            self._copies.clear()
            self._marks, self._static, self._begun, self._first, self._state_keys = {}, {}, {}, {}, {}
            self._begun_tensors = {}
            return
        sizes = dict(zip(free, nbytes(free.values()), strict=True))
        known = wanted | self._always(sizes)
        unknown = [path for path in free if path not in known]
        unseen = sum([sizes[path] for path in unknown])
        room = unseen <= max(_ROOM_FOR_UNKNOWN * self._trained_bytes, _ROOM_BYTES)
        self._learn(moving=[path for path in unknown if self._changed_unseen(path, free[path])] if self._audits else ())
        tensors = {path: free[path] for path in unknown}
        self._marks = dict(zip(unknown, marks(tensors.values()), strict=True))
        held = tensors if room else {}
        again = set(held if self._audits or self._whole else self._copies.outdated(held))
        now = {path: tensor for path, tensor in free.items() if path in known or path in again}
        digested = [] if room else [path for path in unknown if self._audits or path not in self._static]
        self._static = {path: self._static[path] for path in unknown if not room and path in self._static}
        self._static |= digests_by_path({path: free[path] for path in digested})
        owned: dict[str, torch.Tensor] = {}
        if self._whole or self._audits or self._places or self._phase or wanted - free.keys():
            owned = self._owned()
        copied = {path: tensor for path, tensor in owned.items() if self._whole or path in wanted}
        size = sum(nbytes(copied.values()))
        try:
            place = self._place_for(size)
        except NoMemoryForCopies as none:
            self._say(
                f"no memory for a copy of what may have to be undone ({none}): a failure in this unit costs this rank"
            )
            copied, place, self._whole = {}, None, False
        if exactly:
            refuse_freed({**now, **copied})
        self._copies.keep_only([*held, *now, *copied])
        taken = self._copies.take(now) + self._copies.take(copied, place)
        self._state_keys = self._state.optimizer_keys() if self._whole else {}
        self._begun_tensors = {path: owned[path] for path in owned if path not in copied} if looks else {}
        self._begun = self._digests_at_begin(self._begun_tensors) if looks else {}
        self._first = digests_by_path({**owned, **tensors}) if self._everywhere else {}
        self._print_cost(taken, time.perf_counter() - began, {**now, **copied})

    def digests_ahead(self) -> Mapping[str, int]:
        """Return digests by path for the beginning of the next attempt at an abandoned unit, computed while this rank
        waits for others. Empty if that attempt needs none, as after a rollback: nothing is suspect then."""
        if not self._places or self._filled != self._state.filled:
            return {}
        if self._ahead[0] != self._state.filled:
            self._ahead = self._state.filled, digests_by_path(self._owned())
        return self._ahead[1]

    def _digests_at_begin(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """Return digests of ``tensors``: those of `digests_ahead`, if they are still valid."""
        (filled, ahead), self._ahead = self._ahead, (-1, {})
        known = ahead if filled == self._state.filled and tensors.keys() <= ahead.keys() else {}
        return {path: known[path] for path in tensors} if known else digests_by_path(tensors)

    def _place_for(self, size: int) -> torch.device | None:
        """Return the device for ``size`` bytes of copies; None for 0 bytes. Raises `NoMemoryForCopies`."""
        if size > self._place[0]:
            first = self._whole and not self._phase and not self._state.lineage.changes.parts
            self._place = size, place_for(size, self._state.device, on_host=first)
        return self._place[1] if size else None

    def _has_room(self) -> bool:
        """Whether there is room for copies of all parameters that optimizers train where they are."""
        try:
            return place_for(self._trained_bytes, self._state.device) is None
        except NoMemoryForCopies:
            return False

    def _check_between(self, free: Mapping[str, torch.Tensor]) -> None:
        """Find what has changed since the unit before, if that was audited or the script has accessed something."""
        self._changed_between = ""
        self.accesses.compare_between()
        if self._ended:
            ended, self._ended = self._ended, {}
            now = digests_by_path({path: t for path, t in {**self._owned(), **free}.items() if path in ended})
            for path, digest in now.items():
                if digest != ended[path]:
                    self._changed_between = path

    def _changed_unseen(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor differs from its copy or digest although its version has not moved."""
        if path in self._static:
            return digests_by_path({path: tensor})[path] != self._static[path]
        return self._copies.stands(path, tensor) and not self._copies.equals(path, tensor)

    # -- where it may be left
    def at_place(self, *, updates_next: bool = False) -> None:
        """Note a place of the step at which it is left if it will not count, so that all its changes so far must be
        restorable.

        At the place where the attempt before was left, this attempt has made the same changes as that one; they are
        compared. ``updates_next``: `before_update` follows without any code of the script between, and does the
        comparison.
        """
        compares = self._places.reach(updates_next=updates_next)
        if self._everywhere:
            changed = self._differing(self._first, {**self._owned(), **self._free_tensors()})
            early = {path for path in changed if self._is_owned(path)}
            self._learn(early=early, moving=changed - early)
        if compares:
            self._compare_with_the_attempt_before()

    def _compare_with_the_attempt_before(self) -> None:
        """Find tensors that this attempt has changed without a new version. The abandoned attempt changed them, too.

        Tensors whose version has moved now are left out: in the abandoned attempt it had not (`discard` would have
        found it), so that attempt had not come so far. The same holds for what was accessed through ``.data``. Of what
        optimizers hold, the tensors of the beginning are compared: `discard` has put them back where the abandoned
        attempt had replaced them.
        """
        held = {path: self._begun_tensors[path] for path in self._begun if path not in self._parameters}
        early = self._differing(self._begun, {**self._owned(), **held}) - self._moved()
        self._found_early |= {path for path in early if not self._copies.is_fresh(path) and path not in self.accesses}
        self._learn(early=early)

    def before_update(self) -> None:
        """Find what optimizers train or hold and has changed already, right before the first optimizer step or at the
        gate of a step without one: from now on it is copied when a step begins."""
        if self._phase:
            return
        owned = self._owned() if self._audits else {}
        early = self._moved() | self.accesses.changed_early()
        if self._audits:
            early |= self._differing(self._begun, owned)
        if self._whole and self._audits:
            early |= {path for path in owned if path in self._copies and not self._copies.equals(path, owned[path])}
        if self._places.is_due_before_update():
            self._compare_with_the_attempt_before()
        self._learn(early=early)

    def not_put_back(self) -> list[str]:
        """Return the paths of tensors that this attempt has changed so far and that the abandoned attempt before it
        must have changed as well, without a copy.

        To be called after `before_update`. If there are any, this rank's state is of no use.
        """
        return sorted(self._found_early)

    def check_gradients(self) -> None:
        """Raise `StepError` if gradients of an older step are still in the sum (`GradientsAtBegin.check_cleared`)."""
        self._gradients.check_cleared(self._state.trained)

    # -- it counts
    def ended(self) -> None:
        """Learn what the committed unit has changed. Nothing has happened since its end."""
        self._nothing_is_suspect()
        self.accesses.end()
        if not self._phase:
            self._learn(early=self.accesses.changed_early_too())
        self._held, self._begun_tensors = {}, {}  # frees what the unit has removed
        if not self._marks and not self._audits and not self._phase:
            return
        self._between.dicts_at_end = dicts = self._state.state_dicts()
        free = self._free_tensors(dicts)
        moving = self._moved_of_none(free)
        owned = self._owned() if self._audits else {}
        if self._audits:
            moving |= self._differing(self._static, free)
            fresh = [path for path in self._marks if path in free and self._copies.is_fresh(path)]
            moving |= {path for path in fresh if not self._copies.equals(path, free[path])}
        if self._phase:
            self._phase_runs[self._phase] = self._phase_runs.get(self._phase, 0) + 1
            changed = self._moved() | moving
            if self._audits:
                changed |= self._differing(self._begun, owned)
                changed |= {p for p in owned if self._copies.is_fresh(p) and not self._copies.equals(p, owned[p])}
            self._learn(phase=changed)
            if changed:
                self._find_tensors_at_end()
        else:
            self._learn(moving=moving)
        for path in moving:
            self._static.pop(path, None)
        if self._audits:
            self._find_tensors_at_end()  # the unit may have replaced a tensor by another
            self._ended = digests_by_path({**self._owned(), **self._free_tensors(dicts)})
            self._static |= {path: digest for path, digest in self._ended.items() if path in self._static}

    def _find_tensors_at_end(self) -> None:
        """Find the tracked tensors at the end of a unit. Shards FSDP2's parameters again first: a forward pass without
        a backward pass leaves them whole."""
        fsdp.reshard(self._state.structure().fsdp)
        self._find_tensors(self._state.structure())

    # -- it does not
    def discard(self, *, backward_open: bool) -> list[str]:
        """Put back what the abandoned unit has changed: gradients, buffers, scaler, scheduler, intermediate state of
        FSDP and DDP, and everything that was copied.

        ``backward_open``: the unit was left before all of its backward passes had ended. Returns the paths of what it
        has changed without a copy, sorted; if there are any, this rank's state is of no use.
        """
        self.accesses.end()
        for module, training in zip(self._submodules, self._modes, strict=True):
            module.training = training
        self._gradients.require_again()
        with torch.no_grad():
            fsdp.reset(self._state.structure().fsdp)
            for wrapper in self._state.wrappers() if backward_open else ():
                ddp.reset(wrapper)
            self._gradients.clear(self._state.parameters())
        for name, objects in self._held.items():
            put_held_objects(self._state.optimizers[name], objects)
        self._state.put_groups(self._saved_plain)  # the paths of what optimizers hold are those of the unit's beginning
        paths = self._not_restorable()
        for other in self._state.others.values():
            if isinstance(other, ScalerState):
                other.forget_unscaled()
            elif hasattr(
                other, "_per_optimizer_states"
            ):  # a scaler of the script's own, which keeps its unscaled optimizers as torch's does
                other._per_optimizer_states.clear()
        self._put_back()
        if not self._phase and not self._whole and not self._begun:
            self._places.leave()
        return paths

    def _not_restorable(self) -> list[str]:
        """Return the sorted paths of tensors that the unit has changed and of which there is no copy from its
        beginning."""
        free = self._free_tensors()
        paths = {path for path in self._moved() if not self._copies.is_fresh(path)} | self.accesses.changed()
        paths |= self._marks.keys() - free.keys()
        moved = self._moved_of_none(free)
        for path in self._marks.keys() - moved:
            held = path in self._copies and not self._copies.is_fresh(path)
            if held and not self._copies.equals(path, free[path]):
                paths.add(path)  # written through ``.data``, in this unit or in one before it
        paths |= self._differing(self._static, free)
        if self._begun:
            differing = self._differing(self._begun, self._owned())
            paths |= {path for path in differing if not self._copies.is_fresh(path)}
        return sorted(paths)

    def _put_back(self) -> None:
        changed = False
        for path, tensor in self._free_tensors().items():
            if path in self._copies and not self._copies.equals(path, tensor):
                changed = True
                self._copies.put_back(path, tensor)
        copied = [path for path in self._copies if self._copies.is_fresh(path) and self._state.is_settled(path)]
        copied = [path for path in copied if path not in self._free_parameters]
        listed: dict[str, torch.Tensor] = {}
        if copied:
            if self._whole:
                self._state.keep_optimizer_keys(self._state_keys)
            owned = self._owned()
            for path in copied:
                if path in owned and self._copies.equals(path, owned[path]):
                    continue  # no write, because a snapshot of the step before may still be copying
                if path in owned and self._copies.put_back(path, owned[path]):
                    continue
                value = self._copies.value(path).clone()
                if self._state.is_listed(path):
                    listed[path] = value
                else:
                    self._state.put_owned(path, value)
        if changed or listed or self._state.encode_plain() != self._saved_plain:
            values = {path: self._copies.value(path).clone() for path in self._copies if self._is_others(path)}
            self._state.put_plain(self._saved_plain, {**values, **listed})

    def _nothing_is_suspect(self) -> None:
        self._places.clear()
        self._ahead = -1, {}

    def may_be_left(self) -> bool:
        """Whether the current phase may be left at this point, because all its changes so far can be put back.

        Decided by content: a phase that exchanges weights through ``.data`` for a while and puts them back itself was
        never seen to change any.
        """
        return self._whole or not self._not_restorable()

    @property
    def trained_bytes(self) -> int:
        """Bytes of what optimizers train and hold on this rank."""
        return sum(nbytes(self._owned().values()))

    # -- helpers
    def _owned(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of what optimizers train and hold, by path, also while FSDP2 has gathered whole
        parameters."""
        parts = local_parts(self._parameters.values())
        return {**dict(zip(self._parameters, parts, strict=True)), **self._state.held_by_optimizers()}

    def _is_owned(self, path: str) -> bool:
        return path in self._parameters or path.split("/", 2)[:2] in self._kinds_of_state()

    def _kinds_of_state(self) -> list[list[str]]:
        return [[name, "state"] for name in self._state.optimizers]

    def _moved(self) -> set[str]:
        """Return the paths of parameters that optimizers train and whose version has moved since the unit began."""
        now = versions_of_plain(self._trained) if self._are_plain else versions(self._trained)
        if now == self._versions:
            return set()
        compared = zip(self._parameters, self._versions, now, strict=True)
        return {path for path, before, after in compared if before != after}

    def _moved_of_none(self, free: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the paths of tensors in ``free`` that were not known to change and whose address or version has
        changed since the unit began, or that are gone."""
        there = [path for path in self._marks if path in free]
        found = zip(there, marks([free[path] for path in there]), strict=True)
        return (self._marks.keys() - there) | {path for path, mark in found if mark != self._marks[path]}

    def _differing(self, known: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the paths of ``tensors`` whose digests differ from those in ``known``."""
        here = {path: tensors[path] for path in known if path in tensors}
        return {path for path, digest in digests_by_path(here).items() if digest != known[path]}

    def _learn(
        self, early: Collection[str] = (), moving: Collection[str] = (), phase: Collection[str] | None = None
    ) -> None:
        """Add newly found changes to the state's lineage: before a gate (``early``), of tensors that no optimizer
        trains (``moving``), in the current phase (``phase``)."""
        if not early and not moving and not phase:
            return
        known = self._state.lineage.changes
        found = ChangedTensors(tuple(early), tuple(moving), {self._phase: tuple(phase)} if phase else {})
        learned = known.union(found)
        if learned != known:
            self._state.lineage = msgspec.structs.replace(self._state.lineage, changes=learned)

    def _print_cost(self, taken: int, seconds: float, copied: Mapping[str, torch.Tensor]) -> None:
        """Print the cost of the copies, the first time and whenever their size has grown."""
        changes = self._state.lineage.changes
        known = [path for path in (*changes.early, *changes.moving) if path in copied]
        size = sum([copied[path].nbytes for path in known])
        if self._phase or self._whole or size <= max(_SMALL_BYTES, self._told_bytes):
            return
        self._told_bytes = size
        early = f" ({changes.early[0]} even before optimizer.step())" if changes.early else ""
        self._say(
            f"a step changes {len(known)} tensors, such as {known[0]}, where it may have to be undone{early}: they are copied when a step "
            f"begins ({taken / 2**20:.1f} MiB, {seconds * 1000:.1f} ms)"
        )

    def _is_others(self, path: str) -> bool:
        return path.split("/", 1)[0] in self._state.others

    def _always(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the paths of tensors that are copied whether or not they were seen to change: small ones, and
        statistics of batch norm.

        torch's batch norm writes its statistics without a new version, and a custom kernel may do the same. ``sizes``:
        path -> bytes of tensors that no optimizer trains.
        """
        small = {path for path, size in sizes.items() if size <= _SMALL_BYTES}
        return (small | (self._structure.norm_buffers & sizes.keys())) - self._free_parameters.keys()

    def _free_tensors(
        self, dicts: Mapping[str, Any] | None = None, structure: ModuleStructure | None = None
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of each tensor that no optimizer trains, by path. ``dicts`` and ``structure``: just
        read from `TrackedState`; None reads them."""
        structure = structure or self._state.structure()
        own: dict[str, torch.Tensor] = dict(self._free_parameters)
        for path, buffer in zip(structure.buffer_paths, structure.buffers, strict=True):
            name, _, rest = path.partition("/")
            own[f"{name}/buffer/{rest}"] = buffer
        found = dict(zip(own, local_parts(own.values()), strict=True)) if own else own
        for name, optimizer in self._state.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/group/{index}/{key}"] = value
        for name, held in (self._state.state_dicts() if dicts is None else dicts).items():
            found.update(flatten(f"{name}/state", held))
        return found
