"""Which durable generations stay, and how the others go.

`choose` decides, a pure function: the newest ``keep_last``, the first of each span of ``keep_every`` steps, the pinned ones,
and always the newest verified one. When none is verified, nothing goes. What no restore takes (quarantined, or passed over:
`rackrun.checkpoint.durable.probation`) does not count among the newest: it stays beside them until the oldest of them is newer.

`collect` does it: the decision is written down (``RETENTION.json``), each directory is renamed to ``.trash-...``, the
renaming is synced, and only then are files deleted, the manifest first. It may be stopped anywhere and run again, by
anyone, also while another one runs; what cannot be done is reported and tried again next time.

Traps. Nothing is deleted on the strength of a name that is not on disk, so the job's directory is synced first, and again
between renaming and deleting: else a power loss could bring back the name of a half-deleted generation, or take away the
one that the others were deleted for. A full disk is what this is for: writing down the decision may fail. Temporary
directories belong to somebody as long as their epoch lasts, and clocks of hosts differ: they go only when their epoch is
over and they are older than a limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.durable.durable_manifest import MANIFEST
from rackrun.checkpoint.durable.durable_store import DurableStore, GenerationInfo, Part
from rackrun.checkpoint.durable.files import Failure, delete_tree, failure_of, set_aside
from rackrun.checkpoint.durable.probation import Probation
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["Choice", "Collected", "Retention", "choose", "collect", "sweep"]

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
    """``keep_every`` is in steps; 0 keeps none for that reason. Raises ValueError for what makes no sense."""

    keep_last: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(f"keep_last {self.keep_last} must be at least 1, keep_every {self.keep_every} at least 0")


@dataclass(frozen=True)
class Choice:
    """``keep``: generation -> why. ``drop``: oldest first."""

    keep: Mapping[int, str]
    drop: tuple[int, ...]


@dataclass
class Collected:
    """What `collect` did. ``failures``: what it could not do; the next one tries again."""

    kept: Mapping[int, str] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    trash: int = 0
    """Directories of waste that were deleted."""
    failures: list[Failure] = field(default_factory=list)


def choose(
    generations: Sequence[GenerationInfo],
    retention: Retention,
    *,
    pins: Collection[int],
    newest_verified: int | None,
    barred: Collection[int] = (),
    superseded: int | None = None,
) -> Choice:
    """Doing what it says and asking again drops nothing more. ``barred``: those that no restore takes, or that may not be on disk.
    ``superseded``: the newest step that is verified in this run; what is of later steps stays. None: of any."""
    keep: dict[int, str] = {}
    spans: set[int] = set()
    for info in sorted(generations, key=lambda info: info.generation):
        span = info.step // retention.keep_every if retention.keep_every else None
        if span is not None and span not in spans:
            spans.add(span)
            keep[info.generation] = f"the first from step {span * retention.keep_every} on"
    newest = sorted((info.generation for info in generations), reverse=True)
    usable = [generation for generation in newest if generation not in barred][: retention.keep_last]
    keep |= dict.fromkeys(usable, f"one of the newest {retention.keep_last}")
    oldest = min(usable, default=-1)
    keep |= {g: "not to be relied on, but newer than others that stay" for g in newest if g in barred and g > oldest}
    keep |= {generation: "pinned" for generation in newest if generation in pins}
    if newest_verified is None:
        keep |= {generation: "none is verified" for generation in newest if generation not in keep}
    else:
        keep[newest_verified] = "the newest verified"
    if superseded is not None:
        later = [info.generation for info in generations if info.step > superseded and info.generation not in keep]
        keep |= dict.fromkeys(later, f"this run has nothing verified of a step after {superseded}")
    return Choice(keep, tuple(generation for generation in reversed(newest) if generation not in keep))


def collect(  # noqa: PLR0913 - what a caller knows of the job that it is of
    store: DurableStore,
    retention: Retention,
    *,
    epoch: int,
    now: Callable[[], float],
    orphan_ttl_s: float,
    pins: Collection[int] = (),
    finished: int = -1,
    began: int | None = None,
    over: Callable[[int], bool] = lambda _: False,
) -> Collected:
    """Delete what `choose` drops, temporary directories of epochs before ``epoch`` older than ``orphan_ttl_s``, those of
    ``epoch`` for generations before ``finished`` (which nobody writes any more: the caller knows), and waste. ``began``: the generation
    that the run of ``epoch`` has restored, -1 when there was none; what is not superseded by a verified one of its own, or of those it
    began from, stays (the run's own were read back when they were written). None: no run asks, and any verified one will do. ``over``:
    whether the job of an epoch is known to be over, so that what it left goes at once. ``now`` is in seconds since the epoch of Unix, as file times are. Never raises for what storage does.

    Reads all bytes of the newest generation when none is marked as verified yet.
    """
    done = Collected()
    try:
        generations = store.generations()
        if not generations and not _exists(store):
            return done
        store.sync()
        crash_point("retention.synced")
        probation = Probation(store.directory, store.files)
        barred = {*probation.barred(), *(info.generation for info in generations if info.path in store.doubtful)}
        newest_verified = _newest_verified(store, sorted(generations, key=lambda info: info.generation in barred))
        choice = choose(
            generations,
            retention,
            pins=pins,
            newest_verified=newest_verified,
            barred=barred,
            superseded=None if began is None else _superseded(generations, epoch, began, newest_verified),
        )
        done.kept = choice.keep
        if choice.drop:
            crash_point("retention.marking")
            _write_down(store, choice, epoch, done)
            crash_point("retention.marked")
        for generation in choice.drop:
            if _take_away(store, generation, done):
                done.dropped.append(generation)
                probation.forget(generation)
        before = now() - orphan_ttl_s
        _sweep(store, before)
        for part in store.parts():
            gone = over(part.epoch) or _is_orphan(store, part, epoch, before, finished)
            if gone and _discard(store, part.path, done):
                done.orphans.append(part.path.name)
        _delete_trash(store, done)
    except (OSError, CheckpointError) as error:
        done.failures.append(failure_of(error))
    return done


def _superseded(generations: Sequence[GenerationInfo], epoch: int, began: int, newest_verified: int | None) -> int:
    """The newest step that is verified in the run of ``epoch``, which has begun from ``began``."""
    own = [
        info.step
        for info in generations
        if info.epoch == epoch
        or info.generation == began
        or (info.generation < began and (info.verified or info.generation == newest_verified))
    ]
    return max(own, default=-1)


def sweep(store: DurableStore, *, epoch: int) -> Collected:
    """Only what is unfinished of jobs that are over, and waste: the job of ``epoch`` owns the directory, and begins."""
    done = Collected()
    with contextlib.suppress(FileNotFoundError):
        try:
            for part in store.parts():
                if part.epoch != epoch and _discard(store, part.path, done):
                    done.orphans.append(part.path.name)
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


def _newest_verified(store: DurableStore, generations: Sequence[GenerationInfo]) -> int | None:
    """By its mark; when none has one, the newest of which all bytes are right now."""
    for info in generations:
        if info.verified:
            return info.generation
    for info in generations:
        with contextlib.suppress(CheckpointError):
            if store.verify(info.generation).ok:
                return info.generation
    return None


def _write_down(store: DurableStore, choice: Choice, epoch: int, done: Collected) -> None:
    decision = {"epoch": epoch, "keep": {str(key): why for key, why in choice.keep.items()}, "drop": choice.drop}
    try:
        store.files.replace(store.directory / LOG, msgspec.json.encode(decision))
    except OSError as error:
        done.failures.append(failure_of(error))


def _sweep(store: DurableStore, before: float) -> None:
    """What died before `_write_down` gave it its name."""
    for name in store.files.listdir(store.directory):
        if name.startswith(f".{LOG}-"):
            with contextlib.suppress(FileNotFoundError):
                if store.files.stat(store.directory / name).st_mtime < before:
                    store.files.unlink(store.directory / name)


def _take_away(store: DurableStore, generation: int, done: Collected) -> bool:
    """Nobody reads it from here on."""
    if not store.files.objects:
        return _set_aside(store, store.path(generation), done)
    try:
        store.files.unlink(store.path(generation) / MANIFEST)
    except OSError as error:
        done.failures.append(failure_of(error))
        return False
    crash_point("retention.trashed")
    return _discard(store, store.path(generation), done)


def _discard(store: DurableStore, path: Path, done: Collected) -> bool:
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


def _is_orphan(store: DurableStore, part: Part, epoch: int, before: float, finished: int) -> bool:
    """Nobody will finish it."""
    if part.epoch == epoch:
        return part.generation < finished
    if part.epoch > epoch:
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
