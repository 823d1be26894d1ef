"""Destinations of workers' output, by torchrun's rules (``--log-dir --redirects --tee --local-ranks-filter``).

Workers write to the agent's own streams or directly to files. So nothing passes through the agent's memory, and a slow
terminal delays only the process that prints to it. Tee is implemented as in torchrun: a file, and a reader that follows
it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from string import Template

from torch.distributed.elastic.multiprocessing.api import Std, to_map

from rackrun.protocol.agent_config import LogConfig
from rackrun.protocol.ids import Rank

__all__ = ["WorkerLogs", "WorkerStreams"]

_CHUNK_BYTES = 1 << 20
_FOLLOW_S = 0.1
_LINE_BYTES_MAX = 1 << 20


class WorkerStreams:
    """One worker's open streams. Close it when the worker has them."""

    def __init__(self, stdout: int, stderr: int, error_file: str) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.error_file = error_file

    def close(self) -> None:
        """Close both streams, unless they are those of this process."""
        for fd in (self.stdout, self.stderr):
            if fd > 2:
                os.close(fd)


class WorkerLogs:
    """Opens the output streams of a tray's workers."""

    def __init__(self, config: LogConfig, run_id: str, slots: int, role: str = "default") -> None:
        redirects = to_map(Std.from_str(config.redirects), slots)
        self._tee = to_map(Std.from_str(config.tee), slots)
        self._redirects = {index: redirects[index] | self._tee[index] for index in range(slots)}
        self._shown = {int(index) for index in config.local_ranks_filter.split(",") if index} or set(range(slots))
        self._role, self._template = role, config.prefix
        self._directory = "" if config.directory == os.devnull else _run_directory(config.directory, run_id)
        self._follower: _Follower | None = None

    def open(self, index: int, rank: Rank, attempt: int) -> WorkerStreams:
        """Open the streams of a new worker in slot ``index``. A later worker of the same slot and attempt appends."""
        directory = ""
        if self._directory:
            directory = os.path.join(self._directory, f"attempt_{attempt}", str(index))
            os.makedirs(directory, exist_ok=True)
        error_file = os.path.join(directory, "error.json") if directory else ""
        if error_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(error_file)
        stdout = self._stream(index, rank, Std.OUT, directory, "stdout.log", 1)
        stderr = self._stream(index, rank, Std.ERR, directory, "stderr.log", 2)
        return WorkerStreams(stdout, stderr, error_file)

    def open_filler(self, index: int) -> int:
        """Return one descriptor for both streams of the filler beside slot ``index``. A later filler appends."""
        path = self.filler_path(index)
        if not path:
            return os.open(os.devnull, os.O_WRONLY)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def filler_path(self, index: int) -> str:
        """Return the path of the filler's log; "": none is kept."""
        return os.path.join(self._directory, "filler", f"{index}.log") if self._directory else ""

    def close(self) -> None:
        """Print what is left of teed files."""
        if self._follower is not None:
            self._follower.stop()

    def _stream(self, index: int, rank: Rank, which: Std, directory: str, name: str, ours: int) -> int:
        shown = index in self._shown
        if which not in self._redirects[index]:
            return ours if shown else os.open(os.devnull, os.O_WRONLY)
        if not directory:
            return os.open(os.devnull, os.O_WRONLY)
        path = os.path.join(directory, name)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if which in self._tee[index] and shown:
            if self._follower is None:
                self._follower = _Follower()
            self._follower.follow(path, self._prefix(index, rank), ours)
        return fd

    def _prefix(self, index: int, rank: Rank) -> bytes:
        template = self._template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        if template is None:
            return f"[{self._role}{index}]:".encode()
        known = {"role_name": self._role, "rank": rank, "local_rank": index, "hostname": socket.gethostname()}
        return Template(template).safe_substitute(known).encode()


def _run_directory(directory: str, run_id: str) -> str:
    base = directory or tempfile.mkdtemp(prefix="torchelastic_")
    os.makedirs(base, exist_ok=True)
    return tempfile.mkdtemp(prefix=f"{run_id}_", dir=base)


class _Followed:
    def __init__(self, path: str, prefix: bytes, to: int) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.prefix = prefix
        self.to = to
        self.rest = b""
        """The beginning of a line that has not ended yet."""


class _Follower:
    """A thread that prints the lines of growing files, each with its prefix."""

    def __init__(self) -> None:
        self._files: dict[str, _Followed] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rackrun-tee", daemon=True)
        self._thread.start()

    def follow(self, path: str, prefix: bytes, to: int) -> None:
        """Print what is appended to the file ``path``, each line after ``prefix``, to the descriptor ``to``."""
        with self._lock:
            if path in self._files:
                self._files[path].prefix = prefix
            else:
                self._files[path] = _Followed(path, prefix, to)

    def stop(self) -> None:
        """Print what is left and end the thread; waits at most 10 s."""
        self._stopping.set()
        self._thread.join(timeout=10.0)  # the reader of the output may have stopped reading

    def _run(self) -> None:
        while True:
            stopping = self._stopping.is_set()
            with self._lock:
                files = list(self._files.values())
            try:
                moved = [self._print_some(file, last=stopping) for file in files]
            except OSError:
                return  # the output has no reader any more; the files are complete
            if any(moved):
                continue
            if stopping:
                return
            self._stopping.wait(_FOLLOW_S)

    def _print_some(self, file: _Followed, *, last: bool) -> bool:
        data = os.read(file.fd, _CHUNK_BYTES)
        lines = (file.rest + data).split(b"\n")
        file.rest = lines.pop()
        if file.rest and ((last and not data) or len(file.rest) > _LINE_BYTES_MAX):
            lines.append(file.rest)
            file.rest = b""
        if lines:
            _write_all(file.to, b"".join(file.prefix + line + b"\n" for line in lines))
        return bool(data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
