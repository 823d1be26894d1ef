"""What decision 12 renamed: files have the bytes that they had before, and the former public names still work."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.checkpoint import CheckpointManager, RestoreReport, SaveHandle
from rackrun.checkpoint.arena.arena_format import SlotHeader, SlotState
from rackrun.checkpoint.base import errors
from rackrun.checkpoint.base.deprecation import renamed_argument
from rackrun.checkpoint.commit.checkpoint_choice import Holding, RestorePlan
from rackrun.checkpoint.commit.commit_records import (
    Begin,
    CommitRecord,
    Copy,
    MembershipBegan,
    Repair,
    decode_record,
)
from rackrun.checkpoint.durable.durable_manifest import Fragment, Manifest, ManifestEntry, seal, unseal
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.manager.checkpoint_sources import RestorableData
from rackrun.checkpoint.manager.saver import Saved
from rackrun.checkpoint.redundancy.stripe_set import RowHeader, decode_header, encode_header
from tests.checkpoint.storage import save, store_at

# The bytes and names below were written by the code before decision 12, which called the number ``generation``.

FRAGMENT = (
    Fragment(
        job="run", number=12, step=34, world_size=2, rank=1, size=5, chunk_bytes=8, crcs=b"\1\2\3\4", layout_hash="layout",
        share_of=("image", "whole"),
    ),
    (b'{"body":{"format":1,"job":"run","generation":12,"step":34,"world_size":2,"rank":1,"size":5,"chunk_bytes":8,'
    b'"crcs":"AQIDBA==","layout_hash":"layout","share_of":["image","whole"]},'
    b'"digest":"049c4b78f0cf7b8c5d324243d42f04f2a771fefbc039809ab88d7b4364c37e9f"}'),
)  # fmt: skip
MANIFEST = (
    Manifest(
        job="run", number=12, step=34, fencing_token=56, world_size=1,
        shards=(ManifestEntry(rank=0, size=5, layout_hash="layout", fragment="digest", fragment_bytes=7),),
    ),
    (b'{"body":{"format":1,"job":"run","generation":12,"step":34,"epoch":56,"world_size":1,"shards":'
    b'[{"rank":0,"size":5,"layout_hash":"layout","fragment":"digest","fragment_bytes":7}]},'
    b'"digest":"0d94fb7399f18e9c812df73883fc6447d43c0b060ef1e6b2f4564deb9598c831"}'),
)  # fmt: skip
RECORD = (
    b'{"generation":12,"step":34,"epoch":56,"copies":1,"degraded":false,"shards":[{"owner":0,"kind":"data","digest":"d",'
    b'"layout_hash":"layout","holders":[["a","rack"]]}],"sets":[],'
    b'"digest":"acc5dd47d313bf88eb28707606a9ff3f6b97bf6425b3b4ab2cb9ee250bb4f6f1"}'
)
ROW = (
    b'h\x00\x00\x00t\xeck\xa1{"generation":12,"keeper":1,"members":[1,2],"lengths":[0,4],"crcs":[0,6],'
    b'"parity":1,"part":0,"format":3}'
)
FILES = {
    "job/gen-000000000003/MANIFEST.json": "0643d5b109a82dd0",
    "job/gen-000000000003/VERIFIED.json": "46cbda3984186c8b",
    "job/gen-000000000003/rank-00000-of-00002.json": "ec6c0c3f8a7febcc",
    "job/gen-000000000003/rank-00000-of-00002.safetensors": "83356c61920bae71",
    "job/gen-000000000003/rank-00001-of-00002.json": "1eb63069b6195f50",
    "job/gen-000000000003/rank-00001-of-00002.safetensors": "cdfc46eaef5ac7fd",
    "job/quarantined-000000000003": "2f05d4b689d270ca",
    "job/restored-000000000002": "cdb4ee2aea69cc6a",
}


def test_a_fragment_and_a_manifest_have_the_bytes_that_they_had() -> None:
    for body, written in (FRAGMENT, MANIFEST):
        kind: Any = type(body)
        assert seal(body)[0] == written
        assert unseal(written, kind, Path("file"))[0] == body


def test_a_commit_record_has_the_bytes_and_the_digest_that_it_had() -> None:
    copies = [Copy(owner=0, kind="data", holder="a", domain="rack", digest="d", layout_hash="layout")]
    record = CommitRecord.of(12, 34, 56, copies=copies)
    assert record.encode() == RECORD
    assert decode_record(RECORD) == record


def test_a_header_of_parity_has_the_bytes_that_it_had() -> None:
    header = RowHeader(12, 1, (1, 2), (0, 4), (0, 6))
    assert encode_header(header).rstrip(b"\0") == ROW
    assert decode_header(ROW) == header


def test_the_header_of_a_slot_has_the_bytes_that_it_had() -> None:
    header = SlotHeader(
        bytes(range(16)), 1, SlotState.COMMITTED, number=5, step=50, fencing_token=2, digest=bytes(range(32))
    )
    assert _digest(header.encode()) == "4b72aed92e9f3c02"


def test_the_files_of_a_checkpoint_and_the_notes_on_it_have_the_names_and_bytes_that_they_had(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    assert save(store, 3)
    assert store.verify(3).ok
    notes = Probation(store.directory)
    notes.quarantine(3, "bad")
    notes.restored(2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path)): _digest(path.read_bytes()) for path in files} == FILES


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize(
    "named",
    [SaveHandle(7, 70), RestoreReport(7, 70, 1, {}, 0, 0.0), Saved(7, 70)],
    ids=lambda named: type(named).__name__,
)
def test_the_generation_of_what_users_are_given_is_its_number(named: SaveHandle | RestoreReport | Saved) -> None:
    with pytest.warns(DeprecationWarning, match="it is called number now") as told:
        assert named.generation == named.number == 7
    assert told[0].filename == __file__


def test_quarantine_accepts_its_argument_under_the_former_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, memory=None) as manager:
        manager.prepare({"progress": {"step": 0}})
        manager.restore()
        with pytest.warns(DeprecationWarning, match="the argument generation of quarantine") as told:
            manager.quarantine(generation=4, reason="the loss is not a number")  # type: ignore[call-arg]
        assert told[0].filename == __file__
        manager.quarantine(5, "bad")
        manager.quarantine(number=6, reason="bad")
        assert set(Probation(tmp_path / "run").quarantined()) == {4, 5, 6}


def test_an_argument_is_not_accepted_under_both_names() -> None:
    def same(number: int) -> int:
        return number

    accept: Any = renamed_argument("generation", "number")(same)

    with (
        pytest.warns(DeprecationWarning, match="called number"),
        pytest.raises(TypeError, match="which are one argument"),
    ):
        accept(generation=1, number=1)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (Holding, ("number", "step", "epoch")),
        (RestorePlan, ("number", "step", "epoch")),
        (RestorableData, ("newest_number", "newest_epoch")),
        (MembershipBegan, ("epoch",)),
        (Begin, ("number", "step", "epoch")),
    ],
)
def test_messages_call_the_fencing_token_by_its_former_name(kind: type[msgspec.Struct], keys: tuple[str, ...]) -> None:
    assert set(keys) <= set(kind.__struct_encode_fields__)
    assert not [key for key in kind.__struct_encode_fields__ if "fencing" in key]


@pytest.mark.parametrize(("kind", "tag"), [(MembershipBegan, "EpochBegan"), (Repair, "Heal")])
def test_messages_keep_their_former_tags(kind: type[msgspec.Struct], tag: str) -> None:
    assert kind.__struct_config__.tag == tag


def test_a_stale_epoch_is_the_former_name_of_a_stale_fencing_token() -> None:
    with pytest.warns(DeprecationWarning, match="it is called StaleFencingToken now") as told:
        former = errors.StaleEpoch  # type: ignore[attr-defined]
    assert former is errors.StaleFencingToken
    assert told[0].filename == __file__


def test_no_usable_generation_is_the_former_name_of_an_error() -> None:
    with pytest.warns(DeprecationWarning, match="it is called NoUsableCheckpoint now") as told:
        former = errors.NoUsableGeneration  # type: ignore[attr-defined]
    assert former is errors.NoUsableCheckpoint
    assert told[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'NoUsableThing'"):
        _ = errors.NoUsableThing  # type: ignore[attr-defined]
