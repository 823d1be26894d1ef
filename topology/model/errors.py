"""Errors of a topology, and of the files and sources it is read from.

::

    RackrunError
    +-- UsageError
        +-- TopologyError            yours: an impossible rack
            +-- RackFileError        a rack file that does not parse: file, line, field
            +-- SourcesDisagree      two sources contradict each other about one device
            +-- DoesNotFit           no place for a mesh: too few usable slots, or no clique with enough of them
"""

from __future__ import annotations

from rackrun.errors import UsageError

__all__ = ["DoesNotFit", "RackFileError", "SourcesDisagree", "TopologyError"]


class TopologyError(UsageError):
    """The described rack is impossible."""


class RackFileError(TopologyError):
    """A rack file does not parse."""


class SourcesDisagree(TopologyError):
    """Two sources contradict each other about one device. The error names both; neither is used."""


class DoesNotFit(TopologyError):
    """A mesh does not fit: there are too few usable slots, or no clique has room for one of its bound groups."""
