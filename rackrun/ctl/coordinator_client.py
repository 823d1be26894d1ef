"""Requests to the coordinator of a run, with the run's token."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rackrun.errors import UsageError
from rackrun.launch.run.run_directory import Endpoint, Result, find_run, read_json, read_own

__all__ = ["TIMEOUT_S", "Run", "RunOption", "ask", "one_run", "running"]

_RUN = typer.Argument(metavar="[RUN]", help="Directory or id of a run. Default: the newest.", show_default=False)
Run = Annotated[str | None, _RUN]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="RUN", help="Directory or id of the run. Default: the newest run.", show_default=False
    ),
]
TIMEOUT_S = 5.0


def one_run(run: str | None, option: str | None) -> str | None:
    """Return the run that is named as an argument or by ``--run``. Raises UsageError if both name one."""
    if run is not None and option is not None:
        raise UsageError(f"two runs are named: {run} and --run {option}.", remedy="name one of them.")
    return run if option is None else option


def running(run: str | None) -> Path:
    """Return the directory of a run. Raises UsageError if the run has ended."""
    place = find_run(run)
    if read_json(place / "result.json", Result) is not None:
        raise UsageError(f"the run in {place} has ended already.", remedy="see rackctl status.")
    return place


def ask(place: Path, path: str, data: bytes | None = None, *, timeout_s: float | None = TIMEOUT_S) -> str:
    """Send a request to the run's coordinator and return its answer. ``timeout_s`` None: no limit. Raises UsageError if
    there is no coordinator."""
    gone = "see rackctl report for what it did."
    said_where, said_token = read_own(place, "endpoint.json"), read_own(place, "token", secret=True)
    if said_where is None:
        raise UsageError(
            f"the run in {place} has no coordinator: it never began, or its launcher was killed.", remedy=gone
        )
    if said_token is None:
        raise UsageError(f"{place / 'token'} is not there: the run has ended, or is ending.", remedy=gone)
    try:
        endpoint = msgspec.json.decode(said_where, type=Endpoint)
        token = said_token.decode("ascii").strip()
    except ValueError as error:  # msgspec's is one
        raise UsageError(
            f"endpoint.json or token in {place} cannot be read: {error}.", remedy="is it a run of another version?"
        ) from error
    request = urllib.request.Request(  # noqa: S310 - the url is the launcher's own, out of a directory of mode 0700
        f"{endpoint.url}{path}",
        data=data,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            text: Any = answer.read().decode()
            return str(text)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace").strip()
        raise UsageError(
            f"the coordinator at {endpoint.url} refused: {said}.", remedy="is this the right run?"
        ) from error
    except OSError as error:
        raise UsageError(
            f"nobody answers at {endpoint.url}: the launcher (process {endpoint.pid}) of run {endpoint.run_id} is gone.",
            remedy=gone,
        ) from error
