"""Lightning is installed under two names, ``lightning`` and ``pytorch_lightning``, with classes of their own.

The adapter's classes are mix-ins; they are put together with the classes of the package that a script uses.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from rackrun.errors import UsageError

__all__ = ["BOTH", "LightningPackage", "package_in_use", "package_of"]


@dataclass(frozen=True)
class LightningPackage:
    """The names of one of the two packages: of its Trainer's part, and of Fabric's."""

    pytorch: str
    fabric: str

    def part(self, path: str) -> Any:
        """Return the module ``path`` of the Trainer's part, such as ``"strategies.ddp"``."""
        return importlib.import_module(f"{self.pytorch}.{path}")

    def fabric_part(self, path: str) -> Any:
        """Return the module ``path`` of Fabric's part."""
        return importlib.import_module(f"{self.fabric}.{path}")

    @property
    def version(self) -> str:
        """The version of the package."""
        return str(importlib.import_module(self.pytorch).__version__)

    @property
    def is_installed(self) -> bool:
        """Whether the package can be imported."""
        return importlib.util.find_spec(self.pytorch.partition(".")[0]) is not None

    def has(self, thing: Any) -> bool:
        """Whether ``thing`` is of a class of this package, or of one derived from such a class."""
        roots = (f"{self.pytorch}.", f"{self.fabric}.")
        return any(cls.__module__.startswith(roots) for cls in type(thing).__mro__)


BOTH = (
    LightningPackage("lightning.pytorch", "lightning.fabric"),
    LightningPackage("pytorch_lightning", "lightning_fabric"),
)


def package_of(trainer: Any) -> LightningPackage:
    """Return the package of a Trainer."""
    return next(package for package in BOTH if package.has(trainer))


def package_in_use(*, fabric: bool = False) -> LightningPackage:
    """Return the package whose Trainer, or whose Fabric, the script has imported; the first that is installed where it
    has imported none. Raises `UsageError` if none is installed."""
    for package in BOTH:
        if (package.fabric if fabric else package.pytorch) in sys.modules:
            return package
    found = next((package for package in BOTH if package.is_installed), None)
    if found is None:
        raise UsageError(
            "rackrun.lightning needs lightning, which is not installed.", remedy="pip install 'rackrun[lightning]'."
        )
    return found
