"""A sink that is slow, broken or gone costs the job nothing, and what it takes it takes once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rackrun.coordinator.sinks.sink_host import SinkHost, Sinks
from rackrun.coordinator.sinks.targets import SinkTarget
from rackrun.protocol.ids import BEGIN, EVERY, Position, Step
from tests.coordinator.sinks.openings import opening, record


class Writing:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "values.jsonl"
        self.notices: list[str] = []
        self.hosts: list[SinkHost | Sinks] = []

    def host(self, *, target: object = None, kind: str = "jsonl", waiting_max: int = 10_000) -> SinkHost:
        made = opening(kind, self.path if target is None else target, self.directory)
        host = SinkHost(made, self.notices.append, retry_s=0.1, waiting_max=waiting_max)
        self.hosts.append(host)
        return host

    def job(self, run_id: str = "job-1") -> Sinks:
        targets = [SinkTarget("jsonl", str(self.path))]
        sinks = Sinks(targets, run_id=run_id, directory=self.directory, notice=self.notices.append)
        self.hosts.append(sinks)
        return sinks

    def steps(self, path: Path | None = None) -> list[int]:
        path = path or self.path
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []

    def output(self) -> str:
        """What the sinks' processes have printed."""
        return "".join(path.read_text() for path in self.directory.glob("**/*.log"))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - it is a file, or a process
                await asyncio.sleep(0.02)


@pytest.fixture
async def writing(tmp_path: Path) -> AsyncIterator[Writing]:
    writing = Writing(tmp_path)
    yield writing
    for host in writing.hosts:
        host.close()


def log(sinks: Sinks, *steps: int, began: int = 0) -> None:
    for step in steps:
        sinks.write(Position(step), {"loss": 1.0 / (step + 1)}, began=Position(began))


async def test_what_is_queued_is_delivered_at_the_end(writing: Writing) -> None:
    host = writing.host()
    for step in range(600):
        host.take(record(step))
    await host.end(60)
    assert writing.steps() == list(range(600))
    assert writing.notices == []


async def test_a_process_that_is_killed_is_replaced_and_writes_nothing_twice(writing: Writing) -> None:
    host = writing.host()
    for step in range(300):
        host.take(record(step))
    await writing.until(lambda: len(writing.steps()) > 100)
    os.kill(host.pids()[0], signal.SIGKILL)
    for step in range(300, 400):
        host.take(record(step))
    await host.end(60)
    assert writing.steps() == list(range(400))


async def test_a_target_that_is_broken_is_reported_once_and_tried_until_it_works(writing: Writing) -> None:
    writing.path.mkdir()  # no file can be opened there
    host = writing.host()
    for step in range(3):
        host.take(record(step))
    await writing.until(lambda: writing.output().count("IsADirectoryError: ") >= 3)
    assert len(writing.notices) == 1
    assert "does not take values: IsADirectoryError" in writing.notices[0]
    assert "Training goes on" in writing.notices[0]
    writing.path.rmdir()
    await writing.until(lambda: len(writing.notices) > 1)
    assert writing.notices[1].endswith("takes values again")
    await host.end(60)
    assert writing.steps() == [0, 1, 2]
    assert len(writing.notices) == 2


async def test_what_was_never_taken_is_counted_at_the_end(writing: Writing) -> None:
    writing.path.mkdir()
    host = writing.host(waiting_max=10)
    for step in range(25):
        host.take(record(step))
    await host.end(60)
    assert "the values of 25 run.log calls were not delivered (IsADirectoryError" in writing.notices[-1]


async def test_a_full_queue_loses_the_oldest_values_and_says_how_many(writing: Writing) -> None:
    writing.path.mkdir()
    host = writing.host(waiting_max=10)
    host.take(record(0))
    await writing.until(lambda: bool(writing.notices))
    for step in range(1, 26):
        host.take(record(step))
    writing.path.rmdir()
    await host.end(60)
    assert writing.steps() == [0, *range(16, 26)]  # the first was on its way
    assert "the values of 15 run.log calls were not delivered" in writing.notices[-1]


async def test_a_sink_that_stands_still_delays_nobody(writing: Writing) -> None:
    os.mkfifo(writing.path)  # opening and reading it works, and nothing else does
    host = writing.host()
    host.take(record(0))
    await writing.until(lambda: bool(host.pids()))
    os.kill(host.pids()[0], signal.SIGSTOP)
    for step in range(1, 20_000):
        host.take(record(step))
    state = Path(f"/proc/{host.pids()[0]}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "T", "all was taken while the process stood still"
    await host.end(0.3)
    assert "were not taken within 0.3 s" in writing.notices[-1]


async def test_values_reach_the_file_when_the_launcher_is_killed(writing: Writing) -> None:
    """The pipe is closed, and nobody says that it is the end."""
    host = writing.host()
    for step in range(50):
        host.take(record(step))
    process = host._processes.now
    assert process is not None
    assert process._process.stdin is not None
    process._process.stdin.close()
    await asyncio.to_thread(process.reap, 30.0)
    assert writing.steps() == list(range(50))
    with contextlib.suppress(OSError):
        host.close()


async def test_a_resumed_job_goes_on_and_does_not_repeat(writing: Writing) -> None:
    first = writing.job("job-1")
    log(first, *range(8))
    await first.end(60)
    second = writing.job("job-2")
    log(second, *range(5, 12), began=5)
    await second.end(60)
    assert writing.steps() == list(range(12))


async def test_a_training_that_begins_again_has_a_file_of_its_own(writing: Writing) -> None:
    for run_id in ("job-1", "job-2"):
        sinks = writing.job(run_id)
        log(sinks, 0, 1, 2)
        await sinks.end(60)
    assert writing.steps() == [0, 1, 2]
    assert writing.steps(writing.path.with_name("values.jsonl.1")) == [0, 1, 2]


async def test_values_that_were_wrong_are_replaced(writing: Writing) -> None:
    sinks = writing.job()
    log(sinks, *range(6))
    sinks.rewind(Step(2))
    log(sinks, *range(3, 8))
    await sinks.end(60)
    assert writing.steps() == list(range(8))


async def test_calls_of_one_step_are_all_written(writing: Writing) -> None:
    sinks = writing.job()
    log(sinks, 0, 0, 0, 1)
    await sinks.end(60)
    assert writing.steps() == [0, 0, 0, 1]


async def test_values_before_the_first_step_begin_a_training(writing: Writing) -> None:
    sinks = writing.job()
    sinks.write(BEGIN, {"parameters": 9}, began=None)
    log(sinks, 0)
    await sinks.end(60)
    assert writing.steps() == [-1, 0]


async def test_values_before_the_loop_of_a_resumed_job_begin_no_training(writing: Writing) -> None:
    sinks = writing.job()
    log(sinks, 0, 1, 2)
    await sinks.end(60)
    resumed = writing.job()
    resumed.write(BEGIN, {"parameters": 9}, began=None)
    log(resumed, 3, began=3)
    await resumed.end(60)
    assert writing.steps() == [0, 1, 2, 3]
    assert not list(writing.directory.glob("values.jsonl.*"))


async def test_a_phase_that_follows_the_step_to_which_all_go_back_is_written_again(writing: Writing) -> None:
    sinks = writing.job()
    log(sinks, 0, 1)
    for metric in (1.0, 2.0):
        sinks.write(Position(1, EVERY + 1), {"metric": metric}, began=Position(0))
        sinks.rewind(Step(1)) if metric == 1.0 else None
    await sinks.end(60)
    lines = [json.loads(line) for line in writing.path.read_text().splitlines()]
    assert [line.get("metric") for line in lines] == [None, None, 2.0]


async def test_a_job_that_logs_nothing_opens_nothing(writing: Writing) -> None:
    sinks = writing.job()
    await sinks.end(60)
    assert (sinks.pids(), list(writing.directory.iterdir())) == ([], [])
