"""Errors of chaos plans and of what runs them.

::

    UsageError
    +-- PlanError        a plan that cannot be read, or means nothing: exit code 2
    +-- PlannerError     what `rackctl plan` is asked cannot be: exit code 2
    +-- Unsupported      this machine, or this job, cannot have that fault: exit code 2, with a remedy; never skipped in silence
"""

from __future__ import annotations

from rackrun.errors import UsageError

__all__ = ["NoTarget", "PlanError", "PlannerError", "Unsupported"]


class PlanError(UsageError):
    """A plan that cannot be read, or means nothing."""


class PlannerError(UsageError):
    """A fleet, a rate, a cost or a trace that cannot be planned with."""


class Unsupported(UsageError):
    """A fault that this machine or this job cannot have."""


class NoTarget(Exception):
    """Nothing in the job is what a target says, at this moment. The run's verdict is *unknown* then, never *true*."""
