"""``rackctl drain``, ``return``, ``swap``, ``shrink``, ``grow``, ``policy``: operators' requests to a running job."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from rackrun.ctl.coordinator_client import ask, running
from rackrun.errors import RackrunError, UsageError
from rackrun.protocol.commands import Answer

__all__ = ["RequestRefused", "add_control"]

_Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="Directory or id of a run. Default: the newest.", show_default=False),
]
_Target = Annotated[str, typer.Argument(metavar="TARGET", help="A tray, or a slot (TRAY/INDEX); see rackctl status.")]
_NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when it is begun.")]
_answers = msgspec.json.Decoder(Answer)
_YOURS = ("unknown", "over", "plain", "policy", "early", "size")
_LOAD_S = 70.0
"""Seconds to wait for an answer: a function is loaded before it becomes the policy."""


class RequestRefused(RackrunError):
    """The job cannot do this, or not now. Nothing was changed; if it had begun, the rest is called off."""


def add_control(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(epilog="Example: rackctl drain tray-03 --because 'fan fails'")(drain)
    app.command("return", epilog="Example: rackctl return tray-03")(give_back)
    app.command(epilog="Example: rackctl swap 5 --with tray-07/2")(swap)
    app.command(epilog="Example: rackctl shrink --to 6")(shrink)
    app.command(epilog="Example: rackctl grow")(grow)
    app.command(epilog="Example: rackctl policy swap,shrink,wait")(policy)


def drain(
    target: _Target,
    run: _Run = None,
    because: Annotated[str, typer.Option(metavar="TEXT", help="For the journal, and for who looks on.")] = "",
    wait_for_spares: Annotated[
        bool, typer.Option("--wait-for-spares", help="Begin when there are enough, instead of being refused.")
    ] = False,
    no_wait: _NoWait = False,
) -> None:
    """Take a tray or a slot out of use: its ranks go to spares between two steps, and nobody comes there until it is returned.

    Prints what becomes of it, until nobody is there any more. Exit code 1 when it is refused or called off.
    """
    _control(run, "drain", {"target": target, "because": because, "wait": wait_for_spares}, wait=not no_wait)


def give_back(target: _Target, run: _Run = None) -> None:
    """Let a drained tray or slot be used again: spares are started there. A slot that lost too many workers is forgiven."""
    _control(run, "return", {"target": target}, wait=True)


def swap(
    rank: Annotated[int, typer.Argument(metavar="RANK")],
    run: _Run = None,
    to: Annotated[
        str, typer.Option("--with", metavar="SLOT", help="A spare. Default: the best one.", show_default=False)
    ] = "",
    no_wait: _NoWait = False,
) -> None:
    """Move a rank to a spare between two steps: no step is done again. A new spare starts where it was."""
    _control(run, "swap", {"rank": rank, "to": to}, wait=not no_wait)


def shrink(
    ranks: Annotated[list[int] | None, typer.Argument(metavar="[RANK]...", show_default=False)] = None,
    run: _Run = None,
    to: Annotated[int, typer.Option("--to", metavar="N", help="So many ranks stay.", show_default=False)] = 0,
    no_wait: _NoWait = False,
) -> None:
    """Go on with fewer ranks, from the next step boundary on: those named, and who has to go with them, or all but N. No step is done again.

    Who leaves waits as a spare. The world does not grow beyond what is left until rackctl grow.
    """
    _control(run, "shrink", {"ranks": ranks or [], "to": to}, wait=not no_wait)


def grow(
    run: _Run = None,
    to: Annotated[
        int, typer.Option("--to", metavar="N", help="Default: as many ranks as it began with.", show_default=False)
    ] = 0,
    no_wait: _NoWait = False,
) -> None:
    """Let the world grow again after rackctl shrink, or try at once where growing has failed."""
    _control(run, "grow", {"to": to}, wait=not no_wait)


def policy(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="[SPEC]", help="As --policy of rackrun; cheapest: the default.", show_default=False),
    ] = None,
    run: _Run = None,
    weights: Annotated[
        str | None, typer.Option(metavar="WHAT=N,..", help="As --policy-weights of rackrun.", show_default=False)
    ] = None,
) -> None:
    """Show by which policy failures are answered, or change it. What is not named stays as it is."""
    if spec is None and weights is None:
        print(msgspec.json.decode(ask(running(run), "/api/status"))["core"]["policy"])
        return
    fields = {"policy": spec, "weights": weights}
    _show(_answers.decode(ask(running(run), "/api/policy", msgspec.json.encode(fields), timeout_s=_LOAD_S)))


def _control(run: str | None, what: str, fields: dict[str, Any], *, wait: bool) -> None:
    place = running(run)
    answer = _answers.decode(ask(place, f"/api/{what}", msgspec.json.encode(fields)))
    _show(answer)
    if wait and answer.outcome == "begun":
        _show(_answers.decode(ask(place, f"/api/answer?request={answer.request}", timeout_s=None)))


def _show(answer: Answer) -> None:
    if answer.outcome == "refused":
        kind = UsageError if answer.refusal in _YOURS else RequestRefused
        raise kind(f"{answer.text}.", remedy=answer.remedy)
    print(answer.text, flush=True)
