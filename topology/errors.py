"""What may be wrong with a topology, or with where it is read from.

::

    RackrunError
    +-- UsageError
        +-- TopologyError            yours: a rack that cannot be
            +-- RackFileError        a rack file that does not parse: file, line, field
            +-- SourcesDisagree      two sources contradict each other about one device
"""

from __future__ import annotations

from rackrun.errors import UsageError

__all__ = ["RackFileError", "SourcesDisagree", "TopologyError"]


class TopologyError(UsageError):
    """A rack that cannot be."""


class RackFileError(TopologyError):
    """A rack file that does not parse."""


class SourcesDisagree(TopologyError):
    """Two sources contradict each other about one device. Both are named; neither is chosen."""
