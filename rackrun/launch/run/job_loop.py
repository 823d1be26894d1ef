"""The launcher's event loop: the coordinator on one host, and on the others a wait for the job's end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from collections.abc import Callable, Iterator

import aiohttp
import msgspec

from rackrun.coordinator.journal.journal_writer import Journal, JournalError
from rackrun.coordinator.server.http_server import Server
from rackrun.coordinator.shell.driver import Driver
from rackrun.coordinator.sinks.sink_host import END_S, Sinks
from rackrun.coordinator.user_code.policy_host import PolicyHost
from rackrun.coordinator.user_code.provider_child import Hello
from rackrun.coordinator.user_code.provider_host import RELEASE_S, ProviderHost
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.errors import UsageError
from rackrun.launch.options.arguments import LaunchOptions
from rackrun.launch.run.local_agents import LocalAgents
from rackrun.launch.run.missing_hosts import AGAIN_S, FIRST_S, expected_trays, who_is_missing
from rackrun.launch.run.run_directory import Endpoint, Result, RunDirectory
from rackrun.launch.run.screen import TerminalOutput, status_text
from rackrun.protocol.commands import StopJob
from rackrun.protocol.events import StopRequested, TrayLost
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig

__all__ = ["follow", "host"]

_STATUS_S = 0.25
_AGENT_S = 10.0
"""Seconds that an agent may need beyond its workers' grace time."""
_AT_ONCE_S = 2.0
_ASK_S = 10.0
_START_S = 60.0
_AGAIN_S = 20.0
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def _journal(
    options: LaunchOptions, place: RunDirectory, endpoint: Endpoint, screen: TerminalOutput, config: JobConfig
) -> Journal:
    """Create the journal. Raises UsageError if that is impossible: nothing was started."""
    try:
        journal = Journal(
            place.journal,
            run_id=endpoint.run_id,
            facts={"script": options.script.path, "arguments": " ".join(options.script.args)},
            ledger=options.ledger,
            on_trouble=screen.say,
            on_notice=screen.say,
        )
    except JournalError as error:
        raise UsageError(error.what, remedy=error.remedy) from error
    journal.fact("config", msgspec.json.encode(config).decode())
    return journal


def _close(journal: Journal, over: StopJob, ended_ms: float) -> None:
    for key, value in (("exit_code", over.exit_code), ("because", over.because), ("ended_ms", ended_ms)):
        journal.fact(key, value)
    journal.close()


def _idle(options: LaunchOptions, core: ControlPlane, over: StopJob) -> str:
    """Describe the given options that cannot have had an effect; "": none."""
    if not options.of_steps or over.exit_code != 0 or core.view().elastic:
        return ""
    why = "the script has no @rackrun.elastic, and what is lost begins again from the start"
    return f"{', '.join(options.of_steps)} did nothing: {why}"


async def host(
    options: LaunchOptions,
    place: RunDirectory,
    listening: socket.socket,
    agents: LocalAgents,
    endpoint: Endpoint,
    token: str,
) -> StopJob:
    """Run the job to its end, with the coordinator in this process. Raises UsageError if the journal cannot be
    created."""
    began = time.monotonic()
    screen = TerminalOutput(quiet=options.quiet)
    config = _config(options)
    journal = _journal(options, place, endpoint, screen, config)
    core = ControlPlane(config)
    sinks = Sinks(options.log_to, run_id=endpoint.run_id, directory=place.directory, notice=screen.say)
    driver = Driver(
        core,
        journal,
        run_id=endpoint.run_id,
        observer=screen,
        sinks=sinks,
        slow_after_s=None if options.slow_ranks == "off" else options.slow_after_s,
    )
    server = Server(driver, run_id=endpoint.run_id, token=token, lease_s=options.lease_s)
    await server.start(listening)
    place.announce(endpoint)
    driver.fence, driver.returns, driver.how_ended = agents.fence, agents.returns, agents.how_ended
    asked = PolicyHost(config.policy_function, driver.submit)
    driver.ask, driver.prepare = asked.ask, asked.use
    racks = _racks(config, driver, agents, endpoint, screen)
    hosts = [one for one in (asked, racks, sinks) if one is not None]
    agents.beside = lambda: [pid for one in hosts for pid in one.pids()]
    if config.policy_function:
        asked.start()
    driver.begin()

    def tray_lost(tray: TrayId, pid: int, because: str) -> None:
        link = driver.link_of(tray)
        if link is not None and link.pid == pid:
            driver.lost(tray, link, because)
        elif link is None and not agents.returns(
            tray
        ):  # it died before it had joined again, and the job does not wait for it any more
            driver.submit(TrayLost(tray=tray, because=because))

    def none_left(because: str) -> None:
        if options.endpoint is None and not driver.status().trays:  # a provider may have brought other trays
            remedy = "see what ended the agents above; --max-restarts allows more of them."
            driver.stop(StopJob(exit_code=3, because=f"no agent is left on this host ({because})", remedy=remedy))

    agents.watch(tray_lost, none_left)
    over = StopJob(exit_code=3, because="the launcher failed", remedy="please report this, with the traceback.")
    requests = 0

    def stop(number: signal.Signals) -> None:
        nonlocal requests
        requests += 1
        exit_code = 128 + number
        late = StopJob(exit_code=exit_code, because=f"{number.name}; no step boundary within {options.grace_s:.0f} s")
        driver.submit(StopRequested(because=number.name, exit_code=exit_code))
        asyncio.get_running_loop().call_later(options.grace_s if requests == 1 else 0.0, driver.stop, late)
        if requests == 1 and driver.over is None:
            screen.say(f"{number.name}: stopping at the next step boundary; once more stops at once")
        elif requests > 1:
            agents.kill()

    try:
        with (
            _handled(options.signals, stop),
            _repeating(lambda: screen.status(status_text(driver.status())), screen.live),
            _telling_who_is_missing(options, config, driver),
        ):
            over = await driver.finished
            if idle := _idle(options, core, over):
                screen.say(idle)
            await _end(racks, agents, sinks, options.grace_s, at_once=lambda: requests > 1)
        await server.close()
    finally:
        for one in hosts:
            one.close()
        agents.kill()
        driver.close()
        _close(journal, over, driver.now_ms())
        screen.close()
    place.finish(
        Result(
            run_id=endpoint.run_id,
            exit_code=over.exit_code,
            because=over.because,
            remedy=over.remedy,
            steps=driver.ledger.steps,
            recoveries=tuple(recovery.line() for recovery in driver.recoveries),
            recoveries_ended=sum(recovery.ended_with_job for recovery in driver.recoveries),
            seconds=round(time.monotonic() - began, 3),
        )
    )
    return over


async def _end(
    racks: ProviderHost | None, agents: LocalAgents, sinks: Sinks, grace_s: float, *, at_once: Callable[[], bool]
) -> None:
    """End what the job has used, in this order: agents still send values while they end. ``at_once`` is asked before
    each: a second signal may have come."""
    if racks is not None:
        await racks.end(_AT_ONCE_S if at_once() else RELEASE_S)
    await agents.exited(_AT_ONCE_S if at_once() else grace_s + _AGENT_S)
    await sinks.end(_AT_ONCE_S if at_once() else END_S)
    agents.kill()  # and whatever else is left


def _racks(
    config: JobConfig, driver: Driver, agents: LocalAgents, endpoint: Endpoint, screen: TerminalOutput
) -> ProviderHost | None:
    if not config.provider:
        return None
    hello = Hello(run_id=endpoint.run_id, template=agents.template())
    racks = ProviderHost(config.provider, hello, driver.submit, screen.say)
    driver.provide = racks.provide
    return racks


def _config(options: LaunchOptions) -> JobConfig:
    return JobConfig(
        trays_min=options.nodes_min * options.trays,
        trays_max=options.nodes_max * options.trays,
        spares=options.spares,
        mesh=options.mesh,
        cross_clique=options.cross_clique,
        snapshot_copies=options.redundancy.kind,
        set_size=max(options.redundancy.width, 2),
        set_parity=options.redundancy.parity,
        max_restarts=options.max_restarts,
        start_over=options.start_over,
        slow_ranks=options.slow_ranks,
        join_timeout_ms=options.join_timeout_ms,
        lease_ms=round(options.lease_s * 1e3),
        last_call_ms=options.last_call_ms,
        min_ranks=options.min_ranks,
        rules=options.policy.rules,
        weights=options.policy.weights,
        policy_function=options.policy.function,
        repair_patience_ms=options.policy.repair_patience_ms,
        provider=options.provider.spec,
        provider_expected_s=options.provider.expected_s,
        acquire_timeout_ms=options.provider.timeout_ms,
    )


async def follow(options: LaunchOptions, url: str, agents: LocalAgents, token: str) -> StopJob:
    """Keep this host's agents running, without the coordinator, until the job ends."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[StopJob] = loop.create_future()
    lost = StopJob(
        exit_code=3,
        because="the coordinator is gone",
        remedy="see the launcher of the host that --rdzv-endpoint names.",
    )

    def conclude(how: StopJob) -> None:
        if not over.done():
            over.set_result(how)

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        tasks = {asyncio.create_task(_end_of(session, url, conclude, lost, options.lease_s))}

        def stop(number: signal.Signals) -> None:
            if len(tasks) > 1:
                agents.kill()
                conclude(StopJob(exit_code=128 + number, because=number.name))
            else:
                because = f"{number.name} on {socket.gethostname()}"
                tasks.add(asyncio.create_task(_request_stop(session, url, because)))
                loop.call_later(
                    options.grace_s + _AGENT_S, conclude, StopJob(exit_code=128 + number, because=number.name)
                )

        def tray_lost(tray: TrayId, pid: int, because: str) -> None:
            pass  # the coordinator sees it by the connection

        def none_left(because: str) -> None:
            conclude(StopJob(exit_code=3, because=f"no agent is left on this host ({because})"))

        agents.watch(tray_lost, none_left)
        try:
            with _handled(options.signals, stop):
                how = await over
                await agents.end(options.grace_s + _AGENT_S)
        finally:
            agents.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return how


async def _end_of(
    session: aiohttp.ClientSession, url: str, conclude: Callable[[StopJob], None], lost: StopJob, patience_s: float
) -> None:
    """Ask the coordinator until it reports the job's end.

    A coordinator that refuses connections has not begun yet or, after ``patience_s``, is gone. One that does not answer
    may be cut off: then this host's agents decide, which give up by themselves.
    """
    loop = asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ASK_S, sock_read=_AGAIN_S)
    begun = False
    refuses_since: float | None = None
    while True:
        try:
            async with session.get(f"{url}/api/end", timeout=timeout) as answer:
                if answer.status == 200:
                    conclude(msgspec.json.decode(await answer.read(), type=StopJob))
                    return
                what = (await answer.text()).strip()
                conclude(StopJob(exit_code=2, because=what))
                return
        except (
            TimeoutError
        ) as error:  # normal while the job goes on; or the other end is gone and this side has not noticed
            begun, refuses_since = begun or isinstance(error, aiohttp.SocketTimeoutError), None
            continue
        except (aiohttp.ClientError, OSError) as error:
            begun = begun or isinstance(error, aiohttp.ServerDisconnectedError)
            refuses = getattr(error, "errno", None) not in _NO_WAY
            refuses_since = (refuses_since or loop.time()) if refuses else None
        if refuses_since is not None and loop.time() - refuses_since > (patience_s if begun else _START_S):
            conclude(lost)
            return
        await asyncio.sleep(0.2)


async def _request_stop(session: aiohttp.ClientSession, url: str, because: str) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with session.post(
            f"{url}/api/stop", json={"because": because}, timeout=aiohttp.ClientTimeout(total=_ASK_S)
        ):
            pass


@contextlib.contextmanager
def _handled(signals: tuple[signal.Signals, ...], stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = tuple(number for number in signals if signal.getsignal(number) is not signal.SIG_IGN)  # nohup
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _telling_who_is_missing(options: LaunchOptions, config: JobConfig, driver: Driver) -> Iterator[None]:
    """Report missing hosts until the world is formed or the job is over."""

    async def tell() -> None:
        await asyncio.sleep(FIRST_S)
        expected = expected_trays(options)
        while missing := who_is_missing(driver.hosts(), config.trays_min, expected, options.trays):
            driver.notice(missing)
            await asyncio.sleep(AGAIN_S)

    task = asyncio.create_task(tell()) if options.nodes_max > 1 else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


@contextlib.contextmanager
def _repeating(act: Callable[[], None], wanted: bool) -> Iterator[None]:
    async def repeat() -> None:
        while True:
            act()
            await asyncio.sleep(_STATUS_S)

    task = asyncio.create_task(repeat()) if wanted else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
