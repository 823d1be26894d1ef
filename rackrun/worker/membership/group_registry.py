"""Which groups the script made, so that a promoted spare finds its new place in them.

Groups of one size and one description whose members are disjoint are a family: the rows of a mesh, say. A spare that stood
in one row and takes the place of a rank in another moves over to that row. Where all groups are of the whole world, the world
may change its size under them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rackrun.errors import StepError

if TYPE_CHECKING:
    from rackrun.worker.membership.elastic_group import ElasticGroup

__all__ = ["Families"]


class Families:
    def __init__(self) -> None:
        self._made: list[tuple[tuple[int, ...], str]] = []
        """Every group the script ever asked for, in order, member or not."""

    def add(self, ranks: Sequence[int], desc: str) -> str:
        """Returns the group's key."""
        self._made.append((tuple(ranks), desc))
        return _key(ranks, desc, self._made.count((tuple(ranks), desc)))

    def part_of(self, size: int) -> str:
        """A group that is not of all ``size`` ranks; "" when there is none."""
        parts = [(ranks, desc) for ranks, desc in self._made if ranks != tuple(range(size))]
        return f"group {parts[0][1]!r} of ranks {', '.join(map(str, parts[0][0]))}" if parts else ""

    def resize(
        self, groups: Sequence[ElasticGroup], rank: int, size: int
    ) -> list[tuple[ElasticGroup, tuple[int, ...]]]:
        """All groups are of the whole world, and go on with ``size`` ranks, this process as ``rank``. Returns all of them."""
        everyone = tuple(range(size))
        self._made = [(everyone, desc) for _, desc in self._made]
        for group in groups:
            group.become(everyone, rank)
            if group.key != "world":
                group.key = _key(everyone, group.group_desc, int(group.key.rpartition("/")[2]))
        return [(group, everyone) for group in groups]

    def fits(self, groups: Sequence[ElasticGroup], rank: int) -> bool:
        """Whether this process, built as another rank, can take the place of ``rank`` as it is: each of its groups has one that is to
        ``rank`` what it is to this process, and ``rank`` is in no others."""
        mine = [group for group in groups if group.key != "world"]
        kin = [self._kin(group, rank) for group in mine]
        return None not in kin and len(kin) == sum(rank in ranks for ranks, _ in self._made)

    def promote(self, groups: Sequence[ElasticGroup], rank: int) -> list[tuple[ElasticGroup, tuple[int, ...]]]:
        """Give this process the place of ``rank`` in each of its groups."""
        moved: list[tuple[ElasticGroup, tuple[int, ...]]] = []
        for group in groups:
            if group.key == "world":
                group.become(group.ranks, rank)
                continue
            kin = self._kin(group, rank)
            if kin is None:
                raise StepError(
                    f"rank {rank} is in no group like {group.group_desc!r} {list(group.ranks)}, so a spare cannot take its place.",
                    remedy="make groups that cover all ranks (a DeviceMesh does).",
                )
            group.become(kin, kin.index(rank))
            group.key = _key(kin, group.group_desc, int(group.key.rpartition("/")[2]))
            moved.append((group, kin))
        return moved

    def _kin(self, group: ElasticGroup, rank: int) -> tuple[int, ...] | None:
        """The ranks of the group that is to ``rank`` what ``group`` is to this worker: one of the same disjoint family."""
        for ranks, desc in self._made:
            like = desc == group.group_desc and len(ranks) == len(group.ranks)
            if like and rank in ranks and (ranks == group.ranks or not set(ranks) & set(group.ranks)):
                return ranks
        return None


def _key(ranks: Sequence[int], desc: str, turn: int) -> str:
    """The same on every member, and on a spare that takes a member's place: not torch's name, which counts per process."""
    return f"{desc}/{'-'.join(map(str, ranks))}/{turn}"
