"""Directory of a run: its files, and how `rackctl` finds it.

::

    RUN/ (0700)   journal.sqlite   while and after    everything that happened
                  token (0600)     while it runs      the job's secret
                  endpoint.json    while it runs      url, run_id, protocol, pid (0600)
                  result.json      after              how it ended
                  logs/                               workers' output, when it is redirected
                  earlier/1, 2, ...                   what runs before it have left here: each its journal and its result
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from rackrun.errors import UsageError
from rackrun.protocol.wire import PROTOCOL

__all__ = [
    "Endpoint",
    "Result",
    "RunDirectory",
    "find_run",
    "new_run_id",
    "read_json",
    "read_own",
    "read_token",
    "runs_root",
]

_TOKEN_CHARS_MIN = 16
_FILE_BYTES_MAX = 1 << 20
_NOT_OURS = "look who has put it there; the run's own is made by its launcher, for its user alone."
_OF_A_RUN = ("journal.sqlite*", "result.json")
_T = TypeVar("_T", bound=msgspec.Struct)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``endpoint.json``: where the run's coordinator is."""

    url: str
    run_id: str
    pid: int
    protocol: int = PROTOCOL


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``result.json``: how the run ended."""

    run_id: str
    exit_code: int
    because: str
    remedy: str
    steps: int
    """Number of committed steps."""
    recoveries: tuple[str, ...]
    seconds: float
    recoveries_ended: int = 0
    """How many of the recoveries were not completed when the job ended."""


class RunDirectory:
    """The directory of one run, from the start to the end of its launcher."""

    def __init__(self, directory: Path, made: tuple[Path, ...], lock: int) -> None:
        self.directory, self._lock = directory, lock
        self.journal = directory / "journal.sqlite"
        self._made = made
        self._started = False
        self._aside: Path | None = None
        """Directory with the files of the previous run."""

    @classmethod
    def make(cls, run_id: str, wanted: Path | None) -> RunDirectory:
        """Create or reuse a run's directory. Raises UsageError if it cannot be used."""
        directory = wanted or _free_name(runs_root() / run_id)
        _refuse_what_is_others(directory)
        made = tuple(path for path in (directory, *directory.parents) if not path.exists())
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_what_is_others(directory)  # somebody may have been faster
            probe = directory / f".probe-{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            _remove(made)
            raise UsageError(
                f"the output directory {directory} cannot be written: {error.strerror}.",
                remedy="choose another --out-dir.",
            ) from error
        place = cls(directory, made, _lock(directory))
        try:
            place._put_aside()
        except OSError as error:
            place.close()
            raise UsageError(
                f"the files of the run before, in {directory}, cannot be put aside: {error.strerror}.",
                remedy="make room there, or choose another --out-dir.",
            ) from error
        return place

    def _put_aside(self) -> None:
        """Move the files of an earlier run away, if there are any. No run is under way, because its lock would be
        held."""
        found = [path for name in _OF_A_RUN for path in self.directory.glob(name)]
        if not any(path.name == "journal.sqlite" for path in found):
            return
        earlier = self.directory / "earlier"
        earlier.mkdir(mode=0o700, exist_ok=True)
        number = 1 + max((int(path.name) for path in earlier.iterdir() if path.name.isdigit()), default=0)
        self._aside = earlier / str(number)
        self._aside.mkdir(mode=0o700)
        for path in found:
            path.rename(self._aside / path.name)

    def _put_back(self) -> None:
        if self._aside is None:
            return
        for path in list(self._aside.iterdir()):
            path.rename(self.directory / path.name)
        _remove((self._aside, self._aside.parent))

    def write_token(self, token: str) -> None:
        """Write the job's secret. Raises UsageError, as when the disk is full."""
        _write_first(self.directory / "token", token.encode())

    def announce(self, endpoint: Endpoint) -> None:
        """Write the endpoint, so that `rackctl` can talk to the run. Raises UsageError, as when the disk is full."""
        _write_first(self.directory / "endpoint.json", msgspec.json.encode(endpoint) + b"\n")
        self._started = True

    def finish(self, result: Result) -> None:
        data = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
        with contextlib.suppress(OSError):  # a full disk must not change how the job ended
            _write(self.directory / "result.json", data)

    def close(self) -> None:
        """Remove the token and the endpoint; and everything, if the run never began."""
        for name in ("token", "endpoint.json"):
            (self.directory / name).unlink(missing_ok=True)
        if not self._started:
            for path in self.directory.glob("journal.sqlite*"):
                path.unlink()
            self._put_back()
            _remove(self._made)
        os.close(self._lock)


def runs_root() -> Path:
    """Return the directory in which runs are kept by default."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rackrun" / "runs"


def new_run_id() -> str:
    """Return a readable, unique run id."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def read_token(path: Path) -> str:
    """Return the token in a file. Raises UsageError if there is none."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise UsageError(f"the token file {path} cannot be read: {why}.", remedy="check --token-file.") from error
    if len(token) < _TOKEN_CHARS_MIN or len(token.split()) != 1:
        raise UsageError(
            f"the token in {path} is not one word of {_TOKEN_CHARS_MIN} characters or more.",
            remedy=f"make one: head -c 32 /dev/urandom | base64 > {path}; chmod 600 {path}",
        )
    if path.stat().st_mode & 0o077:
        raise UsageError(f"the token file {path} can be read by others.", remedy=f"chmod 600 {path}")
    return token


def find_run(name: str | None) -> Path:
    """Return the directory of a run, given by path or run id; None: the newest run. Raises UsageError."""
    root = runs_root()
    if name is None:
        found = [path for path in root.iterdir() if (path / "journal.sqlite").is_file()] if root.is_dir() else []
        if not found:
            raise UsageError(f"there are no runs in {root}.", remedy="name the --out-dir of the run.")
        return max(found, key=lambda path: (path / "journal.sqlite").stat().st_ctime)
    for path in (Path(name).expanduser(), root / name):
        if (path / "journal.sqlite").is_file():
            return path
    raise UsageError(
        f"there is no run {name}: no journal in it, nor in {root}.", remedy="name its --out-dir or run id."
    )


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Decode a JSON file; None if it does not exist."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", remedy="is it a run of another version?") from error


def read_own(directory: Path, name: str, *, secret: bool = False) -> bytes | None:
    """Read a file of a run that only its owner can have written; None if it does not exist.

    ``secret``: no other user may be able to read it either. Raises UsageError.
    """
    path = directory / name
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            owner = os.fstat(place).st_uid
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"{path} cannot be read: {why}.", remedy="be the user who started the run.") from error
    with os.fdopen(fd, "rb") as file:
        known = os.fstat(fd)
        trusted = {os.geteuid()} if os.geteuid() else {0, owner}
        if not stat.S_ISREG(known.st_mode):
            raise UsageError(f"{path} is no ordinary file: it is not used.", remedy=_NOT_OURS)
        if known.st_uid not in trusted:
            raise UsageError(f"{path} belongs to user {known.st_uid}, not to you: it is not used.", remedy=_NOT_OURS)
        if known.st_mode & (0o077 if secret else 0o022):
            what = "can be read by others" if secret else "can be written by others"
            raise UsageError(f"{path} {what}: it is not used.", remedy=_NOT_OURS)
        return file.read(_FILE_BYTES_MAX)


def _refuse_what_is_others(directory: Path) -> None:
    """Refuse a directory of another user, who could replace the files in it."""
    try:
        known = os.lstat(directory)
    except OSError:
        return  # not there, or making it will say why not
    if stat.S_ISLNK(known.st_mode):
        raise UsageError(
            f"the output directory {directory} is a link, which may lead elsewhere tomorrow.",
            remedy="name the directory itself with --out-dir.",
        )
    if known.st_uid != os.geteuid():
        raise UsageError(
            f"the output directory {directory} belongs to user {known.st_uid}, not to you.",
            remedy="name a directory of your own, or a new one, with --out-dir.",
        )


def _lock(directory: Path) -> int:
    """Held for as long as the launcher lives: two that start at the same moment both find no journal."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(
            f"{directory} is that of another run, which is under way.",
            remedy="name another --out-dir, or wait until it has ended.",
        ) from None
    except OSError as error:  # a file system without locks
        if (directory / "endpoint.json").exists():
            os.close(fd)
            raise UsageError(
                f"{directory} is another run's, as far as can be told where files cannot be locked.",
                remedy=f"name another --out-dir; or, if nothing runs there any more, remove {directory / 'endpoint.json'}.",
            ) from error
    return fd


def _free_name(path: Path) -> Path:
    """A run id that the user gave may be used again."""
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate


def _remove(made: tuple[Path, ...]) -> None:
    for path in made:
        try:
            path.rmdir()
        except OSError:
            return  # somebody else uses it by now


def _write_first(path: Path, data: bytes) -> None:
    try:
        _write(path, data)
    except OSError as error:
        raise UsageError(
            f"the output directory {path.parent} cannot be written: {error.strerror}.",
            remedy="make room there, or choose another --out-dir.",
        ) from error


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, for the owner's eyes only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
