"""Describes a rank's state to another rank: its tensors as they lie in memory, and everything else as msgpack."""

from __future__ import annotations

import math

import msgspec
import torch

from rackrun.protocol.ids import BEGIN, Position
from rackrun.worker.state.shardings import Sharding

__all__ = ["ChangedTensors", "Lineage", "StateManifest", "ModelModes", "TensorInfo", "TurnResults"]


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as it lies on a rank. ``shape``: of the local shard. ``dtype``: torch's name, such as "float32"."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    """Whether the tensor is on the CPU although the model is not, as an optimizer's step counter may be."""
    like_param: bool
    """Whether it is an optimizer's tensor with the shape and sharding of its parameter."""
    strides: tuple[int, ...] = ()
    """Strides of one dense block that is not row-major (channels_last), whose bytes are sent in memory order; empty for
    other tensors."""
    sharding: Sharding | None = None
    """The sharding of a DTensor that is neither a parameter nor sharded like one; None for other tensors."""
    has_gradient: bool = False
    """Whether it is a parameter with a gradient when a step begins, even a zero one. Unlike None, that counts in a norm
    and for an optimizer."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes, dense."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """Return an uninitialised tensor with this dtype, shape and strides."""
        if self.strides:
            return torch.empty_strided(self.shape, self.strides, dtype=self.torch_dtype, device=device)
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of ``tensor``, which has this shape, lie in the same order as this tensor's."""
        return tensor.stride() == self.strides if self.strides else tensor.is_contiguous()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``flat``, the tensor's bytes (1-d uint8), viewed with its dtype, shape and strides."""
        typed = flat.view(self.torch_dtype)
        return torch.as_strided(typed, self.shape, self.strides) if self.strides else typed.view(self.shape)


class ChangedTensors(msgspec.Struct, frozen=True):
    """What the script was seen to change and when: paths of tensors (`rackrun.worker.steps.undo.unit_undo`)."""

    early: tuple[str, ...] = ()
    """Tensors that an optimizer trains or holds and that changed before the gate of a step."""
    moving: tuple[str, ...] = ()
    """Tensors that no optimizer trains and that changed in steps."""
    phases: dict[str, tuple[str, ...]] = {}
    """Tensors that changed in a phase, by the phase's name."""
    parts: bool = False
    """Whether steps have several parts, and go on after their first ``optimizer.step()``
    (`rackrun.worker.steps.multi_part_steps`)."""

    def union(self, other: ChangedTensors) -> ChangedTensors:
        """Return the changes that either of the two holds. ``parts``, on which all ranks agree, is this one's."""
        phases = {
            name: _united(self.phases.get(name, ()), other.phases.get(name, ()))
            for name in (*self.phases, *(name for name in other.phases if name not in self.phases))
        }
        return ChangedTensors(_united(self.early, other.early), _united(self.moving, other.moving), phases, self.parts)


def _united(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*one, *other}))


class TurnResults(msgspec.Struct, frozen=True):
    """What calls of the loop's current turn have returned, for a process that enters the turn without having made
    them. Each is msgpack; empty for what msgpack cannot encode."""

    step: bytes = b""
    """What the step function returned."""
    last_phase: int = 0
    """The number of the phase that the turn called last (`Position.phase`); 0 for none."""
    of_last_phase: bytes = b""


class Lineage(msgspec.Struct, frozen=True):
    """What a newcomer must know about the run that it joins."""

    kin: tuple[int, ...] = ()
    """The ranks that hold the same parameters as this one, itself included; empty before replicas have been
    compared."""
    began: int = -1
    """The step after which this run was resumed; -1 if it was not."""
    life: int = 0
    """A number of the job that grows at every start, so that durable checkpoints of two starts are not mixed."""
    facts: str = ""
    """Settings that must be equal for a resumed run to be the same training."""
    entered: Position = BEGIN
    """The position that was committed when all ranks last entered ``main`` again; `BEGIN` if they have not."""
    changes: ChangedTensors = ChangedTensors()
    results: TurnResults = TurnResults()
    """What the last calls of the loop returned; empty in a loop that does not enter a turn twice."""

    @property
    def since(self) -> Position:
        """The position at which the world of these ranks began."""
        return max(Position(self.began), self.entered)


class ModelModes(msgspec.Struct, frozen=True):
    """``requires_grad`` and train/eval flags that steps and phases have changed since ``run.steps`` began.

    Settings made in ``main`` before that are left out, so that a resumed job may choose otherwise.
    """

    requires_grad: dict[str, bool] = {}
    """The changed flags of parameters, by path."""
    training: dict[str, bool] = {}
    """The changed flags of modules (``train()``, ``eval()``), by path."""


class StateManifest(msgspec.Struct, frozen=True):
    """A complete description of a rank's state, without the values of its tensors."""

    tensors: list[TensorInfo]
    plain: bytes
    """Everything that is not a tensor, as msgpack."""
    replica_class: str = ""
    lineage: Lineage = Lineage()
    whole: dict[str, int] = {}
    """Digests, by path, of the tensors that this rank holds as a whole, where not all ranks are replicas. They show
    whether all ranks hold the same."""
    modes: ModelModes = ModelModes()
    numerics: dict[str, str] = {}
    """The hardware, libraries and settings that the state was computed with (`rackrun.worker.device.numerics`)."""
    key_orders: dict[str, tuple[str, ...]] = {}
    """Optimizer name -> the order of the keys in what it holds for a parameter. No computation depends on it, but
    scripts hash and print ``state_dict()``."""
