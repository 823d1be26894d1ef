"""The errors of chaos plans, and of the tools that run them.

::

    UsageError
    +-- PlanError        a plan cannot be read or makes no sense: exit code 2
    +-- PlannerError     `rackctl plan` is asked something impossible: exit code 2
    +-- Unsupported      this machine or this job cannot have the fault: exit code 2, with a remedy; never a silent skip
"""

from __future__ import annotations

from rackrun.errors import UsageError

__all__ = ["NoTarget", "PlanError", "PlannerError", "Unsupported"]


class PlanError(UsageError):
    """A chaos plan cannot be read or makes no sense."""


class PlannerError(UsageError):
    """The planner cannot work with a fleet, a rate, a cost or a trace."""


class Unsupported(UsageError):
    """This machine or this job cannot have a fault."""


class NoTarget(Exception):
    """No subject in the job matches a target at this moment. The run's verdict is then *unknown*, never *true*."""
