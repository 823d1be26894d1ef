"""Checkpoints without the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
import torch.distributed.checkpoint as dcp

import rackrun.checkpoint
from rackrun.checkpoint import CheckpointManager, MemoryTier, RestoreReport, SaveHandle
from rackrun.checkpoint.dcp import RackrunStorageReader, RackrunStorageWriter

model = torch.nn.Linear(8, 8)
progress = {"step": 0}

with CheckpointManager(Path("checkpoints"), memory=MemoryTier("/dev/shm"), durable_every=50) as checkpoints:
    assert_type(checkpoints, CheckpointManager)
    checkpoints.prepare({"model": model, "progress": progress})
    assert_type(checkpoints.restore(), RestoreReport | None)
    assert_type(checkpoints.save(progress["step"]), SaveHandle)

state = {"model": model.state_dict()}
dcp.save(state, checkpoint_id="runs/a", storage_writer=RackrunStorageWriter(keep=3))
dcp.load(state, checkpoint_id="runs/a", storage_reader=RackrunStorageReader())
rackrun.checkpoint.Manager  # type: ignore[attr-defined]  # noqa: B018 - it is not there
rackrun.checkpoint.dcp.Writer  # type: ignore[attr-defined]  # noqa: B018 - it is not there
