"""The files of a checkpoint on disk: their names, one fragment for each rank, and the manifest over all fragments.

::

    <root>/<job>/gen-000000000123/
        rank-00000-of-00002.safetensors   the sealed payload of one rank, byte for byte
        rank-00000-of-00002.json          its fragment: size, CRC32C of every chunk, layout hash
        ...
        MANIFEST.json                     the fragments' digests; the checkpoint is whole when this exists
        VERIFIED.json                     all bytes were read once and were right (`DurableStore.verify`)
    <root>/<job>/.replaced-gen-...        a checkpoint that another replaces, until that one's name is on disk

Fragments and manifest are ``{"body": ..., "digest": blake2b-256 of the body's bytes}``, byte for byte. A fragment does
not name the fencing token, so a checkpoint that two runs wrote with equal bytes has equal fragments. File names are
computed from ranks and never taken from a file. Lengths are bounded before anything is read.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from rackrun.checkpoint.base.digest import content_digest
from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError
from rackrun.checkpoint.commit.commit_records import NUMBER_MAX

__all__ = [
    "FORMAT",
    "FRAGMENT_BYTES_MAX",
    "MANIFEST",
    "MANIFEST_BYTES_MAX",
    "VERIFIED",
    "Fragment",
    "Manifest",
    "Record",
    "ManifestEntry",
    "TemporaryName",
    "attempt_fencing_token",
    "attempt_name",
    "check_job",
    "fragment_name",
    "kept_name",
    "replaced_name",
    "replaced_number",
    "checkpoint_name",
    "checkpoint_number",
    "seal",
    "shard_name",
    "temporary_name",
    "unseal",
]

FORMAT = 1
MANIFEST = "MANIFEST.json"
VERIFIED = "VERIFIED.json"
MANIFEST_BYTES_MAX = 64 * 2**20
FRAGMENT_BYTES_MAX = 64 * 2**20
_ON_DISK = {"number": "generation", "fencing_token": "epoch"}
"""Field -> its key in files. Format 1 calls the checkpoint number ``generation``, the fencing token ``epoch``."""


class Fragment(msgspec.Struct, frozen=True, kw_only=True, rename=_ON_DISK):
    """Describes one rank's file. ``crcs`` are little-endian uint32, one for each ``chunk_bytes`` of the file."""

    format: int = FORMAT
    job: str
    number: int
    step: int
    world_size: int
    rank: int
    size: int
    chunk_bytes: int
    crcs: bytes
    layout_hash: str
    share_of: tuple[str, str] | None = None
    """Digest and layout hash of the sealed image that this file is a part of; the other shards have the rest.

    None: the file is the image itself.
    """

    def chunk_crcs(self) -> np.ndarray:
        """Return the CRC32C of each chunk (uint32)."""
        return np.frombuffer(self.crcs, dtype="<u4")

    def check(self) -> None:
        """Raise IntegrityError when there are not as many CRCs as the size has chunks."""
        chunks = -(-self.size // self.chunk_bytes) if self.chunk_bytes > 0 else -1
        if self.size < 0 or len(self.crcs) != 4 * chunks:
            raise IntegrityError(
                f"the fragment of rank {self.rank} has {len(self.crcs)} bytes of CRCs for {self.size} bytes in chunks of "
                f"{self.chunk_bytes}.",
                remedy="write the shard again, or use another checkpoint.",
            )


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's entry in a manifest."""

    rank: int
    size: int
    layout_hash: str
    fragment: str
    """Digest of the rank's fragment."""
    fragment_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename=_ON_DISK):
    """Lists the shards of a whole checkpoint."""

    format: int = FORMAT
    job: str
    number: int
    step: int
    fencing_token: int
    world_size: int
    shards: tuple[ManifestEntry, ...]

    def same_content(self, other: Manifest) -> bool:
        """Whether both are equal, apart from the fencing tokens of their writers."""
        return msgspec.structs.replace(self, fencing_token=other.fencing_token) == other

    def check(self) -> None:
        """Raise IntegrityError unless there is one shard for each rank, in order, with possible sizes."""
        ranks = [shard.rank for shard in self.shards]
        if len(ranks) != self.world_size or ranks != list(range(len(ranks))) or not ranks:
            raise IntegrityError(
                f"the manifest of checkpoint {self.number} does not list ranks 0 to {self.world_size - 1}.",
                remedy="use another checkpoint.",
            )
        if any(shard.size < 0 or not 0 <= shard.fragment_bytes <= FRAGMENT_BYTES_MAX for shard in self.shards):
            raise IntegrityError(
                f"the manifest of checkpoint {self.number} has impossible sizes.", remedy="use another checkpoint."
            )


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a checkpoint all of whose bytes were read and right. ``manifest``: the digest of its manifest."""

    format: int = FORMAT
    manifest: str

    def check(self) -> None:
        pass


class _Sealed(msgspec.Struct, frozen=True):
    body: msgspec.Raw
    digest: str


class _Version(msgspec.Struct, frozen=True):
    format: int


T = TypeVar("T", Fragment, Manifest, Record)


def seal(body: Fragment | Manifest | Record) -> tuple[bytes, str]:
    """Return the bytes of a sealed file and the digest in it. Equal bodies give equal bytes."""
    encoded = msgspec.json.encode(body)
    digest = content_digest(encoded)
    return msgspec.json.encode(_Sealed(msgspec.Raw(encoded), digest)), digest


def unseal(data: bytes, kind: type[T], where: Path) -> tuple[T, str]:
    """Return body and digest of a sealed file.

    Raises IntegrityError when its digest or its content is wrong, and FormatVersionError when a newer rackrun wrote it.
    ``where`` is named in the error.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        encoded = bytes(sealed.body)
        if content_digest(encoded) != sealed.digest or msgspec.json.encode(sealed) != data:
            raise IntegrityError(f"{where} does not match its digest.", remedy="use another checkpoint.")
        version = msgspec.json.decode(encoded, type=_Version).format
        if version != FORMAT:
            raise FormatVersionError(
                f"{where} has format {version}; this rackrun reads format {FORMAT}.",
                remedy="read it with the rackrun that wrote it.",
            )
        body = msgspec.json.decode(encoded, type=kind)
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        OverflowError,
        RecursionError,
    ) as error:  # RecursionError: JSON that is nested too deep
        raise IntegrityError(
            f"{where} cannot be read as a {kind.__name__.lower()}: {error}.",
            remedy="use another checkpoint (rackctl ckpt ls lists them).",
        ) from error
    body.check()
    return body, sealed.digest


# -- names
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_CHECKPOINT = re.compile(r"gen-(\d{12,20})", re.ASCII)
_ATTEMPT = re.compile(r"data-(\d+)-[0-9a-f]+", re.ASCII)
_REPLACED = re.compile(r"\.replaced-gen-(\d{12,20})-[0-9a-f]+", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-gen-(\d+)-(\d+)-[0-9a-f]+", re.ASCII)


def check_job(job: str) -> str:
    """Return the job's name. Raises CheckpointError when it cannot be a directory's name."""
    if not _JOB.fullmatch(job):
        raise CheckpointError(
            f"{job!r} cannot be the name of a job's directory.",
            remedy="use at most 128 letters, digits, '.', '_' and '-', a letter or digit first.",
        )
    return job


def checkpoint_name(number: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"gen-{number:012d}"


def checkpoint_number(name: str) -> int | None:
    """Return the number of the checkpoint whose directory has this name; None when the name is no checkpoint's."""
    match = _CHECKPOINT.fullmatch(name)
    number = int(match[1]) if match else NUMBER_MAX + 1
    return number if number <= NUMBER_MAX and checkpoint_name(number) == name else None


def temporary_name(job: str, number: int, step: int, fencing_token: int, world_size: int) -> str:
    """Return the name of the directory in which an attempt is written.

    All writers of one attempt compute the same name without communicating. Attempts that differ in any argument have
    different directories.
    """
    nonce = content_digest(msgspec.json.encode([job, number, step, fencing_token, world_size]))[:16]
    return f".tmp-gen-{number}-{fencing_token}-{nonce}"


def attempt_name(job: str, number: int, step: int, fencing_token: int, world_size: int) -> str:
    """Return the name of the prefix that holds one attempt's data in an object store. Like `temporary_name`."""
    return f"data-{fencing_token}-{temporary_name(job, number, step, fencing_token, world_size).rpartition('-')[2]}"


def attempt_fencing_token(name: str) -> int | None:
    """Return the fencing token in the name of an attempt's prefix; None when the name is no attempt's."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def kept_name(number: int) -> str:
    """Return a new name for what has a checkpoint's name and is none of that number. It is kept under it."""
    return f"not-{checkpoint_name(number)}-{secrets.token_hex(4)}"


def replaced_name(number: int) -> str:
    """Return a new name for a checkpoint that another one replaces, until that one is on disk."""
    return f".replaced-{checkpoint_name(number)}-{secrets.token_hex(4)}"


def replaced_number(name: str) -> int | None:
    """Return the checkpoint number in a name of `replaced_name`; None when the name is another."""
    match = _REPLACED.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= NUMBER_MAX else None


@dataclass(frozen=True)
class TemporaryName:
    """Checkpoint number and fencing token in the name of a temporary directory."""

    number: int
    fencing_token: int

    @classmethod
    def parse(cls, name: str) -> TemporaryName | None:
        match = _TEMPORARY.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match and int(match[1]) <= NUMBER_MAX else None


def shard_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def fragment_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.json"
