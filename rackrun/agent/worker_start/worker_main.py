"""The worker process between its fork and the user's script, and after the script.

A script sees what torchrun would give it: its own directory at ``sys.path[0]``, its arguments, a fresh ``__main__``,
default signal handlers, fresh random states, and line-buffered output. Its end is seen from outside, except for an
exception: its traceback is written to stderr and to torch's error file, and sent to the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import importlib
import importlib.machinery
import io
import os
import random
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import NoReturn

import msgspec

from rackrun.agent.host.numa_binding import bind
from rackrun.agent.worker_start.heap_thresholds import keep_freed_memory
from rackrun.agent.worker_start.job_signals import leave_to_agent
from rackrun.agent.worker_start.progress_bars import BarFilter, FilteredStream
from rackrun.agent.worker_start.torch_group_lifetime import keep_groups
from rackrun.link.channel import WorkerChannel
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
from rackrun.link.process.process_exit import code_of, end_process
from rackrun.link.process.script_end import script_ended
from rackrun.link.robust_mutex import hold
from rackrun.protocol.agent_config import ScriptConfig
from rackrun.protocol.boot import Boot, install
from rackrun.protocol.encodable import bounded
from rackrun.protocol.events import ScriptFailure, WorkerExited

__all__ = ["FRESH_BOOT", "exec_fresh", "open_standard_streams", "run_worker"]

FRESH_BOOT = "RACKRUN_BOOT_FD"
"""Environment variable of a worker in a new interpreter: the descriptor from which it reads its Boot and
ScriptConfig."""

_TORCH_SEED = 67280421310721
"""Initial seed of torch's generators (``c10::default_rng_seed_val``)."""

_TICK_S = 0.25
_NAME_CHARS_MAX = 2_000
_MESSAGE_CHARS_MAX = 16_000
_TRACEBACK_CHARS_MAX = 200_000

_page: HeartbeatPage | None = None


def run_worker(boot: Boot, script: ScriptConfig) -> NoReturn:
    """Run the script as process ``boot``, whose descriptors are open and belong to this process."""
    os.environ.update(boot.env)
    bind(boot.cpus, boot.numa)  # while there is one thread
    _default_signals()
    open_standard_streams()
    faulthandler.enable()  # prints where a signal such as SIGSEGV or SIGABRT came from
    report_fd = os.dup(boot.channel_fd)  # the script's side closes its own
    if script.no_python:
        _exec_program(boot, script)
    global _page  # noqa: PLW0603 - mapped for life
    _page = HeartbeatPage(boot.page_fd)
    leave_to_agent(_page)
    with contextlib.suppress(OSError):  # then the agent has to poll
        hold(_page)
    _fresh_state(boot)
    keep_freed_memory()
    _share_terminal(boot, _page)
    install(boot)
    threading.Thread(target=_tick, args=[_page], name="rackrun-tick", daemon=True).start()
    code = _run_script(boot, script, report_fd)
    end_process(code)


def _tick(page: HeartbeatPage) -> None:
    """Show that the interpreter runs. An elastic script later has a control thread for that."""
    while page.tick_plain():
        time.sleep(_TICK_S)


def exec_fresh(boot: Boot, script: ScriptConfig) -> NoReturn:
    """Run the worker in a new interpreter, because the fork server has threads and its children would be unsound."""
    boot_fd = os.memfd_create("rackrun-boot", 0)
    os.write(boot_fd, msgspec.msgpack.encode((boot, script)))
    os.lseek(boot_fd, 0, os.SEEK_SET)
    for fd in (boot.channel_fd, boot.page_fd, *boot.snapshot_fds):
        os.set_inheritable(fd, True)
    _default_signals()
    environment = {**os.environ, **boot.env, FRESH_BOOT: str(boot_fd)}
    os.execve(sys.executable, [sys.executable, "-m", "rackrun.agent.worker_start.worker_main"], environment)


def open_standard_streams() -> None:
    """Open new ``sys.stdin, stdout, stderr`` on descriptors 0, 1, 2, with line-buffered output, whatever they are
    connected to."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = FilteredStream(open(1, "wb", closefd=False), encoding="utf-8", errors="replace", line_buffering=True)  # noqa: SIM115
    sys.stderr = FilteredStream(
        open(2, "wb", buffering=0, closefd=False),  # noqa: SIM115
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _share_terminal(boot: Boot, page: HeartbeatPage) -> None:
    """Keep progress bars of other ranks than 0 from streams that all workers share. Logs of one rank keep them."""

    def is_main() -> bool:
        waits = boot.spare and page.activity in (Activity.SETUP, Activity.WAITING)
        return os.environ.get("RANK") == "0" and not waits

    logs = Path(boot.env.get("TORCHELASTIC_ERROR_FILE") or os.devnull).parent
    for stream, name in ((sys.stdout, "stdout.log"), (sys.stderr, "stderr.log")):
        with contextlib.suppress(OSError):  # there is no such log: the stream is shared
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(logs / name)):
                continue
        assert isinstance(stream, FilteredStream)
        stream.bars = BarFilter(is_main)
        atexit.register(stream.finish)


def _default_signals() -> None:
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as every Python process does: BrokenPipeError instead
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _fresh_state(boot: Boot) -> None:
    """Reset state that a fork shares with its parent: random generators, and torch's thread count, which it read from
    OMP_NUM_THREADS long ago."""
    random.seed()
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()  # noqa: NPY002 - the global state is what scripts use
    if "torch" in sys.modules:
        import torch

        keep_groups()
        torch.manual_seed(_TORCH_SEED)
        with contextlib.suppress(ValueError):
            torch.set_num_threads(int(boot.env.get("OMP_NUM_THREADS", "1")))


def _exec_program(boot: Boot, script: ScriptConfig) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(script.path, [script.path, *_arguments(boot, script)])
    except OSError as error:
        sys.stderr.write(f"rackrun: cannot run {script.path}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _run_script(boot: Boot, script: ScriptConfig, report_fd: int) -> int:
    """Run the script and return its exit code, as ``python script`` would."""
    try:
        try:
            _run_python(boot, script)
        except SystemExit as stop:
            if code_of(stop):
                raise
        script_ended()
        return 0
    except SystemExit as stop:
        code = code_of(stop)
        if code and _has_met_nobody() and _page is not None:
            _page.failed_early()
        return code
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the worker, and is told
        early = _has_met_nobody()
        if early and _page is not None:
            _page.failed_early()
        failure = _report(error, early=early)
        with contextlib.suppress(OSError):  # the agent is gone, and this process ends with it
            WorkerChannel(report_fd).send(
                WorkerExited(slot=boot.slot, incarnation=boot.incarnation, exit_code=1, failure=failure)
            )
        return 1


def _run_python(boot: Boot, script: ScriptConfig) -> None:
    sys.argv = [script.path, *_arguments(boot, script)]
    sys.path_importer_cache.clear()
    if script.framework:
        importlib.import_module(f"rackrun.frameworks.{script.framework}.script_unchanged").install()
    if script.module:
        _set_first_path(os.getcwd())
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
    elif os.path.isdir(script.path) or script.path.endswith((".zip", ".pyz")):
        _set_first_path(None)
        runpy.run_path(script.path, run_name="__main__")
    else:
        path = os.path.abspath(script.path)
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        # Not runpy.run_path: it removes __main__ before exit handlers and late threads are done with it.
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=script.path,
            __builtins__=__builtins__,
            __cached__=None,
            __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        )
        sys.modules["__main__"] = main
        with io.open_code(path) as file:
            code = compile(file.read(), script.path, "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102 - it is what we are for


def _arguments(boot: Boot, script: ScriptConfig) -> list[str]:
    """Return the script's arguments with ``${local_rank}`` replaced, as torchrun does."""
    return [argument.replace("${local_rank}", str(boot.local_rank)) for argument in script.args]


_first_path = sys.path[0] if sys.path else None
_starts = {
    "",
    os.getcwd(),
    os.path.dirname(os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", "") or "x")),
}


def _set_first_path(directory: str | None) -> None:
    """Put the script's directory first in ``sys.path``, as Python does, in place of the launcher's."""
    if sys.path and sys.path[0] == _first_path and _first_path in _starts:
        del sys.path[0]
    if directory is not None and not sys.flags.safe_path:
        sys.path.insert(0, directory)


def _has_met_nobody() -> bool:
    """Return whether no process group was created or used, so that other ranks have no part in the failure."""
    if _page is not None and _page.tick_ns and _page.activity is Activity.SETUP and _page.collectives == (0, 0):
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is None or not (distributed.is_available() and distributed.is_initialized())


def _report(error: BaseException, *, early: bool = False) -> ScriptFailure:
    """Print the exception, write torch's error file, and return the failure for the agent. ``early``: a failure that
    all ranks of a tray share is shown once."""
    import traceback

    trace = error.__traceback__
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        frames = traceback.extract_tb(trace)
        where = _where(frames) or _where_of_syntax_error(error)
    except Exception as second:  # noqa: BLE001 - an exception's own methods may be what is wrong
        text, where = f"<it cannot be formatted: {type(second).__name__}>", ""
    if early and _is_told(f"{type(error).__qualname__} {where} {_text_of(error)}"):
        rank = os.environ.get("RANK", "?")
        with contextlib.suppress(Exception):  # nobody reads stderr any more
            sys.stderr.write(f"rackrun: rank {rank} failed alike: {type(error).__qualname__} at {where}\n")
    elif not _launcher_says(error):
        try:
            sys.excepthook(type(error), error, trace)
        except Exception:  # noqa: BLE001 - the script's own hook may be what is wrong
            with contextlib.suppress(Exception):  # or nobody reads stderr any more
                sys.__excepthook__(type(error), error, trace)
    _write_error_file(error)
    return ScriptFailure(
        type=bounded(f"{type(error).__module__}.{type(error).__qualname__}", _NAME_CHARS_MAX),
        message=bounded(_text_of(error), _MESSAGE_CHARS_MAX),
        traceback=bounded(text, _TRACEBACK_CHARS_MAX),
        where=bounded(where, _NAME_CHARS_MAX),
    )


def _launcher_says(error: BaseException) -> bool:
    """Return whether the launcher's last line says all that there is to say about ``error``."""
    errors = sys.modules.get("rackrun.errors")
    return errors is not None and isinstance(error, errors.DirectoryRefused)


def _is_told(what: str) -> bool:
    """Return whether another worker of this tray has shown the same failure in this attempt."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return False
    digest = hashlib.sha256(what.encode(errors="replace")).hexdigest()[:16]
    try:
        os.close(os.open(Path(error_file).parents[1] / f".told-{digest}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def _where(frames: Sequence[FrameSummary]) -> str:
    """Return the line of the user's code, not that of a library it called."""
    import site
    import sysconfig

    libraries = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), *site.getsitepackages(), "<frozen ")
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else ""


def _write_error_file(error: BaseException) -> None:
    """Write torch's error file in the format of ``@record``, unless ``@record`` has just written it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(Exception):
        try:
            raise error  # record_exception formats the exception that is being handled
        except BaseException as raised:  # noqa: BLE001
            get_error_handler().record_exception(raised)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return f"<{type(error).__name__}.__str__ raised {type(second).__name__}>"


def _where_of_syntax_error(error: BaseException) -> str:
    return f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else ""


def _main() -> NoReturn:
    fd = int(os.environ.pop(FRESH_BOOT))
    with open(fd, "rb") as file:
        boot, script = msgspec.msgpack.decode(file.read(), type=tuple[Boot, ScriptConfig])
    for inherited in (boot.channel_fd, boot.page_fd, *boot.snapshot_fds):
        os.set_inheritable(inherited, False)
    run_worker(boot, script)


if __name__ == "__main__":
    _main()
