"""Who has not come is named."""

from __future__ import annotations

import pytest

from rackrun.launch.run.missing_hosts import who_is_missing

HERE = [("tray-00", "head"), ("tray-02", "n7")]


@pytest.mark.parametrize(
    ("here", "wanted", "expected", "told"),
    [
        (HERE, 2, (), ""),
        (HERE, 4, (), "waiting for hosts: 2 of 4 trays are here: tray-00 (head), tray-02 (n7); missing: 2 more"),
        (
            HERE, 4, ("tray-00", "tray-01", "tray-02", "tray-03"),
            ("waiting for hosts: 2 of 4 trays are here: tray-00 (head), tray-02 (n7); "
             "missing: tray-01 (--node-rank 1), tray-03 (--node-rank 3)"),
        ),
        ([], 2, ("a7", "a8"), "waiting for hosts: 0 of 2 trays are here: nobody; missing: a7, a8"),
    ],
)  # fmt: skip
def test_who_is_here_and_who_is_missing(
    here: list[tuple[str, str]], wanted: int, expected: tuple[str, ...], told: str
) -> None:
    assert who_is_missing(here, wanted, expected, 1) == told


def test_a_host_of_several_trays_is_one_node_rank() -> None:
    assert "tray-05 (--node-rank 2)" in who_is_missing([], 6, ("tray-05",), 2)
