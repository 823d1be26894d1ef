"""``rackctl drain``, ``return``, ``swap``, ``shrink``, ``grow``, ``policy``: operators' requests to a running job."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from rackrun.ctl.coordinator_client import RunOption, ask, running
from rackrun.errors import RackrunError, UsageError
from rackrun.protocol.commands import Answer

__all__ = ["ControlRefused", "add_control"]

_Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A tray, or a slot as TRAY/INDEX; rackctl status lists them.")
]
_NoWait = Annotated[bool, typer.Option("--no-wait", help="Return as soon as the job has begun it.")]
_answers = msgspec.json.Decoder(Answer)
_YOURS = ("unknown", "over", "plain", "policy", "early", "size")
_LOAD_S = 70.0
"""Seconds to wait for an answer: a function is loaded before it becomes the policy."""


class ControlRefused(RackrunError):
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
    run: RunOption = None,
    because: Annotated[str, typer.Option(metavar="TEXT", help="Reason, which the journal keeps.")] = "",
    wait_for_spares: Annotated[
        bool, typer.Option("--wait-for-spares", help="Without enough spares: wait for them instead of refusing.")
    ] = False,
    no_wait: _NoWait = False,
) -> None:
    """Take a tray or a slot out of use. Its ranks move to spares between two steps, so no step is repeated.

    No worker starts there until rackctl return. The command prints the progress until the target is empty. Exit code 1:
    the drain was refused or called off.
    """
    _control(run, "drain", {"target": target, "because": because, "wait": wait_for_spares}, wait=not no_wait)


def give_back(target: _Target, run: RunOption = None) -> None:
    """Use a drained tray or slot again: spares start there. This also clears a slot that lost too many workers."""
    _control(run, "return", {"target": target}, wait=True)


def swap(
    rank: Annotated[int, typer.Argument(metavar="RANK", help="The rank to move.")],
    run: RunOption = None,
    to: Annotated[
        str,
        typer.Option(
            "--with", metavar="SLOT", help="The slot of the spare to use. Default: the best spare.", show_default=False
        ),
    ] = "",
    no_wait: _NoWait = False,
) -> None:
    """Move a rank to a spare. This happens between two steps, so no step is repeated. A new spare starts in the old slot."""
    _control(run, "swap", {"rank": rank, "to": to}, wait=not no_wait)


def shrink(
    ranks: Annotated[
        list[int] | None, typer.Argument(metavar="[RANK]...", help="Ranks that leave.", show_default=False)
    ] = None,
    run: RunOption = None,
    to: Annotated[int, typer.Option("--to", metavar="N", help="Number of ranks that stay.", show_default=False)] = 0,
    no_wait: _NoWait = False,
) -> None:
    """Continue with fewer ranks. This begins at the next step boundary, so no step is repeated.

    Name the ranks that leave, or the number that stays (--to). With a rank its whole model replica leaves. The slots
    become spares, and the world stays at that size until rackctl grow.
    """
    _control(run, "shrink", {"ranks": ranks or [], "to": to}, wait=not no_wait)


def grow(
    run: RunOption = None,
    to: Annotated[
        int,
        typer.Option(
            "--to", metavar="N", help="Number of ranks. Default: as many as the job started with.", show_default=False
        ),
    ] = 0,
    no_wait: _NoWait = False,
) -> None:
    """Let the world grow again. Use it after rackctl shrink, or to try at once after growing has failed."""
    _control(run, "grow", {"to": to}, wait=not no_wait)


def policy(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="[SPEC]", help="As rackrun --policy; cheapest: the default policy.", show_default=False),
    ] = None,
    run: RunOption = None,
    weights: Annotated[
        str | None, typer.Option(metavar="WHAT=N,..", help="As rackrun --policy-weights.", show_default=False)
    ] = None,
) -> None:
    """Show or change the policy. It decides what is done after a failure. What you do not give stays as it is."""
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
        kind = UsageError if answer.refusal in _YOURS else ControlRefused
        raise kind(f"{answer.text}.", remedy=answer.remedy)
    print(answer.text, flush=True)
