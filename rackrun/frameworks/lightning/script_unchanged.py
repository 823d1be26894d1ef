"""``rackrun --framework lightning``: gives every Trainer of a script the elastic strategy in place of ``"auto"`` or DDP."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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
    """Change the Trainer of each package, at once if it is imported and else when the script, or another module, imports
    it. Raises `UsageError` if Lightning is not installed."""
    package_in_use()
    waiting = {f"{package.pytorch}.trainer.trainer": package for package in BOTH}
    for name in waiting.keys() & sys.modules.keys():
        _change(sys.modules[name], waiting.pop(name))
    sys.meta_path.insert(0, _ChangeWhenImported(waiting))


class _ChangeWhenImported(MetaPathFinder):
    """Changes the Trainer of a package when its module has been imported. ``waiting``: module -> package."""

    def __init__(self, waiting: dict[str, LightningPackage]) -> None:
        self._waiting = waiting

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002 - as Python calls it
        """Return the spec that the other finders find."""
        package = self._waiting.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if package is not None else None
        if spec is None or spec.loader is None or package is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _change(module, package)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change(module: Any, package: LightningPackage) -> None:
    """Let each Trainer of ``module`` take the elastic strategy."""
    stock = module.Trainer.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["strategy"] = elastic(package, kwargs.get("strategy", "auto"))
        stock(self, *args, **kwargs)

    module.Trainer.__init__ = init


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
