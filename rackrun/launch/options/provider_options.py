"""Parsing and checks of ``--provider`` and ``--acquire-timeout``."""

from __future__ import annotations

import msgspec

from rackrun.coordinator.user_code.local_racks import local
from rackrun.coordinator.user_code.provider_host import check
from rackrun.core.policy.choice import check_provider
from rackrun.errors import UsageError
from rackrun.protocol.policy_types import Rules

__all__ = ["TIMEOUT_S", "ProviderOptions", "provider"]

TIMEOUT_S = 3600.0
_LOCAL = "rackrun.coordinator.user_code.local_racks:local"


class ProviderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The provider options."""

    spec: str = ""
    """``module:function`` or ``module:function:ARGS``; "": none."""
    expected_s: float | None = None
    timeout_ms: int = int(TIMEOUT_S * 1e3)


def provider(what: str, timeout_s: float | None, rules: Rules) -> ProviderOptions:
    """Return the provider options: ``local[:ARGS]``, or a user's provider, which is loaded once in a process of its
    own. Raises UsageError."""
    if not what:
        if timeout_s is not None:
            raise UsageError("--acquire-timeout is given without --provider.", remedy="say who is to give racks.")
        check_provider(rules, what)
        return ProviderOptions()
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    if not 0 < timeout_s < 1e7:
        raise UsageError(f"--acquire-timeout {timeout_s:g} is no time to wait.", remedy="give seconds, more than 0.")
    kind, _, arguments = what.partition(":")
    if kind != "local":
        if not kind or not arguments.partition(":")[0]:
            raise UsageError(
                f"--provider {what!r} names no provider.", remedy="give local, MODULE:FUNCTION or MODULE:FUNCTION:ARGS."
            )
        return ProviderOptions(spec=what, expected_s=check(what), timeout_ms=int(timeout_s * 1e3))
    try:
        expected_s = local(arguments).expected_s
    except ValueError as error:
        raise UsageError(f"--provider {what!r}: {error}.", remedy="for example local:racks=2,after=5.") from error
    spec = f"{_LOCAL}:{arguments}" if arguments else _LOCAL
    return ProviderOptions(spec=spec, expected_s=expected_s, timeout_ms=int(timeout_s * 1e3))
