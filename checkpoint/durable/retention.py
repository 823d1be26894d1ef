"""Choose which durable checkpoints stay, and delete the others.

`choose` decides, as a pure function. It keeps the newest ``keep_last``, the first of each span of ``keep_every`` steps,
the pinned ones, and always the newest verified one. When none is verified, nothing is deleted. A checkpoint that no
restore takes (quarantined or passed over: `rackrun.checkpoint.durable.probation`), or that was found damaged just now,
counts for none of these; it stays until the oldest of the newest is newer than it.

`collect` carries the decision out: it writes it down (``RETENTION.json``), renames each directory to ``.trash-...``,
syncs the renaming, and only then deletes files, the manifest first. It may be stopped anywhere and run again, by any
process, also while another one runs. What cannot be done is reported, and tried again next time.

Nothing is deleted on account of a name that is not on disk. So the job's directory is synced first, and again between
renaming and deleting; otherwise a power loss could bring back the name of a half-deleted checkpoint, or lose the one
that replaced the others. Retention must work on a full disk, so writing down the decision may fail. Temporary
directories belong to a living job as long as its run lasts, and clocks of hosts differ: they are deleted only when that
run is over (a newer fencing token is in use) and they are older than a limit. A partial file is deleted once its writer
is dead (`rackrun.checkpoint.durable.storage.partial_files`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.durable.durable_manifest import MANIFEST, checkpoint_number
from rackrun.checkpoint.durable.durable_store import CheckpointInfo, DurableStore, UnpublishedCheckpoint
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import FileFailure, delete_tree, failure_of, set_aside
from rackrun.checkpoint.durable.storage.partial_files import left_files
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["RetentionChoice", "Collected", "Retention", "all_left_files", "choose", "collect", "sweep"]

register(
    "retention.synced",
    "retention.marking",
    "retention.marked",
    "retention.trashed",
    "retention.trash_synced",
    "retention.deleting",
    "retention.deleted",
)

LOG = "RETENTION.json"


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay. ``keep_every`` is in steps; 0 keeps none for that reason.

    Raises ValueError when ``keep_last`` is below 1 or ``keep_every`` below 0.
    """

    keep_last: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(f"keep_last {self.keep_last} must be at least 1, keep_every {self.keep_every} at least 0")


@dataclass(frozen=True)
class RetentionChoice:
    """The checkpoints to keep and to drop. ``keep``: checkpoint number -> why. ``drop``: oldest first."""

    keep: Mapping[int, str]
    drop: tuple[int, ...]


@dataclass
class Collected:
    """What `collect` has done. ``failures``: what it could not do; the next call tries again."""

    kept: Mapping[int, str] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    trash: int = 0
    """How many trash directories were deleted."""
    partial: list[str] = field(default_factory=list)
    """Names of deleted files that a writer had left unfinished."""
    failures: list[FileFailure] = field(default_factory=list)


def choose(
    checkpoints: Sequence[CheckpointInfo],
    retention: Retention,
    *,
    pins: Collection[int],
    newest_verified: int | None,
    barred: Collection[int] = (),
    superseded: int | None = None,
) -> RetentionChoice:
    """Choose which checkpoints stay. Choosing again after dropping the others drops nothing more.

    ``barred``: checkpoints that no restore takes, or that may not be on disk. ``superseded``: the newest step that is
    verified in this run; checkpoints of later steps stay. None: no such limit.
    """
    keep: dict[int, str] = {}
    spans: set[int] = set()
    for info in sorted(checkpoints, key=lambda info: info.number):
        span = info.step // retention.keep_every if retention.keep_every else None
        if span is not None and info.number not in barred and span not in spans:
            spans.add(span)
            keep[info.number] = f"the first from step {span * retention.keep_every} on"
    newest = sorted((info.number for info in checkpoints), reverse=True)
    usable = [number for number in newest if number not in barred][: retention.keep_last]
    keep |= dict.fromkeys(usable, f"one of the newest {retention.keep_last}")
    oldest = min(usable, default=-1)
    keep |= {n: "not to be relied on, but newer than others that stay" for n in newest if n in barred and n > oldest}
    keep |= {number: "pinned" for number in newest if number in pins}
    if newest_verified is None:
        keep |= {number: "none is verified" for number in newest if number not in keep}
    else:
        keep[newest_verified] = "the newest verified"
    if superseded is not None:
        later = [info.number for info in checkpoints if info.step > superseded and info.number not in keep]
        keep |= dict.fromkeys(later, f"this run has nothing verified of a step after {superseded}")
    return RetentionChoice(keep, tuple(number for number in reversed(newest) if number not in keep))


def collect(  # noqa: PLR0913 - all that a caller knows about its job
    store: DurableStore,
    retention: Retention,
    *,
    fencing_token: int,
    now: Callable[[], float],
    orphan_ttl_s: float,
    pins: Collection[int] = (),
    finished: int = -1,
    began: int | None = None,
    over: Callable[[int], bool] = lambda _: False,
) -> Collected:
    """Delete what `choose` drops, unfinished data that no writer will finish, and trash. Return what was done.

    Unfinished data with a token before ``fencing_token`` goes when it is older than ``orphan_ttl_s``, or at once where
    ``over`` says that the token's job has ended. That of ``fencing_token`` goes for checkpoints before ``finished``,
    which the caller knows that no process writes any more.

    ``began``: the checkpoint that the run of ``fencing_token`` has restored; -1 when it restored none. A checkpoint
    stays unless a verified one of this run, or of those it began from, supersedes it; the run's own were read back
    when they were written, and count as verified. None: no run asks, and any verified checkpoint counts. ``now``: Unix
    time in seconds, like file times.

    Errors of storage are recorded, not raised. Reads all bytes of the newest checkpoint when none counts as verified.
    """
    done = Collected()
    try:
        checkpoints = store.checkpoints()
        if not checkpoints and not _exists(store):
            return done
        store.sync()
        crash_point("retention.synced")
        probation = Probation(store.directory, store.files)
        barred = {*probation.barred(), *(info.number for info in checkpoints if info.path in store.doubtful)}
        newest_verified = _newest_own(checkpoints, fencing_token, barred) if began is not None else None
        if newest_verified is None:
            newest_verified, damaged = _newest_verified(store, checkpoints, barred)
            barred |= damaged
        choice = choose(
            checkpoints,
            retention,
            pins=pins,
            newest_verified=newest_verified,
            barred=barred,
            superseded=None if began is None else _superseded(checkpoints, fencing_token, began, newest_verified),
        )
        done.kept = choice.keep
        if choice.drop:
            crash_point("retention.marking")
            _write_down(store, choice, fencing_token, done)
            crash_point("retention.marked")
        for number in choice.drop:
            if _take_away(store, number, done):
                done.dropped.append(number)
                probation.forget(number)
        before = now() - orphan_ttl_s
        _delete_left(store, before, done)
        for part in store.parts():
            gone = over(part.fencing_token) or _is_orphan(store, part, fencing_token, before, finished)
            if gone and _discard(store, part.path, done):
                done.orphans.append(part.path.name)
        _delete_trash(store, done)
    except (OSError, CheckpointError) as error:
        done.failures.append(failure_of(error))
    return done


def _superseded(
    checkpoints: Sequence[CheckpointInfo], fencing_token: int, began: int, newest_verified: int | None
) -> int:
    """Return the newest step that is verified in the run of ``fencing_token``; -1 for none.

    ``began``: the checkpoint that the run has restored. It and verified checkpoints before it count as the run's.
    """
    own = [
        info.step
        for info in checkpoints
        if info.fencing_token == fencing_token
        or info.number == began
        or (info.number < began and (info.verified or info.number == newest_verified))
    ]
    return max(own, default=-1)


def sweep(store: DurableStore, *, fencing_token: int) -> Collected:
    """Delete trash, partial files of dead writers, and unfinished data of all but ``fencing_token``, whose job owns the
    directory and begins."""
    done = Collected()
    with contextlib.suppress(FileNotFoundError):
        try:
            for part in store.parts():
                if part.fencing_token != fencing_token and _discard(store, part.path, done):
                    done.orphans.append(part.path.name)
            _delete_left(store, None, done)
            _delete_trash(store, done)
        except FileNotFoundError:
            raise
        except (OSError, CheckpointError) as error:
            done.failures.append(failure_of(error))
    return done


def _exists(store: DurableStore) -> bool:
    try:
        store.files.stat(store.directory)
    except FileNotFoundError:
        return False
    return True


def _newest_own(checkpoints: Sequence[CheckpointInfo], fencing_token: int, barred: Collection[int]) -> int | None:
    """Return the newest checkpoint of the run of ``fencing_token``, which has read all its bytes back; None for none."""
    own = (info.number for info in checkpoints if info.fencing_token == fencing_token and info.number not in barred)
    return max(own, default=None)


def _newest_verified(
    store: DurableStore, checkpoints: Sequence[CheckpointInfo], barred: Collection[int]
) -> tuple[int | None, set[int]]:
    """Return the newest checkpoint marked as verified; if none is marked, the newest whose bytes are all right now.
    Also return those that were found damaged.

    One that is barred is returned only if no other is right.
    """
    damaged = set[int]()
    usable = [info for info in checkpoints if info.number not in barred]
    for infos in (usable, [info for info in checkpoints if info.number in barred]):
        for info in infos:
            if info.verified:
                return info.number, damaged
        for info in infos:
            with contextlib.suppress(CheckpointError):
                if store.verify(info.number).ok:
                    return info.number, damaged
                damaged.add(info.number)
    return None, damaged


def _write_down(store: DurableStore, choice: RetentionChoice, fencing_token: int, done: Collected) -> None:
    """Write the decision to ``RETENTION.json``. A failure is recorded, not raised."""
    decision = {
        "epoch": fencing_token,
        "keep": {str(key): why for key, why in choice.keep.items()},
        "drop": choice.drop,
    }
    try:
        store.files.replace(store.directory / LOG, msgspec.json.encode(decision))
    except OSError as error:
        done.failures.append(failure_of(error))


def all_left_files(store: DurableStore, before: float | None) -> list[Path]:
    """Return the files that writers have left unfinished in the job's directory and in its checkpoints.

    ``before``: as for `left_files`. A checkpoint that cannot be listed is left out. Raises OSError for the job's own.
    """
    found = list(left_files(store.files, store.directory, before))
    if not store.files.objects:
        for name in store.files.listdir(store.directory):
            if checkpoint_number(name) is not None:
                with contextlib.suppress(OSError):
                    found += left_files(store.files, store.directory / name, before)
    return found


def _delete_left(store: DurableStore, before: float | None, done: Collected) -> None:
    for path in all_left_files(store, before):
        try:
            store.files.unlink(path)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            done.failures.append(failure_of(error))
            continue
        done.partial.append(path.name)


def _take_away(store: DurableStore, number: int, done: Collected) -> bool:
    """Make a checkpoint unreadable from here on: rename it, or delete its manifest in an object store."""
    if not store.files.objects:
        return _set_aside(store, store.path(number), done)
    try:
        store.files.unlink(store.path(number) / MANIFEST)
    except OSError as error:
        done.failures.append(failure_of(error))
        return False
    crash_point("retention.trashed")
    return _discard(store, store.path(number), done)


def _discard(store: DurableStore, path: Path, done: Collected) -> bool:
    """Set a directory aside, or delete it in an object store. Return whether that was done."""
    if not store.files.objects:
        return _set_aside(store, path, done)
    try:
        for _ in delete_tree(store.files, path, first=MANIFEST):
            crash_point("retention.deleting")
    except OSError as error:
        done.failures.append(failure_of(error))
        return False
    crash_point("retention.deleted")
    return True


def _set_aside(store: DurableStore, path: Path, done: Collected) -> bool:
    try:
        gone = set_aside(store.files, path) is not None
    except OSError as error:
        done.failures.append(failure_of(error))
        return False
    crash_point("retention.trashed")
    return gone


def _is_orphan(
    store: DurableStore, part: UnpublishedCheckpoint, fencing_token: int, before: float, finished: int
) -> bool:
    """Whether no process will finish this unfinished data."""
    if part.fencing_token == fencing_token:
        return part.number < finished
    if part.fencing_token > fencing_token:
        return False
    with contextlib.suppress(FileNotFoundError):
        return _last_touched(store, part.path) < before
    return False


def _last_touched(store: DurableStore, path: Path) -> float:
    times = [store.files.stat(path).st_mtime]
    times += [store.files.stat(path / name).st_mtime for name in store.files.listdir(path)]
    return max(times)


def _delete_trash(store: DurableStore, done: Collected) -> None:
    trash = [name for name in store.files.listdir(store.directory) if name.startswith(".trash-")]
    if not trash:
        return
    store.sync()
    crash_point("retention.trash_synced")
    for name in trash:
        try:
            for _ in delete_tree(store.files, store.directory / name, first=MANIFEST):
                crash_point("retention.deleting")
            done.trash += 1
            crash_point("retention.deleted")
        except OSError as error:
            done.failures.append(failure_of(error))
