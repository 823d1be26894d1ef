"""What a unit changes before its gate, and how it is put back when the unit will not count.

Every tracked tensor is either *copied* when a unit begins, or known by a *digest*, or trusted until a unit is abandoned:

- Copied: small buffers and small tensors of other tracked objects, always. What no optimizer trains (a moving average, a momentum encoder, a
  codebook, a queue), once it was seen to change in a step, wherever: a step that skips its optimizer has its gate at the end, after all
  that. What an optimizer trains, once it was seen to change before a gate. And everything in the first step, in steps of several parts
  (`rackrun.worker.steps.multi_part_steps`), and in phases until it is known what they change.
- Known by a digest: large, of no optimizer, and never seen to change (a frozen model). When a unit is abandoned it is digested again.
- Trusted: what optimizers train. It changes after the gate only, as far as versions and audits tell. When a unit was abandoned, the next
  attempt at it is audited: the same code with the same numbers writes the same tensors. What is changed before the gate then was changed in
  the attempt before, too, so this rank's state is not what it is held to be, and no gate is passed.

A tensor's version that has moved proves a change; one that stands proves nothing (``.data``, a kernel of the script's own). So in the first
three steps, and then in ever fewer, everything is *audited*: digests at the beginning, at the gate, and at the end.

Versions at the gate only tell which tensors to copy in later steps, so most steps do without: a unit that is abandoned asks for them itself.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress, islice
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from rackrun.errors import StepError
from rackrun.worker.state.module_structure import Structure
from rackrun.worker.state.plain_values import flatten
from rackrun.worker.state.scaler_state import ScalerState
from rackrun.worker.state.state_manifest import Changes
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import refuse_freed
from rackrun.worker.tensors.tensor_bytes import digests_by_path
from rackrun.worker.tensors.tensor_lists import Mark, local_parts, marks, nbytes, same_objects, versions
from rackrun.worker.tensors.undo_copies import NoRoom, UndoCopies, place_for
from rackrun.worker.torch_compat import zero_grad
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp

__all__ = ["Undo", "changed_between"]

_SMALL_BYTES = 2**20
_GRADS_LOOKED_AT = 3
_PHASE_RUNS_COPIED = 3
"""So often a phase begins with a copy of everything, before it is believed to change what it has changed so far."""
_ROOM_FOR_UNKNOWN = 2
_ROOM_BYTES = 64 * 2**20
"""What no optimizer trains and nobody has seen change is copied once, too, unless it is more than this, and so many times larger than what
optimizers train."""

_TRAINING, _REQUIRES_GRAD, _GRAD = attrgetter("training"), attrgetter("requires_grad"), attrgetter("grad")


class _Look(NamedTuple):
    """The tracked state as it was found at one moment between two units."""

    filled: int
    structure: Structure
    dicts: dict[str, Any]
    """As `TrackedState.state_dicts`."""
    plain: bytes
    of_parameters: list[int]
    """Their versions."""


class Undo:
    """``say`` tells, once, what copies cost."""

    def __init__(  # noqa: PLR0915 - what there is at the start, one line each
        self, state: TrackedState, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._state, self._say = state, say
        self._copies = UndoCopies()
        self._filled = -1
        self._structure = Structure({})
        self._made_of: Structure | None = None
        """What modules were made of when the last unit began."""
        self._trained_objects: list[torch.Tensor] = []
        self._phase = ""
        self._whole = self._audits = False
        """In the unit in hand: everything that optimizers train is copied; what it changes is to be learned from its content."""
        self._closely = True
        """In the unit in hand: what it changes before its gate is to be learned from versions."""
        self._suspect_at: set[int] = set()
        """Attempts were abandoned at these places, and nothing has shown yet that they had left alone what is not copied."""
        self._suspect_everywhere = False
        """This rank has other micro-batches than they had: their places say nothing."""
        self._places = 0
        """Where the attempt in hand might have been left, so far."""
        self._owes_comparison = False
        """Of the place that the attempt in hand is at."""
        self._everywhere = False
        self._share: tuple[float, ...] = ()
        self._parameters: dict[str, nn.Parameter] = {}
        """That optimizers train."""
        self._free_parameters: dict[str, nn.Parameter] = {}
        """All others."""
        self._trained_bytes = 0
        """Of the parameters."""
        self._versions: list[int] = []
        """Of what optimizers train, when the unit began."""
        self._marks: dict[str, Mark] = {}
        """Of what no optimizer trains, and is not known to change: address and version when the unit began."""
        self._static: dict[str, int] = {}
        """Of that, the digests of what there is no room to copy, from whenever they were taken."""
        self._first: dict[str, int] = {}
        """The same of everything, in a first step."""
        self._begun: dict[str, int] = {}
        """Digests when the unit began of what optimizers train, where they are asked for."""
        self._ahead: tuple[int, dict[str, int]] = -1, {}
        """Those of the attempt to come, and how often the state was filled by then."""
        self._ended: dict[str, int] = {}
        """Of everything, at the end of the unit before, when that was audited."""
        self._found_early: set[str] = set()
        self.changed_between = ""
        """Something that had another content at the end of the unit before than when the one in hand began: where all ranks see that it is
        the script, and where one does it may be its memory."""
        self._phase_runs: dict[str, int] = {}
        self._place: tuple[int, torch.device | None] = 0, None
        self._told_bytes = 0
        self._state_keys: dict[str, dict[int, set[str]]] = {}
        self._saved_plain = b""
        self._submodules: Sequence[nn.Module] = ()
        self._modes: list[bool] = []
        self._begun_with: Sequence[torch.Tensor] = ()
        """All parameters when the unit began, and of each in turn:"""
        self._requires_grad: list[bool] = []
        self._had_grads: list[bool] = []
        self._grads_found: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []
        """A few that some older unit has left, not cleared since."""
        self._cleared = 0
        """How often gradients had been cleared when the unit began."""
        self._stands: tuple[bytes, list[int], list[int], list[Any], int] = b"", [], [], [], -1
        self._looked_at: _Look | None = None
        """By `check_stands`, for the unit that begins next."""
        self._dicts_at_end: dict[str, Any] | None = None
        """What `ended` was given by tracked objects, for `committed`, which comes before any code of the script's."""

    # -- between units
    def committed(self) -> None:
        """A unit is over. Until the next one begins, nothing tracked may change: what a step does is all that is done again."""
        dicts, self._dicts_at_end = self._dicts_at_end, None
        structure = self._state.structure(glance=True)
        plain = self._state.encode_plain(dicts, structure)
        of_parameters, of_buffers = structure.versions(), versions(structure.buffers)
        self._stands = plain, of_parameters, of_buffers, self._state.scaler_marks(), self._state.filled

    def accept(self) -> None:
        """The loop is over: what the script has done to tracked state since is the state now."""
        self.committed()
        self._ended.clear()

    def check_stands(self, *, glance: bool = False) -> None:
        """Raises `StepError` when it has, as far as versions tell; `begin` looks at the content, now and then. ``glance``: as `TrackedState.structure`."""
        if changed := self.changed_since(glance=glance):
            raise changed_between(changed)

    def changed_since(self, *, glance: bool = False) -> str:
        """What has changed since the last unit was over, as far as versions tell. "": nothing. ``glance``: as `TrackedState.structure`."""
        plain, of_parameters, of_buffers, of_scalers, filled = self._stands
        self._looked_at = None
        if filled != self._state.filled or not of_parameters:
            return ""
        structure = self._state.structure(glance=glance)
        found = structure.versions()
        if of_parameters != found:
            return "a parameter"
        if of_buffers != versions(structure.buffers):
            return "a buffer (by a forward in training mode, perhaps)"
        dicts = self._state.state_dicts()
        now = self._state.encode_plain(dicts, structure)
        if plain != now or of_scalers != self._state.scaler_marks():
            return "tracked state (a scheduler, an optimizer setting, ...)"
        self._looked_at = _Look(filled, structure, dicts, now, found)
        return ""

    # -- a unit begins
    def begin(
        self,
        *,
        whole: bool = False,
        audit: bool = False,
        phase: str = "",
        everywhere: bool = False,
        closely: bool = True,
        share: tuple[float, ...] = (),
    ) -> None:
        """Remember what the unit may change. ``whole``: everything, if there is memory for it. ``audit``: learn from content what it
        changes, and ``everywhere`` at each place where it may be left, not at its gate alone. ``closely``: learn from versions what it changes
        before its gate. ``phase``: its name. ``share``: what decides how many micro-batches this rank has."""
        self._phase, self._dicts_at_end = phase, None
        self._closely = closely
        runs = self._phase_runs.get(phase, 0)
        self._audits = audit or (bool(phase) and (runs < _PHASE_RUNS_COPIED or not runs & (runs - 1)))
        self._whole = whole or (bool(phase) and runs < _PHASE_RUNS_COPIED)
        look = self._look()
        self._check_made_of(look.structure)
        if self._filled != self._state.filled or not same_objects(self._trained_objects, self._state.trained()):
            self._forget(look)
        for wrapper in self._state.wrappers():
            ddp.begin(wrapper)
        fsdp.begin(look.structure.fsdp)
        if look.structure.fsdp:
            shards = self._state.structure()
            look = look._replace(structure=shards, of_parameters=shards.versions())  # from here on
        looks = self._audits or self._whole or look.structure is not self._structure
        if self._audits or look.structure is not self._structure:
            self._look_around(look.structure)
        self._places, self._everywhere, self._owes_comparison = 0, everywhere, False
        if share != self._share:
            self._share, self._suspect_everywhere = share, bool(self._suspect_at)
        self._saved_plain, parameters = look.plain, look.structure.parameters
        self._modes = list(map(_TRAINING, self._submodules))
        self._found_early.clear()
        self._take(look, exactly=looks)
        own = self._free_parameters
        self._versions = versions(self._parameters.values()) if own else look.of_parameters
        self._begun_with, self._requires_grad = parameters, list(map(_REQUIRES_GRAD, parameters))
        gradients = list(map(_GRAD, parameters))
        self._had_grads = [gradient is not None for gradient in gradients]
        found = compress(zip(parameters, gradients, strict=True), self._had_grads)
        some = islice(found, _GRADS_LOOKED_AT if zero_grad.some_are_left() else 0)
        self._grads_found = [(parameter, weakref.ref(gradient)) for parameter, gradient in some]
        self._cleared = zero_grad.cleared()

    def _look(self) -> _Look:
        known, self._looked_at = self._looked_at, None
        if known is not None and known.filled == self._state.filled:
            return known
        structure, dicts = self._state.structure(), self._state.state_dicts()
        plain = self._state.encode_plain(dicts, structure)
        return _Look(self._state.filled, structure, dicts, plain, structure.versions())

    def _check_made_of(self, structure: Structure) -> None:
        """Raises `StepError` when a unit has changed what modules are made of."""
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

    def _forget(self, look: _Look) -> None:
        """The state was filled from outside, or optimizers train other parameters than they did."""
        self._filled, self._trained_objects = self._state.filled, self._state.trained()
        self._copies.clear()
        self._static.clear()
        self._ended.clear()
        self._nothing_is_suspect()
        fsdp.reshard(look.structure.fsdp)
        self._look_around(self._state.structure())

    def _look_around(self, structure: Structure) -> None:
        """Which tensors there are, but for those that are asked for in every unit."""
        self._structure, self._submodules = structure, structure.modules
        self._parameters, self._free_parameters = self._state.trained_and_free()
        self._trained_bytes = sum(nbytes(self._parameters.values()))

    def _take(self, look: _Look, *, exactly: bool) -> None:
        """Copies and digests of the state as it is now. ``exactly``: every storage is asked for its size first, not for its address alone."""
        began = time.perf_counter()
        changes = self._state.lineage.changes
        wanted = {*changes.early, *changes.moving, *changes.phases.get(self._phase, ())}
        free = self._free_tensors(look.dicts, look.structure)
        sizes = dict(zip(free, nbytes(free.values()), strict=True))
        known = wanted | self._always(sizes)
        unknown = [path for path in free if path not in known]
        unseen = sum([sizes[path] for path in unknown])
        room = unseen <= max(_ROOM_FOR_UNKNOWN * self._trained_bytes, _ROOM_BYTES)
        self._check_between(free)
        self._learn(moving=[path for path in unknown if self._changed_unseen(path, free[path])] if self._audits else ())
        self._copies.begin()
        tensors = {path: free[path] for path in unknown}
        self._marks = dict(zip(unknown, marks(tensors.values()), strict=True))
        held = tensors if room else {}
        again = set(held if self._audits or self._whole else self._copies.outdated(held))
        now = {path: tensor for path, tensor in free.items() if path in known or path in again}
        digested = [] if room else [path for path in unknown if self._audits or path not in self._static]
        self._static = {path: self._static[path] for path in unknown if not room and path in self._static}
        self._static |= digests_by_path({path: free[path] for path in digested})
        owned: dict[str, torch.Tensor] = {}
        if self._whole or self._audits or self._suspect_at or self._phase or wanted - free.keys():
            owned = self._owned()
        copied = {path: tensor for path, tensor in owned.items() if self._whole or path in wanted}
        size = sum(nbytes(copied.values()))
        try:
            place = self._place_for(size)
        except NoRoom as none:
            self._say(
                f"no memory for a copy of what may have to be undone ({none}): a failure in this unit costs this rank"
            )
            copied, place, self._whole = {}, None, False
        if exactly:
            refuse_freed({**now, **copied})
        self._copies.keep_only([*held, *now, *copied])
        taken = self._copies.take(now) + self._copies.take(copied, place)
        self._state_keys = self._state.optimizer_keys() if self._whole else {}
        looks = self._audits or bool(self._suspect_at) or bool(self._phase)
        self._begun = self._digests_at_begin({p: t for p, t in owned.items() if p not in copied}) if looks else {}
        self._first = digests_by_path({**owned, **tensors}) if self._everywhere else {}
        self._tell(taken, time.perf_counter() - began, {**now, **copied})

    def digests_ahead(self) -> Mapping[str, int]:
        """The digests with which the next attempt at an abandoned unit will begin, taken while this rank waits for others. Empty where that
        attempt needs none."""
        if not self._suspect_at:
            return {}
        if self._ahead[0] != self._state.filled:
            self._ahead = self._state.filled, digests_by_path(self._owned())
        return self._ahead[1]

    def _digests_at_begin(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        (filled, ahead), self._ahead = self._ahead, (-1, {})
        known = ahead if filled == self._state.filled and tensors.keys() <= ahead.keys() else {}
        return {path: known[path] for path in tensors} if known else digests_by_path(tensors)

    def _place_for(self, size: int) -> torch.device | None:
        """Raises `NoRoom`."""
        if size > self._place[0]:
            first = self._whole and not self._phase and not self._state.lineage.changes.parts
            self._place = size, place_for(size, self._state.device, on_host=first)
        return self._place[1] if size else None

    def _check_between(self, free: Mapping[str, torch.Tensor]) -> None:
        """What has changed since the end of the unit before, if that was audited."""
        self.changed_between = ""
        if self._ended:
            ended, self._ended = self._ended, {}
            now = digests_by_path({path: t for path, t in {**self._owned(), **free}.items() if path in ended})
            for path, digest in now.items():
                if digest != ended[path]:
                    self.changed_between = path

    def _changed_unseen(self, path: str, tensor: torch.Tensor) -> bool:
        """Since it was copied or digested, though its version stands."""
        if path in self._static:
            return digests_by_path({path: tensor})[path] != self._static[path]
        return self._copies.stands(path, tensor) and not self._copies.equals(path, tensor)

    # -- where it may be left
    def at_place(self, *, updates_next: bool = False) -> None:
        """At each place of a step where it is left if it will not count: what it has changed so far must be put back. At the place where
        the attempt before was left this one has changed what that had. ``updates_next``: `before_update` follows, with no code of the
        script's between, and compares."""
        self._places += 1
        if self._everywhere:
            changed = self._differing(self._first, {**self._owned(), **self._free_tensors()})
            early = {path for path in changed if self._is_owned(path)}
            self._learn(early=early, moving=changed - early)
        suspect = self._suspect_everywhere or bool({self._places, self._places - 1} & self._suspect_at)
        self._owes_comparison = suspect and updates_next
        if suspect and not updates_next:
            self._compare_with_the_attempt_before()

    def _compare_with_the_attempt_before(self) -> None:
        """Where a version moves now, it stood in that attempt: it had not come so far."""
        early = self._differing(self._begun, self._owned()) - self._moved()
        self._found_early |= {path for path in early if not self._copies.is_fresh(path)}
        self._learn(early=early)

    def before_update(self) -> None:
        """Right before the first optimizer step of a step, or at its gate when it makes none: what optimizers train and has changed
        until here changes early."""
        if self._phase:
            return
        owned = self._owned() if self._audits else {}
        early = self._moved() if self._closely or self._audits else set[str]()
        if self._audits:
            early |= self._differing(self._begun, owned)
        if self._whole and self._audits:
            early |= {path for path in owned if path in self._copies and not self._copies.equals(path, owned[path])}
        if self._owes_comparison or (self._suspect_at and self._places <= max(self._suspect_at)):
            self._owes_comparison = False
            self._compare_with_the_attempt_before()
        self._learn(early=early)

    def not_put_back(self) -> list[str]:
        """After `before_update`: what this attempt has changed so far, and the one before it, which was abandoned, must have changed as
        well, and nobody had copied. This rank's state is of no use then."""
        return sorted(self._found_early)

    def check_gradients(self) -> None:
        """Before the first optimizer step of a unit. Raises `StepError` when gradients of an older step are still in the sum, the one before or,
        where some make no optimizer step, any: the unit could not be repeated, because nobody has kept them."""
        if zero_grad.cleared() == self._cleared and any(
            parameter.grad is found() for parameter, found in self._grads_found
        ):
            raise StepError(
                "gradients of an older step were not cleared, so this step adds to them, and could not be repeated.",
                remedy="call optimizer.zero_grad() in every step; to accumulate, use smaller micro-batches of one global batch.",
            )

    # -- it counts
    def ended(self) -> None:
        """The unit is committed, and nothing has happened since: learn what it has changed."""
        self._nothing_is_suspect()
        if not self._marks and not self._audits and not self._phase:
            return
        self._dicts_at_end = self._state.state_dicts()
        free = self._free_tensors(self._dicts_at_end)
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
                self._look_around_at_end()
        else:
            self._learn(moving=moving)
        for path in moving:
            self._static.pop(path, None)
        if self._audits:
            self._look_around_at_end()  # the unit may have exchanged a tensor for another
            self._ended = digests_by_path({**self._owned(), **self._free_tensors(self._dicts_at_end)})
            self._static |= {path: digest for path, digest in self._ended.items() if path in self._static}

    def _look_around_at_end(self) -> None:
        """A forward without a backward has left whole parameters of FSDP2 where the shards belong."""
        fsdp.reshard(self._state.structure().fsdp)
        self._look_around(self._state.structure())

    # -- it does not
    def discard(self, *, backward_open: bool) -> list[str]:
        """Put back what the abandoned unit has changed: gradients, buffers, scaler, scheduler, FSDP's and DDP's intermediate state, and
        all that was copied. Returns what it has changed without a copy: then this rank's state is of no use.

        ``backward_open``: it was left before all of its backward passes had ended.
        """
        for module, training in zip(self._submodules, self._modes, strict=True):
            module.training = training
        for parameter, requires_grad in zip(self._begun_with, self._requires_grad, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        with torch.no_grad():
            fsdp.reset(self._state.structure().fsdp)
            for wrapper in self._state.wrappers() if backward_open else ():
                ddp.reset(wrapper)
            had = dict(zip(map(id, self._begun_with), self._had_grads, strict=True))
            for parameter in self._state.parameters():
                if parameter.grad is not None:
                    if had.get(id(parameter)):
                        parameter.grad.zero_()
                    else:
                        parameter.grad = None
        zero_grad.nothing_is_left()
        torn = self._torn()
        for other in self._state.others.values():
            if isinstance(other, ScalerState):
                other.forget_unscaled()
            elif hasattr(
                other, "_per_optimizer_states"
            ):  # a script's own, which keeps what it unscaled as torch's does
                other._per_optimizer_states.clear()
        self._put_back()
        if not self._phase and not self._whole and not self._begun:
            self._suspect_at.add(self._places)
        return torn

    def _torn(self) -> list[str]:
        free = self._free_tensors()
        torn = {path for path in self._moved() if not self._copies.is_fresh(path)}
        torn |= self._marks.keys() - free.keys()
        moved = self._moved_of_none(free)
        for path in self._marks.keys() - moved:
            held = path in self._copies and not self._copies.is_fresh(path)
            if held and not self._copies.equals(path, free[path]):
                torn.add(path)  # through ``.data``: in this unit, or in one before it
        torn |= self._differing(self._static, free)
        if self._begun:
            torn |= self._differing(self._begun, self._owned())
        return sorted(torn)

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
                    continue  # nothing is written: a snapshot of the step before may be in the making
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
        self._suspect_at.clear()
        self._suspect_everywhere = False

    def may_be_left(self) -> bool:
        """Whether the phase in hand may be left at this point: what it has changed so far can be put back. Told by content: a phase that
        exchanges weights through ``.data`` for a while, and puts them back itself, was never seen to change any."""
        return self._whole or not self._torn()

    @property
    def trained_bytes(self) -> int:
        """Of what optimizers train, and hold for it, on this rank."""
        return sum(nbytes(self._owned().values()))

    # -- helpers
    def _owned(self) -> dict[str, torch.Tensor]:
        """What optimizers train, and hold for it: this rank's part, also while FSDP2 has gathered the whole."""
        parts = local_parts(self._parameters.values())
        return {**dict(zip(self._parameters, parts, strict=True)), **self._state.held_by_optimizers()}

    def _is_owned(self, path: str) -> bool:
        return path in self._parameters or path.split("/", 2)[:2] in self._kinds_of_state()

    def _kinds_of_state(self) -> list[list[str]]:
        return [[name, "state"] for name in self._state.optimizers]

    def _moved(self) -> set[str]:
        """What optimizers train, and has another version than when the unit began."""
        now = versions(self._parameters.values())
        if now == self._versions:
            return set()
        compared = zip(self._parameters, self._versions, now, strict=True)
        return {path for path, before, after in compared if before != after}

    def _moved_of_none(self, free: Mapping[str, torch.Tensor]) -> set[str]:
        """The same of what no optimizer trains, and was not known to change."""
        there = [path for path in self._marks if path in free]
        found = zip(there, marks([free[path] for path in there]), strict=True)
        return (self._marks.keys() - there) | {path for path, mark in found if mark != self._marks[path]}

    def _differing(self, known: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """From what was digested."""
        here = {path: tensors[path] for path in known if path in tensors}
        return {path for path, digest in digests_by_path(here).items() if digest != known[path]}

    def _learn(
        self, early: Collection[str] = (), moving: Collection[str] = (), phase: Collection[str] | None = None
    ) -> None:
        if not early and not moving and not phase:
            return
        known = self._state.lineage.changes
        found = Changes(tuple(early), tuple(moving), {self._phase: tuple(phase)} if phase else {})
        learned = known.union(found)
        if learned != known:
            self._state.lineage = msgspec.structs.replace(self._state.lineage, changes=learned)

    def _tell(self, taken: int, seconds: float, copied: Mapping[str, torch.Tensor]) -> None:
        """Once, and when it has become more."""
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
        """Those that are copied whether or not they were seen to change. torch's batch norm writes its statistics without counting up their
        version; and who knows what a custom kernel does. ``sizes``: path -> bytes, of what no optimizer trains."""
        small = {path for path, size in sizes.items() if size <= _SMALL_BYTES}
        return (small | (self._structure.norm_buffers & sizes.keys())) - self._free_parameters.keys()

    def _free_tensors(
        self, dicts: Mapping[str, Any] | None = None, structure: Structure | None = None
    ) -> dict[str, torch.Tensor]:
        """What no optimizer trains: this rank's part of each. Both: of `TrackedState`, from just now."""
        structure = structure or self._state.structure()
        own: dict[str, torch.Tensor] = dict(self._free_parameters)
        for path, buffer in zip(structure.buffer_paths, structure.buffers, strict=True):
            name, _, rest = path.partition("/")
            own[f"{name}/buffer/{rest}"] = buffer
        found = dict(zip(own, local_parts(own.values()), strict=True))
        for name, optimizer in self._state.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/group/{index}/{key}"] = value
        for name, held in (self._state.state_dicts() if dicts is None else dicts).items():
            found.update(flatten(f"{name}/state", held))
        return found


def changed_between(what: str) -> StepError:
    """What a script is told that has done it."""
    return StepError(
        f"{what} was changed between two steps, where it is lost when a step is done again.",
        remedy="change tracked state inside the @run.step function (scheduler.step() after optimizer.step()), or in a phase.",
    )
