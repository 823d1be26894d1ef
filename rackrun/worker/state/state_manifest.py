"""What describes a rank's state to another: its tensors as they lie there, and everything else as msgpack."""

from __future__ import annotations

import math

import msgspec
import torch

from rackrun.protocol.ids import BEGIN, Position
from rackrun.worker.state.shardings import Sharding

__all__ = ["Changes", "Lineage", "Manifest", "Modes", "TensorInfo"]


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as it lies on a rank. ``shape`` is the local shard's."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    """On the CPU although the model is not (an optimizer's step counter)."""
    like_param: bool
    """An optimizer's tensor that has the shape of its parameter, and is sharded as that is."""
    strides: tuple[int, ...] = ()
    """Of one dense block that is not row-major (channels_last); its bytes travel in the order in which they lie."""
    sharding: Sharding | None = None
    """Of a DTensor that is no parameter, nor sharded as its parameter is."""
    has_gradient: bool = False
    """A parameter whose gradient a step finds there, were it zero: it counts, unlike one that is None, in a norm and for an optimizer."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        if self.strides:
            return torch.empty_strided(self.shape, self.strides, dtype=self.torch_dtype, device=device)
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of ``tensor``, which has this shape, lie in the order of this one's."""
        return tensor.stride() == self.strides if self.strides else tensor.is_contiguous()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's bytes as this tensor."""
        typed = flat.view(self.torch_dtype)
        return torch.as_strided(typed, self.shape, self.strides) if self.strides else typed.view(self.shape)


class Changes(msgspec.Struct, frozen=True):
    """What the script was seen to change, and where: tensors by their paths (`rackrun.worker.steps.unit_undo`)."""

    early: tuple[str, ...] = ()
    """Of an optimizer, and changed before the gate of a step."""
    moving: tuple[str, ...] = ()
    """Of no optimizer, and changed in steps."""
    phases: dict[str, tuple[str, ...]] = {}
    """Changed in a phase, by its name."""
    parts: bool = False
    """A step has parts: it goes on after its first ``optimizer.step()`` (`rackrun.worker.steps.multi_part_steps`)."""

    def union(self, other: Changes) -> Changes:
        """What either knows; ``parts``, in which all ranks agree, is this one's."""
        phases = {
            name: _united(self.phases.get(name, ()), other.phases.get(name, ()))
            for name in (*self.phases, *(name for name in other.phases if name not in self.phases))
        }
        return Changes(_united(self.early, other.early), _united(self.moving, other.moving), phases, self.parts)


def _united(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*one, *other}))


class Lineage(msgspec.Struct, frozen=True):
    """What a newcomer has to know of the run that it joins."""

    kin: tuple[int, ...] = ()
    """The ranks that hold the same parameters as this one, which is among them; unknown before replicas have been compared."""
    began: int = -1
    """The step after which this run was resumed; -1 if it began anew."""
    life: int = 0
    """Of the job, larger at every start: durable checkpoints of two lives are not mixed up."""
    facts: str = ""
    """What must be the same for a resumed run to be the same training."""
    entered: Position = BEGIN
    """What was committed when all ranks entered ``main`` again last; `BEGIN`: they have not."""
    changes: Changes = Changes()

    @property
    def since(self) -> Position:
        """Where the world of these ranks began."""
        return max(Position(self.began), self.entered)


class Modes(msgspec.Struct, frozen=True):
    """What steps and phases have switched on a model since ``run.steps``: path -> value. What ``main`` sets before is not in it, so
    that a job may resume with another choice."""

    requires_grad: dict[str, bool] = {}
    """Of parameters."""
    training: dict[str, bool] = {}
    """Of modules: ``train()`` and ``eval()``."""


class Manifest(msgspec.Struct, frozen=True):
    tensors: list[TensorInfo]
    plain: bytes
    """Everything that is not a tensor, msgpack."""
    replica_class: str = ""
    lineage: Lineage = Lineage()
    whole: dict[str, int] = {}
    """Digests of the tensors that this rank has as a whole, where not all ranks are replicas: are they the same on all?"""
    modes: Modes = Modes()
    numerics: dict[str, str] = {}
    """What the state was computed with, just before it was described (`rackrun.worker.device.numerics`)."""
    key_orders: dict[str, tuple[str, ...]] = {}
    """Optimizer -> the order in which it has the keys of what it holds for a parameter. Nothing is computed by it; scripts hash and print
    ``state_dict()``."""
