"""``rackctl ckpt``: commands that show, verify and change the contents of a checkpoint directory.

Exit codes: 0 all is well; 1 something is damaged or missing, or could not be done; 2 bad usage.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, NoUsableCheckpoint
from rackrun.checkpoint.base.location import local_path
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import living_fencing_token
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.retention import Retention, all_left_files, choose, collect
from rackrun.checkpoint.offline.directory_survey import (
    DirectorySurvey,
    nothing_in,
    one_store,
    stores_in,
    survey,
    unnamed,
)
from rackrun.checkpoint.offline.suspect_tensors import suspects
from rackrun.ctl.ckpt import ckpt_convert, ckpt_memory, ckpt_rebuild
from rackrun.ctl.ckpt.ckpt_render import (
    Checked,
    DamageFound,
    amount,
    print_json,
    progress_bar,
    render_checked,
    render_surveys,
    surveyed,
)
from rackrun.ctl.ckpt.export_names import model_names
from rackrun.ctl.ckpt.former_number import NumberedCommand, numbered
from rackrun.errors import UsageError

__all__ = ["ckpt"]

ckpt = typer.Typer(
    name="ckpt",
    help="Inspect and repair checkpoints. Also: plan and clean up memory for snapshots.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The --checkpoint-dir of a job, or one job's directory in it.")
]
Job = Annotated[str | None, typer.Option("--job", metavar="NAME", help="The job, if DIR has several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Number = typer.Argument(
    metavar="[NUMBER]", help="Number of the checkpoint. Default: the newest.", show_default=False, min=0
)
_HOUR_S = 3600.0


@ckpt.command(name="ls", epilog="Example: rackctl ckpt ls checkpoints/ --json")
def list_checkpoints(directory: Directory, job: Job = None, as_json: Json = False) -> None:
    """List the checkpoints. Newest first, with unfinished ones and waste. Exit code 1: a checkpoint is not complete."""
    found = [survey(store) for store in stores_in(directory, job)]
    if as_json:
        print_json({"jobs": [surveyed(one, time.time()) for one in found]})
    else:
        render_surveys(Console(markup=False, emoji=False), directory, found, time.time())
    if any(one.damaged for one in found):
        raise typer.Exit(1)


@ckpt.command(epilog="Example: rackctl ckpt verify checkpoints/ --all")
def verify(
    directory: Directory,
    number: Annotated[int | None, _Number] = None,
    every: Annotated[bool, typer.Option("--all", help="Verify all checkpoints.")] = False,
    job: Job = None,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint with its checksums. Every byte is read. Intact checkpoints are marked as verified.

    Names the damaged rank, chunk and tensors. Exit code 1: something is damaged or missing.
    """
    if number is not None and every:
        raise UsageError("a checkpoint number and --all cannot be given together.", remedy="give one of them.")
    stores = stores_in(directory, job) if number is None else [one_store(directory, job)]
    if number is not None:
        with contextlib.suppress(IntegrityError):  # told below
            _whole(stores[0], number)
    wanted = []
    for store in stores:
        found = survey(store)
        there = found.numbers() if every else found.numbers()[:1]
        wanted += _wanted(store, found, there if number is None else [number])
    if not wanted:
        raise nothing_in(directory)
    _check(wanted, as_json)


@ckpt.command(epilog="Example: rackctl ckpt scrub checkpoints/")
def scrub(directory: Directory, job: Job = None, as_json: Json = False) -> None:
    """Verify what is not verified yet. Exit code 1: a checkpoint is damaged."""
    wanted = []
    for store in stores_in(directory, job):
        found = survey(store)
        done = {info.number for info in found.whole if info.verified}
        wanted += _wanted(store, found, [number for number in found.numbers() if number not in done])
    _check(wanted, as_json)


@ckpt.command(cls=NumberedCommand, epilog="Example: rackctl ckpt export checkpoints/ model/ --number 1000")
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
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
    everything: Annotated[bool, typer.Option("--all", help="Export all tensors, with their names on disk.")] = False,
    module: Annotated[
        str | None, typer.Option("--module", metavar="NAME", help="The tracked module, if there are several.")
    ] = None,
    file_gb: Annotated[float, typer.Option("--file-gb", min=0.001, help="Largest size of a file, in GB.")] = 5.0,
    job: Job = None,
    as_json: Json = False,
) -> None:
    """Write one safetensors set with an index. Parameters and buffers get the names that load_state_dict expects.

    Every byte that is read is compared with its checksum. The set is complete, or it is not there.
    """
    from rackrun.checkpoint.offline.export import export as write_set
    from rackrun.checkpoint.offline.export import tensor_names

    store, out = one_store(directory, job), local_path(out, "OUT").expanduser().resolve()
    if everything and module is not None:
        raise UsageError("--all and --module cannot be given together.", remedy="give one of them.")
    if out.exists() or not out.parent.is_dir():
        what = "is there already" if out.exists() else f"cannot be made: {out.parent} is no directory"
        raise UsageError(f"{out} {what}.", remedy="give a new directory in one that is there.")
    passed_over: dict[int, str] = {}
    if number is None:
        number, passed_over = _newest(store, directory)
    else:
        _whole(store, number)
    with store.open(number) as reader:
        held = tensor_names(reader)
        named = {name: name for name in held} if everything else model_names(held, module)
        with progress_bar("exporting", quiet=as_json) as progress:
            done = write_set(reader, out, name_of=named.get, file_bytes_max=int(file_gb * 1e9), progress=progress)
        step = reader.step
    left_out = len(held) - len(named)
    if as_json:
        print_json(
            {
                "path": str(done.path),
                "job": store.job,
                **numbered(number),
                "step": step,
                "files": done.files,
                "tensors": done.tensors,
                "bytes": done.bytes,
                "left_out": left_out,
                "passed_over": {str(newer): why for newer, why in passed_over.items()},
            }
        )
        return
    for newer, why in passed_over.items():
        print(f"checkpoint {newer} is not taken: {why}", file=sys.stderr)
    rest = f"; {left_out} of other kinds left out (--all)" if left_out else ""
    print(
        f"{done.path}: {done.tensors} tensors, {amount(done.bytes)} in {len(done.files)} file(s), of checkpoint {number}, "
        f"step {step}{rest}"
    )


@ckpt.command(epilog="Example: rackctl ckpt gc checkpoints/ --keep-last 3 --keep-every 1000 --dry-run")
def gc(
    directory: Directory,
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", min=1, help="Number of newest checkpoints to keep.")
    ],
    keep_every: Annotated[
        int,
        typer.Option(
            "--keep-every", metavar="N", min=0, help="Also keep the first checkpoint of every N steps; 0: no."
        ),
    ] = 0,
    orphan_hours: Annotated[
        float,
        typer.Option("--orphan-hours", min=0, help="Age in hours from which leftovers of ended writers are deleted."),
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    job: Job = None,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints. Unfinished ones of earlier starts and waste go too. The newest verified one always stays.

    If no job is at work there, a checkpoint that was being replaced when its writer died has its name back first.

    If none is marked as verified, the newest is verified first. The job may run meanwhile.
    """
    store, retention = one_store(directory, job), Retention(keep_last, keep_every)
    at_work = _owner(store)[1] is not None  # who replaces checkpoints is named there
    put_back = [] if dry_run or at_work else store.put_back()
    found = survey(store)
    if dry_run:
        before_s = time.time() - orphan_hours * _HOUR_S
        partial = all_left_files(store, before_s)
        _would_collect(found, retention, before_s, _over(store), partial, at_work=at_work, as_json=as_json)
        return
    _mark_one(store, found, quiet=as_json)
    done = collect(
        store, retention, fencing_token=_newest_fencing_token(found), now=time.time,
        orphan_ttl_s=orphan_hours * _HOUR_S, over=_over(store),
    )  # fmt: skip
    failures = [str(failure) for failure in done.failures]
    if as_json:
        print_json(
            {
                "job": store.job,
                "kept": {str(number): why for number, why in done.kept.items()},
                "dropped": done.dropped,
                "unfinished": done.orphans,
                "trash": done.trash,
                "partial": done.partial,
                "put_back": put_back,
                "failures": failures,
            }
        )
    else:
        for number in put_back:
            print(f"has its name again: {number}, whose replacement was not finished")
        _tell_kept(done.kept)
        print(
            f"deleted: {_listed(done.dropped)}; {len(done.orphans)} unfinished; {done.trash} directories in all"
            + (f"; {len(done.partial)} partial files" if done.partial else "")
        )
        for failure in failures:
            print(f"not done: {failure}")
    if failures:
        raise typer.Exit(1)


@ckpt.command(epilog="Example: rackctl ckpt quarantine checkpoints/ 299 --reason 'the loss is not a number after it'")
def quarantine(
    directory: Directory,
    number: Annotated[int, typer.Argument(metavar="NUMBER", min=0, help="Number of the checkpoint.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, which ls shows.")] = "",
    lift: Annotated[
        bool, typer.Option("--lift", help="End the quarantine, or allow a checkpoint that was passed over.")
    ] = False,
    job: Job = None,
    as_json: Json = False,
) -> None:
    """Keep a job from using a bad checkpoint. No start resumes from it again. Nothing is deleted."""
    store = one_store(directory, job)
    if bool(reason) == lift:
        raise UsageError("a quarantine needs a reason.", remedy="give --reason TEXT, or --lift alone to end it.")
    _whole(store, number)
    probation = Probation(store.directory, store.files)
    if lift:
        probation.forget(number)
    elif number not in probation.quarantined():
        probation.quarantine(number, reason)
    why = probation.barred().get(number, "")
    if bool(why) == lift:
        raise CheckpointError(f"{store.directory} cannot be changed.", remedy="be the user who wrote it.")
    if as_json:
        print_json({"job": store.job, **numbered(number), "barred": why})
    else:
        print(f"{store.job}: checkpoint {number} " + (f"is {why}" if why else "may be taken again"))


ckpt.command(epilog="Example: rackctl ckpt convert checkpoints/run model/ --to hf")(ckpt_convert.convert)
ckpt.command(cls=NumberedCommand, epilog="Example: rackctl ckpt rebuild checkpoints/ --arenas /mnt/node1-shm")(
    ckpt_rebuild.rebuild
)
ckpt.command(epilog="Example: rackctl ckpt plan --world-size 72 --bytes-per-rank 12GB --trays 18")(ckpt_memory.plan)
ckpt.command(epilog="Example: rackctl ckpt clean --yes")(ckpt_memory.clean)


# -- which
def _newest(store: DurableStore, directory: Path) -> tuple[int, dict[int, str]]:
    """Return the newest complete checkpoint, and why each newer one is not complete. Raises `NoUsableCheckpoint`."""
    whole, left_out = store.look()
    story = {number: str(why) for number, why in left_out.items()}
    for left in survey(store).leftovers:
        if left.kind == "unnamed":
            story[left.number] = str(unnamed(store, left.number, nothing_in(directory)))
    if not whole:
        if story:
            raise NoUsableCheckpoint(
                f"no checkpoint in {directory} can be read. {' '.join(story.values())}", remedy="see rackctl ckpt ls."
            )
        raise nothing_in(directory)
    newest = whole[0].number
    return newest, {number: why for number, why in story.items() if number > newest}


def _whole(store: DurableStore, number: int) -> None:
    """Check that a checkpoint is there and whole. Raises UsageError when there is none of that number, otherwise
    CheckpointError, as `DurableStore.whole` does."""
    try:
        store.whole(number)
    except NoUsableCheckpoint as error:
        found = unnamed(store, number, error)
        if found is error:
            raise UsageError(error.what, remedy="give a number that rackctl ckpt ls lists.") from error
        raise found from error


# -- verification
@dataclass(frozen=True)
class _Wanted:
    store: DurableStore
    number: int
    bytes: int
    """0: it is not whole."""


def _wanted(store: DurableStore, found: DirectorySurvey, numbers: Sequence[int]) -> list[_Wanted]:
    sizes = {info.number: info.bytes for info in found.whole}
    return [_Wanted(store, number, sizes.get(number, 0)) for number in numbers]


def _check(wanted: Sequence[_Wanted], as_json: bool) -> None:
    total, before = sum(one.bytes for one in wanted), 0
    checked = []
    with progress_bar("verifying", quiet=as_json) as show:

        def advance(done: int, _: int) -> None:
            show(before + done, total)

        for one in wanted:
            checked.append(_checked(one.store, one.number, advance))
            before += one.bytes
    if as_json:
        told = [msgspec.to_builtins(one) | numbered(one.number) for one in checked]
        print_json({"ok": all(one.ok for one in checked), "checkpoints": told, "generations": told})
    else:
        render_checked(Console(markup=False, emoji=False), checked)
    if not all(one.ok for one in checked):
        raise typer.Exit(1)


def _checked(store: DurableStore, number: int, progress: Callable[[int, int], None]) -> Checked:
    began = time.monotonic()
    try:
        outcome = store.verify(number, progress)
    except CheckpointError as found:  # gone meanwhile, without its name, or of a newer format
        error = unnamed(store, number, found) if isinstance(found, NoUsableCheckpoint) else found
        return Checked(store.job, number, False, 0, 0.0, (DamageFound(error.what),))
    damage = tuple(DamageFound(one.what, one.rank, one.chunk, suspects(store, number, one)) for one in outcome.damage)
    return Checked(store.job, number, outcome.ok, outcome.bytes, time.monotonic() - began, damage)


# -- deletion
def _newest_fencing_token(found: DirectorySurvey) -> int:
    """Return the fencing token of the newest start. What it left unfinished may still be in progress, and stays."""
    return max((info.fencing_token for info in found.whole), default=0)


def _mark_one(store: DurableStore, found: DirectorySurvey, *, quiet: bool) -> None:
    """Verify a checkpoint, showing progress. `collect` deletes nothing before one is verified, and would verify without
    showing progress."""
    usable = [info for info in found.whole if info.number not in found.barred]
    if any(info.verified for info in usable or found.whole):
        return
    for info in usable or found.whole:
        with progress_bar(f"verifying {info.number}", quiet=quiet) as progress:
            if _checked(store, info.number, progress).ok:
                return


def _over(store: DurableStore) -> Callable[[int], bool]:
    """Return a function that tells whether the job of a fencing token is known to be over. Raises as `_owner` does."""
    known, living = _owner(store)
    return lambda token: known and token != living


def _owner(store: DurableStore) -> tuple[bool, int | None]:
    """Return whether the directory names an owner, and its fencing token if it is alive.

    Raises CheckpointError if the storage cannot be used.
    """
    try:
        return living_fencing_token(store)
    except OSError as error:
        raise CheckpointError(
            f"{store.directory} cannot be used: {error}.", remedy="be the user who wrote it."
        ) from error


def _would_collect(
    found: DirectorySurvey,
    retention: Retention,
    before_s: float,
    over: Callable[[int], bool],
    partial: Sequence[Path],
    *,
    at_work: bool,
    as_json: bool,
) -> None:
    usable = [info for info in found.whole if info.number not in found.barred] or found.whole
    marked = next((info.number for info in usable if info.verified), None)
    assumed = marked if marked is not None else next((info.number for info in usable), None)
    choice = choose(found.whole, retention, pins=(), newest_verified=assumed, barred=found.barred)
    newest = _newest_fencing_token(found)
    unfinished = [
        left.path.name
        for left in found.leftovers
        if left.kind == "unfinished"
        and (over(left.fencing_token) or (left.fencing_token < newest and left.touched_s < before_s))
    ]
    waste = sum(left.kind == "trash" or (left.kind == "replaced" and not at_work) for left in found.leftovers)
    nameless = [left.number for left in found.leftovers if left.kind == "unnamed" and not at_work]
    put_back = list(dict.fromkeys(nameless))
    if as_json:
        print_json(
            {
                "job": found.job,
                "dry_run": True,
                "kept": {str(number): why for number, why in choice.keep.items()},
                "dropped": choice.drop,
                "unfinished": unfinished,
                "trash": len(choice.drop) + len(unfinished) + waste,
                "partial": [path.name for path in partial],
                "put_back": put_back,
                "assumed_verified": assumed if marked is None else None,
            }
        )
        return
    for number in put_back:
        print(f"would have its name again, and then count with the others: {number}")
    _tell_kept(choice.keep)
    print(f"would be deleted: {_listed(choice.drop)}; {len(unfinished)} unfinished, {waste + len(partial)} of waste")
    if marked is None and assumed is not None:
        print(f"none is marked as verified: checkpoint {assumed} would be read first, and is taken for right here")


def _tell_kept(kept: Mapping[int, str]) -> None:
    for number in sorted(kept, reverse=True):
        print(f"stays: {number}, {kept[number]}")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "nothing"
