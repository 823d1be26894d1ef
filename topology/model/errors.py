"""What may be wrong with a topology, or with where it is read from.

::

    RackrunError
    +-- UsageError
        +-- TopologyError            yours: a rack that cannot be
            +-- RackFileError        a rack file that does not parse: file, line, field
            +-- SourcesDisagree      two sources contradict each other about one device
            +-- DoesNotFit           no place for a mesh: too few healthy slots, or cut the wrong way
"""

from __future__ import annotations

from rackrun.errors import UsageError

__all__ = ["DoesNotFit", "RackFileError", "SourcesDisagree", "TopologyError"]


class TopologyError(UsageError):
    """A rack that cannot be."""


class RackFileError(TopologyError):
    """A rack file that does not parse."""


class SourcesDisagree(TopologyError):
    """Two sources contradict each other about one device. Both are named; neither is chosen."""


class DoesNotFit(TopologyError):
    """A mesh that finds no place: too few usable slots, or none of its bound groups' size in one clique."""
