"""Convert checkpoints between rackrun's layout, torch's plain distributed checkpoint, and safetensors sets.

Safetensors sets have Hugging Face's form. A conversion runs offline, in one process, with the whole state in memory.
The result is read again before it gets its name, and compared bit for bit with what was to be written. A plain
distributed checkpoint consists of pickles, which may run any code when they are read, so it is read only when
``unsafe_pickle`` says that its writer is trusted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError
from rackrun.checkpoint.base.location import is_remote
from rackrun.checkpoint.dcp.dcp_format import place_of
from rackrun.checkpoint.dcp.dcp_storage import RackrunStorageReader, RackrunStorageWriter
from rackrun.checkpoint.offline.export import export
from rackrun.checkpoint.offline.safetensors_set import is_set, read_set
from rackrun.errors import UsageError

__all__ = ["ConversionResult", "Layout", "convert", "layout_of"]

Layout = Literal["rackrun", "dcp", "hf"]
NameOf = Callable[[list[str]], Mapping[str, str]]


@dataclass(frozen=True)
class ConversionResult:
    """What was converted. ``bytes``: of tensors."""

    source: Layout
    target: Layout
    tensors: int
    bytes: int
    others: int
    """How many values are not tensors."""


def layout_of(path: Path) -> Layout:
    """Return the layout of the files at ``path``. Raises UsageError when it is no directory."""
    if is_remote(path):
        return "rackrun"
    if not path.is_dir():
        raise UsageError(f"{path} is no directory.", remedy="give the directory of a checkpoint.")
    if (path / ".metadata").exists():
        return "dcp"
    return "hf" if is_set(path) else "rackrun"


def convert(
    source: Path,
    target: Path,
    to: Layout,
    *,
    names: NameOf | None = None,
    file_bytes_max: int = 5 * 10**9,
    unsafe_pickle: bool = False,
) -> ConversionResult:
    """Convert ``source`` into the new checkpoint ``target``.

    ``source``: a job's directory, or one checkpoint in it; a plain distributed checkpoint; a safetensors set.
    ``target``: a new directory; in rackrun's layout, a job's directory, which gets its next checkpoint. ``names``: maps
    the names of all tensors to those in the target; tensors that it leaves out are not converted, nor are values that
    are not tensors. None keeps everything under its name.

    Raises UsageError, and CheckpointError when something is damaged, cannot be written, or does not fit the layout.
    """
    kind = layout_of(source)
    state = _read(source, kind, unsafe_pickle=unsafe_pickle)
    if names is not None:
        flat = _tensors(state)
        state = {new: flat[old] for old, new in names(list(flat)).items()}
    if to == "hf" and (others := [name for name, value in _flat(state).items() if not isinstance(value, torch.Tensor)]):
        raise UsageError(
            f"{len(others)} values are no tensors, such as {others[0]!r:.200}: a safetensors set has no place for them.",
            remedy="choose tensors with --module NAME.",
        )
    wanted = _tensors(state)
    if to == "rackrun":
        _write_rackrun(target, state, wanted)
    else:
        with _beside(target) as part:
            if to == "dcp":
                _save(state, FileSystemWriter(str(part), single_file_per_rank=False))
                found = _tensors(_load(FileSystemReader(str(part))))
            else:
                found = _write_set(part, state, file_bytes_max)
            _compare(wanted, found, part)
    size = sum(tensor.nbytes for tensor in wanted.values())
    return ConversionResult(kind, to, len(wanted), size, len(_flat(state)) - len(wanted))


# -- reading
def _read(source: Path, kind: Layout, *, unsafe_pickle: bool) -> dict[str, Any]:
    if kind == "hf":
        return dict(read_set(source))
    if kind == "rackrun":
        return _load(RackrunStorageReader(source, unsafe_pickle=unsafe_pickle))
    if not unsafe_pickle:
        raise UsageError(
            f"{source} is made of pickles, which may run any code when they are read.",
            remedy="give --unsafe-pickle, if you trust who wrote it.",
        )
    return _load(FileSystemReader(str(source)))


def _load(reader: StorageReader) -> dict[str, Any]:
    state: dict[str, Any] = {}
    with _typed():
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def _save(state: dict[str, Any], writer: StorageWriter) -> None:
    with _typed():
        dcp.save(state, storage_writer=writer, no_dist=True)


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group; that is intended
        try:
            yield
        except dcp.api.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, CheckpointError):
                raise first from error
            raise CheckpointError(f"torch: {first!s:.500}", remedy="see whether torch itself can read it.") from error


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return dict(flatten_state_dict(state)[0])


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in _flat(state).items() if isinstance(value, torch.Tensor)}


# -- writing
def _write_rackrun(target: Path, state: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    _save(state, RackrunStorageWriter(target))
    store, named = place_of(target)
    number = named if named is not None else store.checkpoints()[0].number
    verified = store.verify(number)
    if not verified.ok:
        raise IntegrityError(f"{store.path(number)}: {verified.damage[0].what}", remedy="see to the storage.")
    _compare(wanted, _tensors(_load(RackrunStorageReader(store.path(number)))), store.path(number))


def _write_set(part: Path, state: dict[str, Any], file_bytes_max: int) -> dict[str, torch.Tensor]:
    """Write a safetensors set by exporting a temporary checkpoint, since sets are assembled in one place only."""
    between = part / "checkpoint"
    try:
        _save(state, RackrunStorageWriter(between))
        store, _ = place_of(between)
        with store.open(0) as reader:
            export(reader, part / "set", file_bytes_max=file_bytes_max)
        for name in os.listdir(part / "set"):
            os.rename(part / "set" / name, part / name)
        (part / "set").rmdir()
    finally:
        shutil.rmtree(between, ignore_errors=True)
    return read_set(part)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to ``target`` on success and removed otherwise."""
    if target.exists() or not target.parent.is_dir():
        what = "is there already" if target.exists() else f"cannot be made: {target.parent} is no directory"
        raise UsageError(f"{target} {what}.", remedy="give a new directory in one that is there.")
    part = target.with_name(f".{target.name}-{secrets.token_hex(4)}.part")
    try:
        part.mkdir()
        yield part
        os.rename(part, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}.", remedy="make room, or choose another place."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _compare(wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], where: Path) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        a, b = wanted.get(name), found.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(_bits(a), _bits(b)):
            raise IntegrityError(f"{name!r:.200} is not in {where} as it was.", remedy="see to the storage.")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
