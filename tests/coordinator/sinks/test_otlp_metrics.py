"""Gauges over OTLP/HTTP: what is sent, and what an answer means."""

from __future__ import annotations

import json
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rackrun.coordinator.sinks.otlp_metrics import OtlpMetrics, endpoint, request_body, request_headers
from rackrun.coordinator.sinks.sink import Refused
from tests.coordinator.sinks.openings import opening, record


class Collector(HTTPServer):
    """Answers with ``status`` and ``body``."""

    status, body = 200, b"{}"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.requests.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def points(body: dict[str, Any]) -> dict[str, list[Any]]:
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    return {one["name"]: [point["asDouble"] for point in one["gauge"]["dataPoints"]] for one in metrics}


def test_each_name_is_a_gauge_with_a_point_for_each_record() -> None:
    body = request_body([record(3, loss=2.0, note="x"), record(4, loss=float("nan"))], "job-1", "train")
    assert points(body) == {"step": [3.0, 4.0], "loss": [2.0, "NaN"]}
    assert {"key": "rackrun.run_id", "value": {"stringValue": "job-1"}} in body["resourceMetrics"][0]["resource"][
        "attributes"
    ]
    json.dumps(body, allow_nan=False)


def test_the_path_of_metrics_is_added_where_none_is_given() -> None:
    assert endpoint("http://host:4318") == "http://host:4318/v1/metrics"
    assert endpoint("https://host/otlp/v1/metrics") == "https://host/otlp/v1/metrics"


def test_headers_are_those_of_opentelemetrys_variable() -> None:
    headers = request_headers({"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%3Db, x=1"})
    assert headers == {"Content-Type": "application/json", "api-key": "a=b", "x": "1"}


def sent(collector: Collector, tmp_path: Path) -> OtlpMetrics:
    sink = OtlpMetrics(opening("otlp", collector.url, tmp_path))
    sink.begin(None, "")
    sink.write(record(0))
    sink.write(record(1))
    return sink


def test_a_flush_is_one_request(collector: Collector, tmp_path: Path) -> None:
    sink = sent(collector, tmp_path)
    sink.flush()
    sink.flush()
    assert [(path, points(body)["step"]) for path, body in collector.requests] == [("/v1/metrics", [0.0, 1.0])]


def test_a_collector_that_is_busy_gets_the_same_again(collector: Collector, tmp_path: Path) -> None:
    sink = sent(collector, tmp_path)
    collector.status = 503
    with pytest.raises(urllib.error.HTTPError):
        sink.flush()
    collector.status = 200
    sink.flush()
    assert [points(body)["step"] for _, body in collector.requests] == [[0.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [(400, b"", 2), (200, b'{"partialSuccess": {"rejectedDataPoints": "1", "errorMessage": "too old"}}', 1)],
)
def test_what_can_never_be_taken_is_not_sent_again(
    status: int, body: bytes, refused: int, collector: Collector, tmp_path: Path
) -> None:
    sink = sent(collector, tmp_path)
    collector.status, collector.body = status, body
    with pytest.raises(Refused) as error:
        sink.flush()
    assert error.value.records == refused
    sink.flush()
    assert len(collector.requests) == 1
