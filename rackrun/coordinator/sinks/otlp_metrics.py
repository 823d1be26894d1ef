"""``otlp:URL``: gauges over OTLP/HTTP with JSON.

Every value has the time at which it arrived. OpenTelemetry's SDK is not used: it keeps only the last value of a gauge
between two exports.
"""

from __future__ import annotations

import json
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rackrun.coordinator.sinks.sink import Key, Opening, Record, Refused, Value
from rackrun.version import __version__

__all__ = ["OtlpMetrics", "endpoint", "request_body", "request_headers"]

_TIMEOUT_S = 10.0
_NEVER = (400, 413, 415, 422)
"""Answers after which the same request has no better chance."""


class OtlpMetrics:
    """A collector. A request has all values of a flush. Texts are not sent."""

    run = ""

    def __init__(self, opening: Opening) -> None:
        self._url, self._run_id = endpoint(opening.target), opening.run_id
        self._records: list[Record] = []

    def begin(self, newest: Key | None, run: str) -> Key | None:  # noqa: ARG002 - a collector has no runs
        return newest

    def write(self, record: Record) -> None:
        self._records.append(record)

    def flush(self) -> None:
        """Send the records. Raises `Refused` where the collector says that it cannot take them."""
        if not self._records:
            return
        body = request_body(self._records, self._run_id, os.environ.get("OTEL_SERVICE_NAME", "rackrun"))
        request = urllib.request.Request(  # noqa: S310 - http or https, as checked at the start
            self._url, json.dumps(body, allow_nan=False).encode(), request_headers(os.environ)
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                said = answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _NEVER:
                raise
            refused = len(self._records)
            self._records.clear()
            raise Refused(f"HTTP {error.code} {error.reason}", refused) from error
        sent = len(self._records)
        self._records.clear()
        rejected, why = _rejected(said)
        if rejected:
            raise Refused(f"{rejected} values were rejected: {why}", min(rejected, sent))

    def rewind(self, step: int) -> str:
        return f"the collector keeps the values of the steps after {step}, beside the right ones"

    def close(self) -> str:
        return ""


def endpoint(target: str) -> str:
    """Return the URL for metrics: ``/v1/metrics`` if no path is given. Raises ValueError if it is no URL of a host."""
    parts = urllib.parse.urlsplit(target)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{target!r} is no http:// or https:// URL")
    _ = parts.port  # raises if it is no number
    return target if parts.path.strip("/") else f"{target.rstrip('/')}/v1/metrics"


def request_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers, with those of ``OTEL_EXPORTER_OTLP_HEADERS`` (``key=value,..``, percent-encoded)."""
    headers = {"Content-Type": "application/json"}
    for pair in environment.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","):
        key, found, value = pair.partition("=")
        if found:
            headers[key.strip()] = urllib.parse.unquote(value.strip())
    return headers


def request_body(records: Sequence[Record], run_id: str, service: str) -> dict[str, Any]:
    """Return an ExportMetricsServiceRequest: a gauge for each name, and the gauge ``step``."""
    points: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        time = str(int(record.time_s * 1e9))
        for name, value in {"step": record.key.step, **record.values}.items():
            if not isinstance(value, str):
                points.setdefault(name, []).append({"timeUnixNano": time, "asDouble": _number(value)})
    resource = {"service.name": service, "rackrun.run_id": run_id}
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": [{"key": k, "value": {"stringValue": v}} for k, v in resource.items()]},
                "scopeMetrics": [
                    {
                        "scope": {"name": "rackrun", "version": __version__},
                        "metrics": [{"name": name, "gauge": {"dataPoints": found}} for name, found in points.items()],
                    }
                ],
            }
        ]
    }


def _number(value: Value) -> float | str:
    """Return a number as JSON of protocol buffers has it."""
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _rejected(said: bytes) -> tuple[int, str]:
    """Return how many values a collector has not taken, and why."""
    try:
        partial = json.loads(said or b"{}").get("partialSuccess") or {}
        return int(partial.get("rejectedDataPoints") or 0), str(partial.get("errorMessage", ""))
    except (ValueError, AttributeError, TypeError):
        return 0, ""  # it speaks protocol buffers, or says nothing
