"""What the script keeps in attributes of all objects that a framework calls, as one text for each moment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rackrun.frameworks.own_attributes import OwnAttributes

__all__ = ["ScriptAttributes"]


class ScriptAttributes:
    """The attributes of those of ``objects`` whose classes the script has written. Every process has the same objects,
    in the same order."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._of_objects = [one for one in map(OwnAttributes, objects) if one.may_change]

    @property
    def may_change(self) -> bool:
        """Whether there is such an object."""
        return bool(self._of_objects)

    def changed(self) -> str:
        """Return what has changed in the objects since the script has built them, for `restore` in any process."""
        return json.dumps([one.changed() for one in self._of_objects])

    def restore(self, text: str) -> None:
        """Set what `changed` has returned, in this process or another."""
        for one, its_text in zip(self._of_objects, json.loads(text), strict=True):
            one.restore(its_text)
