"""The policy in force: first that of the command line, then that of the latest ``rackctl policy``."""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.policy.choice import check_provider, parse_policy, parse_weights
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rules, Rung, Weights

__all__ = ["ActivePolicy"]


@dataclass(slots=True)
class ActivePolicy:
    """The rules, weights and function that decide about failures."""

    rules: Rules = field(default_factory=Rules)
    weights: Weights = field(default_factory=Weights)
    function: str = ""
    """``module:function`` that is asked first; "": none."""

    @classmethod
    def of(cls, config: JobConfig) -> ActivePolicy:
        return cls(config.rules, config.weights, config.policy_function)

    def change(self, policy: str | None, weights: str | None, *, provider: str = "") -> None:
        """Change the policy, the weights or both; None: unchanged. Raises `rackrun.errors.UsageError`, and then changes
        nothing."""
        parsed = None if policy is None else parse_policy(policy)
        if parsed is not None:
            check_provider(parsed[0], provider)
        self.weights = self.weights if weights is None else parse_weights(weights)
        if parsed is not None:
            self.rules, self.function = parsed

    def changed(self, policy: str | None, weights: str | None, *, provider: str = "") -> ActivePolicy:
        """Return this policy after `change`. Raises `rackrun.errors.UsageError`."""
        other = ActivePolicy(self.rules, self.weights, self.function)
        other.change(policy, weights, provider=provider)
        return other

    def __str__(self) -> str:
        """Return the policy as options: ``--policy swap,wait --policy-weights goodput=1,cost=0,resilience=1``."""
        never = [f"no-{rung.value}" for rung in self.rules.never]
        named = [self._named(rung) for rung in self.rules.order] or never
        what = self.function or ",".join(named) or "cheapest"
        numbers = ",".join(f"{name}={getattr(self.weights, name):g}" for name in Weights.__struct_fields__)
        return f"--policy {what} --policy-weights {numbers}"

    def _named(self, rung: Rung) -> str:
        """Return a rung of the order as `rackrun.core.policy.choice.parse_rules` reads it."""
        meanwhile = self.rules.meanwhile if rung is Rung.ACQUIRE else ""
        return f"{rung.value}-{meanwhile}" if meanwhile else rung.value
