"""Whatever a person, or a program, asks over HTTP: an answer comes, and the job goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.job_config import JobConfig
from tests.coordinator.fakes import TOKEN, coordinator

POSTS = ("close-breaker", "drain", "return", "swap", "shrink", "grow", "policy")
FIELDS = (
    "target",
    "because",
    "wait",
    "rank",
    "to",
    "ranks",
    "steps",
    "policy",
    "weights",
    "request",
    "at_ms",
    "event",
    "trouble",
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.sampled_from([2**70, -(2**70), 2**63, 1e308, -1]), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from(["\ud800", "tray-00", "tray-00/0", "a\x00b", "x" * 200, "no.such:function"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
BODIES = st.one_of(
    OBJECTS.map(lambda value: json.dumps(value).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"[" * 3_000, b'{"because": "\xff\xfe"}', b'{"target": "\\ud800"}', b'{"to": 1180591620717411303424}']
    ),
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    asked=[
        ("drain", b'{"target":"\\ud800"}'),
        ("swap", b'{"rank": 0, "to": "\\udfff"}'),
        ("policy", b'{"policy": "\\ud800:f"}'),
    ]
)
@given(asked=st.lists(st.tuples(st.sampled_from(POSTS), BODIES), min_size=1, max_size=12))
async def test_every_request_is_answered_and_the_job_goes_on(tmp_path: Path, asked: list[tuple[str, bytes]]) -> None:
    journal = Journal(tmp_path / f"journal-{id(asked)}.sqlite", run_id="job-1")
    try:
        async with coordinator(ControlPlane(JobConfig(trays_min=1, trays_max=1, spares=0)), journal) as c:  # type: ignore[arg-type]
            c.driver.begin()
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                for path, body in asked:
                    async with session.post(f"{c.url}/api/{path}", data=body) as answer:
                        assert answer.status < 500, (path, body, await answer.text())
                        await answer.read()
                for path in ("api/status", "metrics", "api/answer?request=%ff"):
                    async with session.get(f"{c.url}/{path}") as answer:
                        assert answer.status < 500, (path, await answer.text())
            assert c.driver.over is None
            assert journal.flush()
            assert (journal.dead, journal.rows_lost) == ("", 0)
    finally:
        journal.close()
        (tmp_path / f"journal-{id(asked)}.sqlite").unlink()


@pytest.mark.parametrize(
    "body",
    [b'{"because": "\xff"}', b'{"because": "\\ud800 \\u0000"}', b"[" * 3_000, b"[1]", b"7", b'{"because": {"a": 1}}'],
)
async def test_a_stop_is_a_stop_whatever_the_reason(journal: Journal, body: bytes) -> None:
    async with coordinator(ControlPlane(JobConfig(trays_min=1, trays_max=1, spares=0)), journal) as c:  # type: ignore[arg-type]
        c.driver.begin()
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
            session.post(f"{c.url}/api/stop", data=body) as answer,
        ):
            assert answer.status == 202
        assert c.driver.over is not None
        assert journal.flush()
        assert journal.rows_lost == 0


@pytest.mark.parametrize("header", [b"Bearer \xff\xfe", b"Bearer " + b"x" * 9_000, b"\xed\xa0\x80", b""])
async def test_a_header_of_any_bytes_is_refused(journal: Journal, header: bytes) -> None:
    async with coordinator(ControlPlane(JobConfig(trays_min=1, trays_max=1, spares=0)), journal) as c:  # type: ignore[arg-type]
        heard = await _raw(c.url, b"GET /api/status HTTP/1.1\r\nHost: x\r\nAuthorization: " + header + b"\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 401 ")


async def _raw(url: str, request: bytes) -> bytes:
    import asyncio

    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    heard: Any = await asyncio.wait_for(reader.read(), 60.0)
    writer.close()
    return bytes(heard)
