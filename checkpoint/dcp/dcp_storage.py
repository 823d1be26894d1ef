"""A `StorageWriter` and a `StorageReader` that let ``torch.distributed.checkpoint`` code use the durable tier.

::

    dcp.save(state, checkpoint_id="runs/a", storage_writer=RackrunStorageWriter())  # the next checkpoint of runs/a
    dcp.load(state, checkpoint_id="runs/a", storage_reader=RackrunStorageReader())  # its newest whole one

A ``checkpoint_id`` is a directory, and every save into it is a new checkpoint: earlier ones stay until retention
(``keep``) drops them. ``runs/a/gen-000000000123`` names one checkpoint, to be written or read. Checkpoints of ``rackrun
--checkpoint-dir D`` are read from ``D/run``, by the names that tensors have there (``model/param/...``).

Tensors are stored in each rank's safetensors image as the boxes that torch has planned. Items that are not tensors were
pickled by torch's planner; those bytes are stored unchanged in the plain part. On load torch's planner unpickles
whatever it is given, so the reader gives it only what ``torch.load(weights_only=True)`` accepts, pickled anew.

There is no stager here. Which tensors a rank writes is known only after planning, and torch plans after staging, so no
image can be laid out that early. torch's own ``DefaultStager`` does what is left, in pinned memory on a GPU.

A cached plan names the checkpoint of the save before, so it is refused. torch swallows what `read_metadata` raises, so
that error is kept until torch's next call. torch raises ``CheckpointException`` for all errors, which is a
BaseException; the errors raised here are in its ``failures``, by rank. A rank's image is built in memory before it is
written, so a save needs as much memory again as the rank's part of the state.
"""

from __future__ import annotations

import dataclasses
import io
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError
from rackrun.checkpoint.base.location import parse_location
from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.dcp.dcp_format import (
    Id,
    Paths,
    VerifiedCheckpoint,
    find,
    foreign_planner_data,
    merged,
    next_number,
    numbers_in,
    packed,
    paths_in,
    place_of,
    torch_dtype,
)
from rackrun.checkpoint.durable.durable_reader import CheckpointReader
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import ImageLayout, TensorEntry, plan_image
from rackrun.checkpoint.image.reshard import fill, plan_reshard
from rackrun.checkpoint.image.safetensors_image import check_local, write_head, write_tensor
from rackrun.errors import RackrunError, UsageError

__all__ = ["RackrunStorageReader", "RackrunStorageWriter"]

CHUNK_BYTES = 2**20
"""Every loading rank reads the first and the last chunk of every shard, so chunks are smaller than an arena's."""
_ORPHANS_S = 24 * 3600.0


@dataclass(frozen=True)
class _Part:
    """The checkpoint and the shard that a rank writes. Ranks receive it in their plans."""

    number: int
    fencing_token: int
    world_size: int
    rank: int


class RackrunStorageWriter(StorageWriter):
    """Writes a durable checkpoint into ``path``, or into the ``checkpoint_id`` of ``save``.

    ``keep``: after the save, drop all but that many of the newest checkpoints and those that retention always keeps;
    None keeps all.

    Raises `CheckpointError` when the storage fails, and `LayoutMismatch` for a dtype that images do not hold.
    """

    def __init__(self, path: Id | None = None, *, keep: int | None = None) -> None:
        self._path, self._keep = path, Retention(keep) if keep is not None else None
        self._save_id = uuid.uuid4().hex
        self._part: _Part | None = None
        self._paths: Paths | None = None

    @property
    def checkpoint_id(self) -> Id:
        return self._path or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return _is_a_place(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self._path = checkpoint_id or self._path
        self._save_id = uuid.uuid4().hex

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the root directory.

        Raises `CheckpointError` without collectives, or when the directory cannot be made.
        """
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "ranks that do not talk to each other cannot agree on a checkpoint.", remedy="use_collectives=True."
            )
        store, _ = place_of(self._path)
        try:
            store.files.make_root(store.root)
        except OSError as error:
            raise CheckpointError(
                f"{store.root} cannot be made: {error.strerror or error}.", remedy="mount it, or check its rights."
            ) from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the planner's data can be stored. Raises `CheckpointError`."""
        paths_in(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the checkpoint on the coordinator, and give each rank its shard in its plan.

        Raises `CheckpointError` for a cached plan, or a checkpoint that exists already.
        """
        if not all(plan.usable for plan in plans):
            raise CheckpointError(
                "a cached plan names the checkpoint that was saved before.",
                remedy="make the planner without enable_plan_caching.",
            )
        store, named = place_of(self._path)
        number = next_number(store) if named is None else named
        if number in numbers_in(store):
            raise CheckpointError(
                f"checkpoint {number} is in {store.directory} already; what is published is not replaced.",
                remedy=f"save into {store.directory} for the next one.",
            )
        if (
            self._part is not None
        ):  # an earlier save of this writer: it is finished, or has failed and nobody goes on with it
            self._writer(self._part).give_up()
        self._part = _Part(number, time.time_ns() // 1_000_000, len(plans), 0)
        self._paths = merged([paths_in(plan) for plan in plans])
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(self._part, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Build this rank's image in memory and write it as a shard. Raises `CheckpointError` when storage fails."""
        part: _Part = plan.storage_data
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        pickled = {
            item.index.fqn: _bytes_of(item, planner) for item in plan.items if item.type is WriteItemType.BYTE_IO
        }
        plain = packed(pickled, paths_in(plan))
        layout = plan_image([_entry_of(item) for item in tensors], len(plain))
        payload = np.empty(layout.total_bytes, dtype=np.uint8).data
        write_head(layout, plain, payload)
        for item in tensors:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            check_local(layout.by_name[item.index.fqn], tensor.detach())
            write_tensor(layout, item.index.fqn, tensor.detach(), payload)
        writer = self._writer(part)
        crcs = chunk_crcs(payload, CHUNK_BYTES)
        if not writer.write_shard(part.rank, payload, layout.layout_hash, crcs, chunk_bytes=CHUNK_BYTES):
            raise self._failed(writer)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, _size_of(item, pickled), None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint whole on the coordinator, then drop old ones if ``keep`` was given.

        Raises `CheckpointError`.
        """
        del results
        assert self._part is not None
        if metadata.planner_data != self._paths:
            raise foreign_planner_data(metadata.planner_data)
        writer = self._writer(self._part)
        if not writer.finish():
            raise self._failed(writer)
        metadata.storage_data, metadata.storage_meta = {}, self.storage_meta()
        if self._keep is not None:
            store, _ = place_of(self._path)
            collect(store, self._keep, fencing_token=self._part.fencing_token, now=time.time, orphan_ttl_s=_ORPHANS_S)

    def _writer(self, part: _Part) -> CheckpointWriter:
        store, _ = place_of(self._path)
        return store.writer(part.number, part.number, part.fencing_token, part.world_size)

    def _failed(self, writer: CheckpointWriter) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {writer.number} could not be saved in {self._path}: {writer.failure or 'shards are missing'}.",
            remedy="see to the storage, and save again; the checkpoints before are as they were.",
        )


class RackrunStorageReader(StorageReader):
    """Reads the newest whole checkpoint in a directory, or the checkpoint that the directory's name names.

    The directory is ``path``, or the ``checkpoint_id`` of ``load``.

    All bytes are verified before they reach a tensor. A tensor of another dtype is converted, as torch's own reader
    does.

    ``unsafe_pickle``: load items that are not tensors by unpickling, which may run any code. Raises
    `NoUsableCheckpoint`, `IntegrityError` with the names of tensors and the chunk, `LayoutMismatch`, and
    `CheckpointError` for an item that only pickle can load. After an error while tensors are read, the state may be
    partly overwritten.
    """

    def __init__(self, path: Id | None = None, *, unsafe_pickle: bool = False) -> None:
        self._path, self._unsafe_pickle = path, unsafe_pickle
        self._load_id = uuid.uuid4().hex
        self._rank = 0
        self._found: VerifiedCheckpoint | RackrunError | None = None
        self.passed_over: Mapping[int, str] = {}
        """Number of a newer checkpoint -> why the last load did not take it. Rank 0 reports these on stderr too."""

    @property
    def checkpoint_id(self) -> Id:
        return self._path or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return _is_a_place(checkpoint_id)

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self._path = checkpoint_id or self._path
        self._load_id, self._found = uuid.uuid4().hex, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Find the checkpoint and describe it to torch.

        An error is kept until `set_up_storage_reader`, which raises it.
        """
        del args, kwargs
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        try:
            self._found = find(self._path)
            self.passed_over = self._found.passed_over
            for number, why in self.passed_over.items():
                say(f"checkpoint {number} is not loaded: {why}")
            return Metadata(self._found.describe(), planner_data=self._found.paths, storage_data={}, storage_meta=meta)
        except RackrunError as error:
            self._found = error
            return Metadata({}, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error that `read_metadata` has kept, if any."""
        del metadata, is_coordinator, args
        if isinstance(self._found, RackrunError):
            raise self._found
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the checkpoint that this rank has found to its plan."""
        return dataclasses.replace(plan, storage_data=(self._opened.manifest.number, self._opened.digest))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise `CheckpointError` when the ranks have found different checkpoints."""
        found = {plan.storage_data for plan in plans}
        if len(found) != 1:
            raise CheckpointError(
                f"the ranks have found different checkpoints in {self._path}: {sorted(n for n, _ in found)}.",
                remedy="name the directory of one of them, and give one that all ranks share.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, and load its other items. Raises as this class's docstring says."""
        found = self._opened
        rounds: list[dict[str, ReadItem]] = []  # a tensor occurs at most once in each
        count: dict[str, int] = defaultdict(int)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                data = found.items[name]
                planner.load_bytes(item, io.BytesIO(data if self._unsafe_pickle else _vetted(name, data)))
                continue
            if count[name] == len(rounds):
                rounds.append({})
            rounds[count[name]][name] = item
            count[name] += 1
        with found.store.open(found.manifest.number) as reader:
            if reader.manifest != found.manifest:
                raise IntegrityError(f"{reader.directory} was replaced.", remedy="load again.")
            for items in rounds:
                self._read(found, reader, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, found: VerifiedCheckpoint, reader: CheckpointReader, items: Mapping[str, ReadItem], planner: LoadPlanner
    ) -> None:
        targets, places, tensors = [], {}, {}
        for name, item in items.items():
            saved = found.entries[name]
            offsets = item.storage_index.offset or (0,) * len(item.lengths)
            start = tuple(a + b for a, b in zip(offsets, item.storage_offsets, strict=True))
            targets.append(TensorEntry(name, saved.dtype, saved.global_shape, Box(start, tuple(item.lengths))))
            tensor = tensors[name] = planner.resolve_tensor(item).detach()
            dtype = torch_dtype(saved)
            places[name] = tensor if tensor.dtype is dtype else torch.empty(tensor.shape, dtype=dtype)
        shard = self._rank % len(found.layouts)
        own = found.layouts[shard]
        # where every rank has its own copy, this rank's is read
        mine = [target for target in targets if _holds(own, target)]
        others = [target for target in targets if not _holds(own, target)]
        plan = [dataclasses.replace(fetch, shard=shard) for fetch in plan_reshard([own], mine)]
        for fetch in plan + plan_reshard(found.layouts, others, turn=self._rank):
            try:
                fill([fetch], places, reader.read)
            except IntegrityError as error:
                names = sorted({copy.entry.name for copy in fetch.copies})
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise IntegrityError(f"{', '.join(names[:3])}{more}: {error.what}", remedy=error.remedy) from error
        for name, item in items.items():
            if places[name] is not tensors[name]:
                tensors[name].copy_(places[name])
            planner.commit_tensor(item, tensors[name])

    @property
    def _opened(self) -> VerifiedCheckpoint:
        assert isinstance(self._found, VerifiedCheckpoint)
        return self._found


def _is_a_place(checkpoint_id: Id) -> bool:
    try:
        parse_location(checkpoint_id)
    except UsageError:
        return False
    return True


def _entry_of(item: WriteItem) -> TensorEntry:
    assert item.tensor_data is not None
    data = item.tensor_data
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return TensorEntry(item.index.fqn, str(data.properties.dtype).removeprefix("torch."), tuple(data.size), box)


def _bytes_of(item: WriteItem, planner: SavePlanner) -> bytes:
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return data.getvalue()


def _size_of(item: WriteItem, pickled: Mapping[str, bytes]) -> int:
    return len(pickled[item.index.fqn]) if item.type is WriteItemType.BYTE_IO else item.tensor_storage_size() or 0


def _holds(layout: ImageLayout, target: TensorEntry) -> bool:
    entry = layout.by_name.get(target.name)
    return entry is not None and entry.box.contains(target.box)


def _vetted(name: str, data: bytes) -> bytes:
    """Return ``data`` pickled anew, from its value loaded without running any code of it. Raises `CheckpointError`."""
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"item {name!r:.200} is no plain value: {error!s:.200}",
            remedy="allow its types with torch.serialization.add_safe_globals, or, if you trust who wrote it, give "
            "RackrunStorageReader(unsafe_pickle=True).",
        ) from error
    anew = io.BytesIO()
    torch.save(value, anew)
    return anew.getvalue()
