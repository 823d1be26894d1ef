"""``rackrun --framework lightning``: gives every Trainer of a script the elastic strategy in place of ``"auto"`` or DDP."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from rackrun.errors import UsageError
from rackrun.frameworks.lightning.base.package import BOTH, LightningPackage, package_in_use
from rackrun.frameworks.lightning.elastic_strategy import strategy_class

__all__ = ["install"]

_NAMES: dict[str, dict[str, Any]] = {
    "auto": {},
    "ddp": {},
    "ddp_find_unused_parameters_false": {"find_unused_parameters": False},
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""The names of strategies that are replaced, with their arguments for DDP."""


def install() -> None:
    """Change the Trainers of the packages that the script may use. Raises `UsageError` if Lightning is not installed."""
    package_in_use()
    for package in _packages(_text_of_script()):
        _change(package)


def _packages(script: str) -> list[LightningPackage]:
    """Return the installed packages that ``script`` names; all, where it names none, as it may import them elsewhere."""
    installed = [one for one in BOTH if one.is_installed]
    named = [one for one in installed if one.pytorch in script or (one is BOTH[0] and "import lightning" in script)]
    return named or installed


def _text_of_script() -> str:
    path = Path(sys.argv[0])
    return path.read_text(errors="replace") if path.is_file() else ""


def _change(package: LightningPackage) -> None:
    trainer = package.part("trainer.trainer").Trainer
    stock = trainer.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["strategy"] = elastic(package, kwargs.get("strategy", "auto"))
        stock(self, *args, **kwargs)

    trainer.__init__ = init


def elastic(package: LightningPackage, strategy: Any) -> Any:
    """Return the elastic strategy in place of ``strategy``. Raises `UsageError` for a strategy that it cannot stand
    for."""
    cls = strategy_class(package)
    if isinstance(strategy, cls):
        return strategy
    if type(strategy) is package.part("strategies").DDPStrategy:
        return cls(**strategy._ddp_kwargs)
    if isinstance(strategy, str) and strategy in _NAMES:
        return cls(**_NAMES[strategy])
    raise UsageError(
        f"--framework lightning cannot stand for strategy={strategy!r}.",
        remedy='give Trainer(strategy="ddp"), or leave strategy= out; for FSDP2 convert the script (docs/convert_a_script.md).',
    )
