"""Replicas share the writing to disk: every tensor is there once, and nobody is taken for a replica who is not one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.digest import CHUNK_BYTES, chunk_crcs
from rackrun.checkpoint.base.errors import IntegrityError
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, header_bytes
from rackrun.checkpoint.image.plain_part import Plain, decode_plain, pack_plain
from rackrun.checkpoint.image.safetensors_image import parse_image, plan_image, read_plain, read_tensor, write_image
from rackrun.checkpoint.image.tensor_entries import entries_of
from rackrun.checkpoint.manager.replica_writers import Share, SharedTensors, assign, held_in
from rackrun.checkpoint.offline.export import export
from tests.checkpoint.manager.test_manager import flip
from tests.checkpoint.manager.test_manager_torchrun import forked, lines, states


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


# -- who writes what
def held(**boxes: tuple[int, int]) -> SharedTensors:
    """box -> (digest, bytes)"""
    return SharedTensors(list(boxes), [digest for digest, _ in boxes.values()], [size for _, size in boxes.values()])


def test_replicas_write_each_tensor_once_and_about_as_much_each() -> None:
    one = held(a=(1, 100), b=(2, 60), c=(3, 50), d=(4, 10))
    answers = assign([one, one, one])
    assert all(answer.ranks == [0, 1, 2, 2] for answer in answers)
    assert not any(answer.apart for answer in answers)


def test_what_has_one_owner_counts_before_what_is_shared_is_given_out() -> None:
    answers = assign([held(norm=(7, 10), shard_0=(1, 100)), held(norm=(7, 10), shard_1=(2, 50))])
    assert [answer.ranks for answer in answers] == [[1, 0], [1, 1]]


def test_a_rank_with_other_bytes_writes_its_own_and_is_told() -> None:
    right, wrong = held(a=(1, 100), b=(2, 60)), held(a=(9, 100), b=(2, 60))
    answers = assign([wrong, right, right])
    assert [answer.ranks for answer in answers] == [[0, 2], [1, 2], [1, 2]]
    assert [answer.apart for answer in answers] == [[0], [], []]


def test_a_rank_that_has_failed_is_left_nothing_to_write() -> None:
    one = held(a=(1, 100), b=(2, 60))
    assert [answer.ranks for answer in assign([one, SharedTensors(), one])] == [[0, 2], [], [0, 2]]


# -- a share is an image
TENSORS = {
    "model/w": torch.arange(3_000_000, dtype=torch.float32),  # more than a chunk
    "model/b": torch.arange(7, dtype=torch.float64),
    "optim/step": torch.tensor(3.0),
    "model/mean": torch.ones(5, dtype=torch.bfloat16),
}


@pytest.fixture
def sealed() -> Iterator[tuple[Arena, ImageLayout]]:
    plain = pack_plain(Plain({}, {"at": [1, 2.5, b"\0", {"x": None}]}))
    layout = plan_image(entries_of(TENSORS), len(plain))
    fd = os.memfd_create("rackrun-test")
    arena = Arena.create(fd, job="j", rank=0, fencing_token=1, slots=1, payload_bytes=layout.total_bytes)
    os.close(fd)
    with arena, arena.begin(1, 1) as writer:
        write_image(layout, TENSORS, plain, writer.payload)
        writer.seal(layout.total_bytes, layout.layout_hash)
        yield arena, layout


@pytest.mark.parametrize("elsewhere", [{"model/w": 2}, {"model/b": 1, "model/mean": 3}, dict.fromkeys(TENSORS, 1)])
def test_a_share_is_an_image_with_the_rest_of_the_tensors_and_the_same_plain_state(
    sealed: tuple[Arena, ImageLayout], elsewhere: dict[str, int]
) -> None:
    arena, layout = sealed
    share = Share(arena.reader(1), layout, elsewhere, arena.chunk_bytes)
    data = share[0 : share.nbytes]
    assert np.array_equal(share.crcs(), chunk_crcs(data, CHUNK_BYTES))
    assert b"".join(share[at : at + 977_777] for at in range(0, share.nbytes, 977_777)) == data
    found = parse_image(data[: header_bytes(data, limit=len(data))], limit=len(data))
    assert {entry.name for entry in found.entries} == TENSORS.keys() - elsewhere.keys()
    for entry in found.entries:
        assert torch.equal(read_tensor(found, entry.name, data), TENSORS[entry.name])
    plain = decode_plain(read_plain(found, data))
    assert plain.values == {"at": [1, 2.5, b"\0", {"x": None}]}
    assert plain.elsewhere == elsewhere


def test_damage_in_memory_is_found_before_it_is_shared(sealed: tuple[Arena, ImageLayout]) -> None:
    arena, layout = sealed
    reader = arena.reader(1)
    share = Share(reader, layout, {"model/b": 1}, arena.chunk_bytes)
    at = arena._superblock.geometry.payload_at(0) + layout.extents["model/w"][0] + 11
    os.pwrite(arena._file.fd, b"\x55", at)
    with pytest.raises(IntegrityError):
        share.crcs()
    with pytest.raises(IntegrityError):
        held_in(reader, layout, TENSORS.keys(), arena.chunk_bytes)


# -- a job
def shards(folder: Path, number: int) -> list[ImageLayout]:
    with DurableStore(folder / "checkpoints", "run").open(number) as reader:
        found = []
        for rank in range(reader.world_size):
            size = reader.reader(rank).size
            length = header_bytes(reader.read(rank, 0, 8), limit=size)
            found.append(parse_image(reader.read(rank, 0, length), limit=size))
            assert PLAIN in found[-1].extents
        return found


def restores(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [[line for line in lines(folder, rank) if "restored" in line][-1] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("kind", "ranks", "other"),
    [("ddp", 3, 2), pytest.param("hsdp", 4, 3, marks=pytest.mark.soak)],
)
def test_each_tensor_is_on_disk_once_and_any_number_of_ranks_goes_on_from_it(
    tmp_path: Path, shm: Path, kind: str, ranks: int, other: int
) -> None:
    forked(tmp_path, shm, ranks, kind, 2, durable_every=2)
    found = shards(tmp_path, 2)
    boxes = Counter((entry.name, entry.box) for layout in found for entry in layout.entries if entry.box.numel)
    assert {count for (name, _), count in boxes.items() if not name.startswith("average/")} == {1}
    if kind == "ddp":
        own = {count for (name, _), count in boxes.items() if name.startswith("average/")}
        assert own == {ranks}, "what an object of the script's holds is each rank's own"
    assert all(layout.entries for layout in found), "each writes a part"
    with DurableStore(tmp_path / "checkpoints", "run").open(2) as reader:
        assert export(reader, tmp_path / "exported").tensors == len({name for name, _ in boxes})
    state = states(tmp_path, ranks)[2]
    for world in (ranks, other):
        forked(tmp_path, shm, world, "fsdp" if world == other else kind, 2)
        for one in restores(tmp_path, world):
            assert (one["restored"], one["tiers"], one["state"]) == (2, ["shared"], state)


@pytest.mark.soak
def test_a_share_on_disk_stands_in_for_a_damaged_image_in_memory(tmp_path: Path, shm: Path) -> None:
    forked(tmp_path, shm, 2, "ddp", 2, durable_every=2, keep=True)
    (arena,) = shm.glob("rackrun-*/*/rank-00001-*.arena")
    flip(arena, 2)
    forked(tmp_path, shm, 2, "ddp", 2)
    state = states(tmp_path, 2)[2]
    first, second = restores(tmp_path, 2)
    assert (first["restored"], first["tiers"], first["state"]) == (2, ["own_tray"], state)
    assert (second["restored"], second["tiers"], second["state"]) == (2, ["own_tray", "shared"], state)


@pytest.mark.stories
def test_a_rank_that_is_no_replica_keeps_its_own_and_that_is_said_once(tmp_path: Path, shm: Path) -> None:
    said = forked(tmp_path, shm, 3, "ddp", 4, durable_every=2, drift=2)
    assert said.count("are not the same as on its replicas") == 1
    assert "rank 2: 1 tensors, such as 'model/0.weight'" in said
    said_by = [{line["step"]: line["state"] for line in lines(tmp_path, rank) if "step" in line} for rank in range(3)]
    forked(tmp_path, shm, 3, "ddp", 4)
    found = restores(tmp_path, 3)
    assert [one["state"] for one in found] == [had[one["restored"]] for had, one in zip(said_by, found, strict=True)]
    assert found[0]["state"] == found[1]["state"] != found[2]["state"]
