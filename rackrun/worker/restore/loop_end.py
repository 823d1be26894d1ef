"""Keeps the state as the loop over ``run.steps()`` left it, for newcomers that begin the code after the loop.

That code is the script's own. It may load the best weights, merge adapters, or switch to evaluation, and a process that
takes over a rank runs all of it again. So a newcomer receives the state that the others had before that code, not their
current state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch

from rackrun.errors import StepError
from rackrun.worker.membership.decisions.script_scope import lost_after_loop
from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import refuse_freed
from rackrun.worker.tensors.tensor_bytes import digests_by_path
from rackrun.worker.tensors.undo_copies import NoMemoryForCopies, UndoCopies, place_for
from rackrun.worker.torch_compat.data_parallel import fsdp

__all__ = ["LoopEndState", "StateSource"]


class StateSource(Protocol):
    """The state that a newcomer receives: the current one, or a former one."""

    def manifest(self, replica_class: str) -> StateManifest:
        """Return the description of the state, for replicas of ``replica_class``."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return path -> tensor of the state, without copies."""


class LoopEndState:
    """Copies all tracked state when the loop is over, if there is memory for it. Otherwise keeps digests: changes are
    noticed then, but cannot be undone."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._manifest: StateManifest | None = None
        self._copies = UndoCopies()
        self._digests: dict[str, int] = {}
        self._freed: StepError | None = None
        """The error about a tensor that could not be copied, because its memory was freed; None if there was none."""
        self._lost = ""
        """What had changed before it was copied; "" for nothing."""
        self._left: dict[str, int] = {}
        """Digests of the state after the script's own code, where phases follow that code; empty otherwise."""

    def reached(self, changed: str = "") -> None:
        """Record the state at the beginning of the script's own code after the loop.

        ``changed``: what that code has changed if it ran before this was noticed; "" otherwise. Raises nothing when a
        tensor cannot be copied, because an exception of the script may be propagating through the loop and must be
        reported. Where there is none `refuse_freed` follows.
        """
        self._lost = changed
        # An exception in a forward leaves whole parameters where shards belong; FSDP2 does not reshard them in a state
        # that it takes for a forward.
        fsdp.begin(self._state.structure().fsdp)
        tensors = self._state.tensors()
        try:
            refuse_freed(tensors)
        except StepError as error:
            self._freed = error
            return
        try:
            place = place_for(sum(tensor.nbytes for tensor in tensors.values()), self._state.device)
        except NoMemoryForCopies:
            self._digests = digests_by_path(tensors)
        else:
            self._copies.take(tensors, place)
        self._manifest = self._state.manifest("")

    def refuse_freed(self) -> None:
        """Raise `StepError` if the script has freed tracked memory. To be called when it has left its loop without an
        exception."""
        if self._freed is not None:
            raise self._freed

    def left(self) -> None:
        """Record the state after the script's own code, because phases follow. Their changes are part of the training,
        and no rank has them without the changes of that code."""
        if self._manifest is not None:
            self._left = digests_by_path(self._state.tensors())

    def check(self) -> None:
        """Raise `CollectiveBroken` if newcomers cannot be given what the loop left: nobody has it any more, or phases
        have changed the state since."""
        changed = self.changed()
        if changed and (self._lost or self._digests):
            raise lost_after_loop(f" This rank had changed {changed} there.")
        if self._left and self._left != digests_by_path(self._state.tensors()):
            raise lost_after_loop(" A phase that followed it has changed tracked state.")

    def put_back(self) -> bool:
        """Restore the state that the loop left. Returns False, perhaps with some tensors restored, when that is not
        possible."""
        if not self.changed():
            return True
        if self._lost or self._digests or self._left:
            return False
        assert self._manifest is not None
        tensors = self._state.tensors()
        if tensors.keys() != set(self._copies):
            return False
        if not all(self._copies.put_back(path, tensor) for path, tensor in tensors.items()):
            return False
        self._state.load_plain(self._manifest, tensors)
        return True

    def source(self) -> StateSource:
        """Return what a newcomer receives. To be called after `check`."""
        if self._manifest is None:
            return self._state
        tensors = self._state.tensors()
        if not self._digests:
            tensors = {path: self._copies.value(path) for path in self._copies}
        lineage = self._state.lineage
        return _Kept(msgspec.structs.replace(self._manifest, lineage=lineage), tensors)

    def changed(self) -> str:
        """Return the path of something tracked that differs from what the loop left; "" for nothing, and while the loop
        is not over."""
        if self._manifest is None:
            return ""
        if self._lost:
            return self._lost
        tensors = self._state.tensors()
        known = self._digests.keys() if self._digests else set(self._copies)
        if odd := tensors.keys() ^ known:
            return min(odd)
        if self._digests:
            changed = [path for path, digest in digests_by_path(tensors).items() if digest != self._digests[path]]
        else:
            changed = [path for path, tensor in tensors.items() if not self._copies.equals(path, tensor)]
        if changed:
            return changed[0]
        return "" if self._state.encode_plain() == self._manifest.plain else "a tracked object"


class _Kept:
    def __init__(self, manifest: StateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._manifest, self._tensors = manifest, tensors

    def manifest(self, replica_class: str) -> StateManifest:
        return msgspec.structs.replace(self._manifest, replica_class=replica_class)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors
