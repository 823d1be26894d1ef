"""Records which groups the script has made, so that a promoted spare finds its place in them.

Groups of the same size and description with disjoint members are a family, such as the rows of a mesh. A spare that
stood in one row and takes over a rank in another moves to that row. Where every group holds the whole world, the world
may change its size in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rackrun.errors import StepError

if TYPE_CHECKING:
    from rackrun.worker.membership.elastic_group import ElasticGroup

__all__ = ["GroupRegistry"]


class GroupRegistry:
    """All groups that the script has made in this world."""

    def __init__(self) -> None:
        self._made: list[tuple[tuple[int, ...], str]] = []
        """Ranks and description of every group that the script has made, in order, whether or not this rank is a
        member."""

    def add(self, ranks: Sequence[int], desc: str) -> str:
        """Add a group, and return its key, which is the same on all of its members."""
        self._made.append((tuple(ranks), desc))
        return _key(ranks, desc, self._made.count((tuple(ranks), desc)))

    def part_of(self, size: int) -> str:
        """Return the name of a group that does not hold all ``size`` ranks, for a message; "" when there is none."""
        parts = [(ranks, desc) for ranks, desc in self._made if ranks != tuple(range(size))]
        return f"group {parts[0][1]!r} of ranks {', '.join(map(str, parts[0][0]))}" if parts else ""

    def resize(
        self, groups: Sequence[ElasticGroup], rank: int, size: int
    ) -> list[tuple[ElasticGroup, tuple[int, ...]]]:
        """Change all groups, which must hold the whole world, to ``size`` ranks with this process as ``rank``. Returns
        each group with its new ranks."""
        everyone = tuple(range(size))
        self._made = [(everyone, desc) for _, desc in self._made]
        for group in groups:
            group.become(everyone, rank)
            if group.key != "world":
                group.key = _key(everyone, group.group_desc, int(group.key.rpartition("/")[2]))
        return [(group, everyone) for group in groups]

    def fits(self, groups: Sequence[ElasticGroup], rank: int) -> bool:
        """Whether this process can take over ``rank`` with the groups that it has built as another rank.

        For each of its groups there must be one of the same family that holds ``rank``, and ``rank`` must be in no
        others.
        """
        mine = [group for group in groups if group.key != "world"]
        kin = [self._counterpart(group, rank) for group in mine]
        return None not in kin and len(kin) == sum(rank in ranks for ranks, _ in self._made)

    def promote(self, groups: Sequence[ElasticGroup], rank: int) -> list[tuple[ElasticGroup, tuple[int, ...]]]:
        """Give this process the place of ``rank`` in each of its groups, and return the groups, except the world's,
        with their new ranks. Raises `StepError` when a group has no counterpart with ``rank``."""
        moved: list[tuple[ElasticGroup, tuple[int, ...]]] = []
        for group in groups:
            if group.key == "world":
                group.become(group.ranks, rank)
                continue
            kin = self._counterpart(group, rank)
            if kin is None:
                raise StepError(
                    f"rank {rank} is in no group like {group.group_desc!r} {list(group.ranks)}, so a spare cannot take its place.",
                    remedy="make groups that cover all ranks (a DeviceMesh does).",
                )
            group.become(kin, kin.index(rank))
            group.key = _key(kin, group.group_desc, int(group.key.rpartition("/")[2]))
            moved.append((group, kin))
        return moved

    def _counterpart(self, group: ElasticGroup, rank: int) -> tuple[int, ...] | None:
        """Return the ranks of the group of the same disjoint family as ``group`` that holds ``rank``; None when there
        is none."""
        for ranks, desc in self._made:
            like = desc == group.group_desc and len(ranks) == len(group.ranks)
            if like and rank in ranks and (ranks == group.ranks or not set(ranks) & set(group.ranks)):
                return ranks
        return None


def _key(ranks: Sequence[int], desc: str, turn: int) -> str:
    """Return a group's key: the same on every member, and on a spare that takes over a member. torch's own name is not,
    because it counts per process."""
    return f"{desc}/{'-'.join(map(str, ranks))}/{turn}"
