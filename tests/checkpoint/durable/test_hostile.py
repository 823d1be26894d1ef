"""A manifest, a fragment, a note or a commit record that is damaged or was made on purpose costs only itself."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rackrun.checkpoint.base.digest import content_digest
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.commit.commit_records import decode_record
from rackrun.checkpoint.durable.durable_manifest import MANIFEST, fragment_name
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import living_fencing_token
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.durable.storage.files import read_small
from rackrun.checkpoint.image.image_layout import parse_image
from rackrun.checkpoint.image.plain_part import decode_plain
from rackrun.checkpoint.offline.directory_survey import survey
from rackrun.checkpoint.offline.suspect_tensors import suspects
from tests.checkpoint.storage import JOB, save, store_at

HUGE = [2**31, 2**63 - 1, 2**64, 10**400, -1, -(2**70), 0, 1]
ODD = ["..", "../../etc/passwd", "/etc/passwd", "", "\0", "é", "a" * 5000, "rank-00000-of-00001.json"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(HUGE)
    | st.floats(allow_nan=False)
    | st.sampled_from(ODD)
    | st.text(max_size=8),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["rank", "size", "x"]), below, max_size=3)
    ),
    max_leaves=6,
)
DEPTHS = st.sampled_from([10, 500, 5000, 200_000])


def sealed(body: bytes) -> bytes:
    """With a digest that is right: whoever made it knows how."""
    return b'{"body":' + body + b',"digest":"' + content_digest(body).encode() + b'"}'


def deep(depth: int, kind: bytes) -> bytes:
    return (
        kind * depth + {b"[": b"]", b'{"a":': b"}"}[kind] * depth
        if kind == b"["
        else kind * depth + b"0" + b"}" * depth
    )


@st.composite
def hostile(draw: Any, good: bytes) -> bytes:
    how = draw(
        st.sampled_from(
            ["cut", "flipped", "deep", "field", "field sealed", "deep sealed", "deep field", "bytes", "text"]
        )
    )
    if how == "cut":
        return good[: draw(st.integers(0, len(good) - 1))]
    if how == "flipped":
        at = draw(st.integers(0, len(good) - 1))
        return good[:at] + bytes([good[at] ^ (1 << draw(st.integers(0, 7)))]) + good[at + 1 :]
    kind = draw(st.sampled_from([b"[", b'{"a":']))
    if how == "deep":
        return deep(draw(DEPTHS), kind)
    if how == "deep sealed":
        return sealed(deep(draw(DEPTHS), kind))
    if how == "bytes":
        return bytes(draw(st.binary(max_size=64)))
    if how == "text":
        return sealed(b'"\xff\xfe\xed\xa0\x80"')
    document = msgspec.json.decode(good)
    body = document.get("body", document) if isinstance(document, dict) else {}
    field = draw(st.sampled_from(sorted(body)))
    if how == "deep field":
        encoded = msgspec.json.encode({**body, field: "@"}).replace(b'"@"', deep(draw(DEPTHS), kind))
        return sealed(encoded)
    value = draw(VALUES)
    changed = json.dumps({**body, field: value}, ensure_ascii=False).encode(errors="surrogatepass")
    return sealed(changed) if how == "field sealed" else changed


def two_checkpoints(root: Path) -> DurableStore:
    store = store_at(root)
    assert save(store, 1)
    assert save(store, 2)
    return store


@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_a_hostile_file_of_one_checkpoint_leaves_the_other_readable(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = two_checkpoints(root)
        name = data.draw(st.sampled_from([MANIFEST, fragment_name(0, 2), "VERIFIED.json"]))
        path = store.path(2) / name
        if name == "VERIFIED.json":
            assert store.verify(2).ok
        path.write_bytes(data.draw(hostile(path.read_bytes())))
        found, left_out = store.look()
        assert 1 in {info.number for info in found}
        assert {info.number for info in found} | left_out.keys() == {1, 2}
        survey(store)
        verified = store.verify(2)
        for damage in verified.damage:
            suspects(store, 2, damage)
        try:
            with store.open(2) as reader:
                for rank in range(min(reader.world_size, 2)):
                    reader.read(rank, 0, reader.reader(rank).size)
        except CheckpointError:
            pass
        assert store.verify(1).ok
        assert not collect(store, Retention(1), fencing_token=1, now=lambda: 0.0, orphan_ttl_s=1.0).failures
        assert store.verify(1).ok if store.path(1).exists() else store.verify(2).ok
        assert [one.name for one in root.iterdir()] == [JOB]


@settings(max_examples=100)
@given(st.data())
def test_notes_and_records_that_are_hostile_are_no_more_than_that(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / JOB
        directory.mkdir()
        noise = data.draw(st.binary(max_size=200) | DEPTHS.map(lambda depth: deep(depth, b"[")))
        (directory / "quarantined-000000000001").write_bytes(noise)
        (directory / "restored-000000000002").mkdir()
        (directory / "OWNER.json").write_bytes(noise)
        (directory / "gen-99999999999999999999").mkdir()
        (directory / ".tmp-gen-1-2-3").write_bytes(noise)
        assert list(Probation(directory).quarantined()) == [1]
        store = store_at(Path(folder))
        assert living_fencing_token(store) == (False, None)
        assert store.checkpoints() == []
        survey(store)
        for reads in (decode_record, decode_plain, lambda given: parse_image(given, limit=len(given))):
            with contextlib.suppress(CheckpointError):
                reads(noise)


def test_a_file_that_is_longer_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(2**40)
    store = store_at(tmp_path)
    with pytest.raises(CheckpointError, match="plain file"):
        read_small(store.files, path, 1000)
