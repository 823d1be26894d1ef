"""The ``rackrun`` command: starts the agents of this host and, on one host, the coordinator; exits when the job ends.

The order matters. First the environment (one thread a process), then torch, the arguments and everything that can be
checked. Then the port is bound, so that agents know it. Then come the imports that all workers share. Then the agents
are forked, while the process has one thread, and only then the event loop begins. A refusal before the first fork
leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rackrun.errors import RackrunError, UsageError
from rackrun.link.process.import_speed import without_collections
from rackrun.link.process.process_exit import code_of, end_process
from rackrun.link.process.standard_streams import open_closed_streams, say_what_can_be_said
from rackrun.version import __version__

if TYPE_CHECKING:
    from rackrun.launch.options.arguments import LaunchOptions
    from rackrun.launch.run.run_directory import RunDirectory
    from rackrun.protocol.agent_config import AgentConfig
    from rackrun.protocol.commands import StopJob

__all__ = ["main", "run"]


def run() -> NoReturn:
    """Run the ``rackrun`` command: call `main` and end the process."""
    try:
        code = main()
    except SystemExit as stop:
        code = code_of(stop)
    end_process(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job and return the exit code: 0 done, 1 the script failed, 2 bad usage, 3 more failures than the job can
    survive, 128+N signal N."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] == "--version":  # elsewhere the parser decides whose option it is; the parser imports torch
        print(f"rackrun {__version__}")
        return 0
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(
            name, "1"
        )  # torchrun's default; and before torch: a process with threads cannot be forked
    open_closed_streams()
    if sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__:  # not if they are captured, as in a test
        say_what_can_be_said()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _leave)  # until the loop takes over
    try:
        over, hidden = _launch(arguments)
    except UsageError as error:
        print(f"rackrun: error: {error}", file=sys.stderr)
        return 2
    except RackrunError as error:
        print(f"rackrun: {error}", file=sys.stderr)
        return 3
    _explain(over, hidden=hidden)
    return over.exit_code


def _launch(arguments: Sequence[str] | None) -> tuple[StopJob, bool]:
    with without_collections():
        from rackrun.launch.options.arguments import parse
    from rackrun.launch.run.rendezvous import listen, meet
    from rackrun.launch.run.run_directory import RunDirectory, new_run_id, read_token

    options = parse(arguments)
    _check_gpus()
    hidden = options.redirects != "0" or options.local_ranks_filter != ""
    run_id = options.run_id or new_run_id()
    token = read_token(options.token_file) if options.token_file else secrets.token_urlsafe(32)
    listening = meet(*options.endpoint, run_id) if options.endpoint else listen("127.0.0.1", 0)
    if listening is None:
        return _follow(options, run_id, token), hidden
    try:
        place = RunDirectory.make(run_id, options.out_dir)
        try:
            return _host(options, run_id, token, listening, place), hidden
        finally:
            place.close()
    finally:
        listening.close()


def _check_gpus() -> None:
    import torch  # the agents fork with it

    from rackrun.launch.run.torch_build_check import check_gpus

    accelerated = torch.version.cuda is not None or torch.version.hip is not None
    check_gpus(os.environ, torch=torch.__version__, accelerated=accelerated)


def _host(options: LaunchOptions, run_id: str, token: str, listening: socket.socket, place: RunDirectory) -> StopJob:
    from rackrun.agent.worker_start.fork_server import preload
    from rackrun.launch.run.job_loop import host
    from rackrun.launch.run.local_agents import LocalAgents
    from rackrun.launch.run.run_directory import Endpoint
    from rackrun.link.address import join
    from rackrun.link.process import descriptor_limit

    own = f"http://{join(*listening.getsockname()[:2])}"
    url = f"http://{join(*options.endpoint)}" if options.endpoint else own
    place.write_token(token)
    for what in preload(options.script.preload):
        print(f"rackrun: could not import {what}", file=sys.stderr)
    log_dir = options.log_dir or str(place.directory / "logs")
    agents = LocalAgents(_agent_configs(options, run_id, token, url, log_dir))
    agents.start()
    descriptor_limit.raise_limit()  # one connection for each agent, and one for each other host
    try:
        return asyncio.run(
            host(options, place, listening, agents, Endpoint(url=url, run_id=run_id, pid=os.getpid()), token)
        )
    finally:
        agents.kill()


def _follow(options: LaunchOptions, run_id: str, token: str) -> StopJob:
    from rackrun.agent.worker_start.fork_server import preload
    from rackrun.launch.run.job_loop import follow
    from rackrun.launch.run.local_agents import LocalAgents
    from rackrun.link.address import join

    assert options.endpoint is not None
    url = f"http://{join(*options.endpoint)}"
    preload(options.script.preload)
    log_dir = options.log_dir or (str(options.out_dir / "logs") if options.out_dir else os.devnull)
    agents = LocalAgents(_agent_configs(options, run_id, token, url, log_dir))
    agents.start()
    try:
        return asyncio.run(follow(options, url, agents, token))
    finally:
        agents.kill()


def _agent_configs(options: LaunchOptions, run_id: str, token: str, url: str, log_dir: str) -> list[AgentConfig]:
    from rackrun.protocol.agent_config import AgentConfig, LogConfig
    from rackrun.protocol.ids import TrayId

    logs = LogConfig(
        directory=log_dir,
        redirects=options.redirects,
        tee=options.tee,
        local_ranks_filter=options.local_ranks_filter,
        prefix=options.log_prefix,
    )
    env = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    rack = options.rack
    return [
        AgentConfig(
            run_id=run_id,
            tray=TrayId(name),
            slots=rack.slots(name) if rack else options.slots,
            coordinator=url,
            token=token,
            advertise=_advertise(options),
            script=options.script,
            logs=logs,
            env={**env, **options.worker_env, "ROLE_NAME": options.role},
            topology=rack.partial(name) if rack else b"",
            simulated=options.trays > 1,
            slot_env=rack.slot_env(name) if rack else (),
            filler=options.filler,
            nnodes=options.nodes_max * options.trays,
            max_restarts=options.max_restarts,
            grace_s=options.grace_s,
            lease_s=options.lease_s,
        )
        for name in (rack.trays if rack else _tray_names(options))
    ]


def _tray_names(options: LaunchOptions) -> list[str]:
    """Return names for this launcher's trays: by node rank if it is known, else by host and process, because two
    launchers may share a host."""
    if options.endpoint is None or options.node_rank is not None:
        first = (options.node_rank or 0) * options.trays
        return [f"tray-{first + index:02}" for index in range(options.trays)]
    host = socket.gethostname().partition(".")[0]
    return [f"{host}-{os.getpid()}-{index:02}" for index in range(options.trays)]


def _advertise(options: LaunchOptions) -> str:
    """Return the address at which other hosts reach this one.

    The local address of a route to the coordinator is reachable from other hosts. If there are no other hosts, it is an
    address that only this host can reach.
    """
    from rackrun.link.address import is_loopback

    if options.local_addr and (options.endpoint is not None or is_loopback(options.local_addr)):
        return options.local_addr
    if options.endpoint is None:
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(*options.endpoint, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only selects the route
        return str(probe.getsockname()[0])


def _explain(over: StopJob, *, hidden: bool) -> None:
    """Print on stderr why the job did not end well. ``hidden``: the workers' own output is not shown on this
    terminal."""
    if over.exit_code == 0:
        return
    if over.failure is not None and over.failure.message != over.because:
        who = "a worker" if over.rank is None else f"rank {over.rank}"
        kind = over.failure.type.removeprefix("builtins.")
        print(f"rackrun: the script failed on {who}: {kind}: {over.failure.message}", file=sys.stderr)
        if hidden:
            print(over.failure.traceback.rstrip(), file=sys.stderr)
    remedy = f" Remedy: {over.remedy}" if over.remedy else ""
    because = over.because.rstrip(".")
    print(f"rackrun: stopped (exit code {over.exit_code}): {because}.{remedy}", file=sys.stderr)


def _leave(number: int, _frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)  # no second signal during the clean-up
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run()
