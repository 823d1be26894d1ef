"""Decide which plans need each tray on a host of its own, and check that a command allows it.

The hosts are those of `rackrun.chaos.testbed.network.hosts`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.base.job_command import options_of
from rackrun.chaos.faults.fault_row import Need
from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.table.fault_table import needs_of, row_of
from rackrun.chaos.plan.definition import Plan, faults_of
from rackrun.chaos.testbed.network.hosts import TRAYS_MAX
from rackrun.errors import UsageError

__all__ = ["check_hosts", "hosts_needed", "links_needed", "trays_of"]

_OURS = (
    "--nnodes",
    "--node-rank",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-backend",
    "--standalone",
    "--local-addr",
    "--token-file",
    "--rack",
)


def hosts_needed(plan: Plan) -> bool:
    """Whether the plan has a fault of the network, for which each tray needs a host of its own."""
    return Need.HOSTS in needs_of(faults_of(plan))


def links_needed(plan: Plan) -> bool:
    """Whether the plan has a bad link, for which a proxy has to stand before the coordinator."""
    return Need.PROXY in needs_of(faults_of(plan))


def check_hosts(plan: Plan, command: Sequence[str]) -> None:
    """Raise `UsageError` for a plan that needs hosts of its own for the trays and cannot have them."""
    if not hosts_needed(plan):
        return
    for fault in faults_of(plan):
        if Need.EXTRA_PROCESSES in row_of(fault).needs(fault):
            raise Unsupported(
                f"{name_of(fault)} and faults of the network cannot be in one plan: what it starts has no host.",
                remedy="make two plans of it.",
            )
    trays_of(command)


def trays_of(command: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of trays, and the command without its ``--trays`` option.

    Raises `UsageError` for a command whose trays cannot be on hosts of their own.
    """
    options = options_of(command)
    trays, rest = "", list(command)
    for index in reversed(range(len(options))):
        name, equals, value = options[index].partition("=")
        name = name.replace("_", "-")
        if name in _OURS:
            raise UsageError(
                f"{name} is chosen by the harness, which gives each tray a host of its own in this plan.",
                remedy="say --trays N instead.",
            )
        if name == "--trays":
            trays = trays or (value if equals else " ".join(options[index + 1 : index + 2]))
            del rest[index : index + 1 + (not equals)]
    if not trays.isdigit() or not 2 <= int(trays) <= TRAYS_MAX:
        raise UsageError(
            f"a network needs 2 to {TRAYS_MAX} trays, and this job has {trays or 1}.",
            remedy="say --trays N: each gets a host of its own.",
        )
    return int(trays), rest
