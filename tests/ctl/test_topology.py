"""``rackctl topology``: what a rack file says, which rank would sit where, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

Rackctl = Callable[..., Any]
RACKS = Path(__file__).resolve().parents[2] / "examples" / "racks"
NVL72 = RACKS / "gb200-nvl72.yaml"


def test_64_of_72_train_and_two_trays_wait(rackctl: Rackctl) -> None:
    said = rackctl("topology", "show", NVL72, "--mesh", "dp=-1,tp=8", "--spares", 8, "--json")
    found = json.loads(said.out)
    assert said.code == 0
    assert found["slots"] == [f"tray-{tray:02}/{gpu}" for tray in range(16) for gpu in range(4)]
    assert set(found["spares"]) == {f"tray-{tray}/{gpu}" for tray in (16, 17) for gpu in range(4)}


def test_two_racks_are_filled_with_whole_groups(rackctl: Rackctl) -> None:
    said = rackctl("topology", "show", RACKS / "two-gb200-nvl72.yaml", "--mesh", "dp=-1,tp=16", "--spares", 8, "--json")
    slots = json.loads(said.out)["slots"]
    assert len(slots) == 128
    assert all(len({slot.partition("-tray")[0] for slot in slots[at : at + 16]}) == 1 for at in range(0, 128, 16))


def test_spares_are_those_of_rackrun_and_not_of_each_domain(rackctl: Rackctl) -> None:
    """Two racks of 72: `rackrun --spares 8` keeps 8 of 144 slots."""
    two = RACKS / "two-gb200-nvl72.yaml"
    said = rackctl("topology", "show", two, "--mesh", "dp=-1", "--spares", 8, "--json").json
    assert (len(said["slots"]), len(said["spares"])) == (136, 8)
    assert len({slot.partition("-tray")[0] for slot in said["spares"]}) == 2, "as evenly as they go"
    joined = rackctl("topology", "show", RACKS / "nvl36x2.yaml", "--mesh", "dp=-1,tp=8", "--spares", 8, "--json").json
    assert (len(joined["slots"]), len(joined["spares"])) == (64, 8)


def test_the_picture_is_text_or_svg(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("topology", "show", NVL72, "--mesh", "dp=-1", "--spares", 8)
    assert "tray-15" in said.out
    assert "spare" in said.out
    out = tmp_path / "rack.svg"
    assert rackctl("topology", "show", NVL72, "--svg", out).code == 0
    assert ET.fromstring(out.read_text()).tag.endswith("svg")


def test_a_rank_is_explained(rackctl: Rackctl) -> None:
    said = rackctl("topology", "explain", 17, NVL72, "--mesh", "dp=-1,tp=8", "--spares", 8)
    assert "rank 17 (dp 2, tp 1) sits on tray-04/1" in said.out
    assert "If it is lost: tray-1" in said.out


def test_a_rack_that_is_well_is_checked(rackctl: Rackctl) -> None:
    said = rackctl("topology", "check", NVL72, "--mesh", "dp=-1,tp=8", "--spares", 8)
    assert (said.code, said.out.strip()) == (0, "1 racks, 18 trays, 72 GPUs, 1 cliques")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("check", NVL72, "--mesh", "dp=2,tp=64"), "2 groups of 64 ranks (tp) must each sit inside one clique"),
        (("check", RACKS / "hgx-h100.yaml", "--mesh", "dp=1,tp=16"), "16"),
        (("show", NVL72, "--mesh", "dp"), "is not AXIS=SIZE"),
        (("show", NVL72, "--mesh", "dp=-1,tp=-1"), "a second -1"),
        (("show", NVL72, "--mesh", "dp=2,dp=2"), "there twice"),
        (("show", NVL72, "--mesh", "dp=-1", "--bound", "ep"), "'ep' is bound"),
        (("explain", 99, NVL72, "--mesh", "dp=-1"), "no rank 99"),
        (("show", "nowhere.yaml"), "cannot be read"),
        (("show", NVL72, "--svg", "/nowhere/rack.svg"), "/nowhere/rack.svg"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(arguments: tuple[object, ...], what: str, rackctl: Rackctl) -> None:
    said = rackctl("topology", *arguments)
    assert said.code == 2, said
    assert what in said.err
    assert "Remedy" in said.err


def test_a_machine_without_a_driver_is_told_so(rackctl: Rackctl) -> None:
    said = rackctl("topology", "check")
    assert said.code == 1
    assert "nothing can be read of this tray" in said.out
