"""``rackctl ckpt rebuild``: writes a checkpoint to disk from what a dead job has left in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rackrun.checkpoint.arena.arena_folder import job_folder
from rackrun.checkpoint.arena.orphans import SHARED_MEMORY
from rackrun.checkpoint.base.location import local_path
from rackrun.checkpoint.durable.durable_manifest import check_job
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.offline.directory_survey import stores_in
from rackrun.checkpoint.offline.job_remains import Remains
from rackrun.ctl.ckpt.ckpt_render import amount, print_json, progress_bar
from rackrun.ctl.ckpt.former_number import numbered
from rackrun.errors import UsageError

if TYPE_CHECKING:
    from rackrun.checkpoint.offline.rebuilding import Rebuilt

__all__ = ["rebuild"]


def rebuild(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of CheckpointManager, or one job's directory in it.")
    ],
    arenas: Annotated[
        list[Path] | None,
        typer.Option(
            "--arenas",
            metavar="FOLDER",
            help="Folder of a MemoryTier, or with arenas copied from other hosts. Repeatable; /dev/shm is always searched.",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Directory to write to. Default: DIR.")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--number",
            metavar="N",
            min=0,
            help="Number of the checkpoint. Default: the newest.",
            show_default=False,
        ),
    ] = None,
    gone: Annotated[
        bool, typer.Option("--gone", help="The job has ended, though its arenas name processes of other containers.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which sources would be used.")] = False,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="The job, if there are several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a checkpoint from memory to disk. It is the newest recoverable one of an ended CheckpointManager job.

    Every byte needs a verified source: arenas on this host or in FOLDER, or files on disk. Intact files stay as they are.
    Exit code 1: bytes are missing; the command names them.
    """
    from rackrun.checkpoint.offline.rebuilding import rebuild_checkpoint

    for folder in arenas or ():
        if not folder.is_dir():
            raise UsageError(f"{folder} is no directory.", remedy="give a folder with arenas.")
    folders = [SHARED_MEMORY, *(arenas or ())]
    store = _store(directory, folders, job)
    places = [place for folder in folders for place in _places(folder, store, named=folder in (arenas or ()))]
    target = store if into is None else DurableStore(into.expanduser().resolve(), store.job)
    with (
        Remains(store, places, gone=gone) as remains,
        progress_bar("rebuilding", quiet=as_json) as progress,
    ):
        done = rebuild_checkpoint(remains, target, number, dry_run=dry_run, progress=progress)
        unused = {str(path): why for path, why in remains.unused.items()}
    if as_json:
        print_json(_as_json(done, target, unused, dry_run=dry_run))
    else:
        _tell(done, target, unused, dry_run=dry_run)
    if done.missing:
        raise typer.Exit(1)


def _store(directory: Path, folders: Sequence[Path], job: str | None) -> DurableStore:
    """The job may have nothing on disk yet: then its arenas have its name."""
    path = local_path(directory, "DIR").expanduser().resolve()
    found = {store.job: store for store in stores_in(path)}
    for name in (name for folder in folders for name in _jobs_in(folder, path)):
        found.setdefault(name, DurableStore(path, name))
    if job is not None:
        return found.get(job) or DurableStore(path, check_job(job))
    if len(found) != 1:
        has = f"has several jobs: {', '.join(sorted(found))}" if found else "has no checkpoint, and no arena is of it"
        raise UsageError(f"{directory} {has}.", remedy="choose one with --job.")
    return next(iter(found.values()))


def _jobs_in(folder: Path, directory: Path) -> list[str]:
    """Jobs whose arenas are there, and whose directory this is."""
    base = job_folder(folder, "job", directory).parent
    names = [name.rpartition("-")[0] for name in os.listdir(base)] if base.is_dir() else []
    return [name for name in names if name and job_folder(folder, name, directory).is_dir()]


def _places(folder: Path, store: DurableStore, *, named: bool) -> list[Path]:
    """The job's own folder in ``folder``; or, when that was ``named``, all of it."""
    own = job_folder(folder, store.job, store.root)
    for place in (own, folder / own.name):
        if place.is_dir():
            return [place]
    if not named:
        return []
    found = [place.name for place in folder.rglob(f"{store.job}-*") if place.is_dir()]
    others = sorted({name for name in found if name.rpartition("-")[0] == store.job})
    if len(others) > 1:
        raise UsageError(f"{folder} has {', '.join(others)}.", remedy="name the folder that is of this job.")
    return [folder]


def _as_json(done: Rebuilt, target: DurableStore, unused: dict[str, str], *, dry_run: bool) -> dict[str, Any]:
    return {
        "job": target.job,
        **numbered(done.number),
        "step": done.step,
        "world_size": done.world_size,
        "path": str(target.path(done.number)),
        "written": done.written,
        "dry_run": dry_run,
        "bytes": done.bytes,
        "sources": {str(rank): where for rank, where in done.sources.items()},
        "passed_over": {str(number): why for number, why in done.passed_over.items()},
        "unused": unused,
    }


def _tell(done: Rebuilt, target: DurableStore, unused: dict[str, str], *, dry_run: bool) -> None:
    for number, why in done.passed_over.items():
        print(f"checkpoint {number} {'cannot be had' if number in done.missing else 'is not taken'}: {why}")
    for path, why in unused.items():
        print(f"not read: {path}: {why}")
    of = f"checkpoint {done.number}, step {done.step}, of {done.world_size} rank(s)"
    if done.written:
        print(f"{target.path(done.number)}: {of}, {amount(done.bytes)}, read back and right")
    elif done.sources:
        print(f"{of} would be written to {target.path(done.number)}" if dry_run else of)
    else:
        print(f"{of}: on disk already, and every byte is right")
    for rank, where in done.sources.items():
        print(f"rank {rank} from {where}")
