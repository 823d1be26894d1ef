"""Rack files: short where racks are alike, and every mistake is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rackrun.topology.model.errors import RackFileError
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import CliqueId, Topology

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "racks"


def read(folder: Path, text: str) -> Topology:
    path = folder / "rack.yaml"
    path.write_text(text)
    return read_rack_file(path)


@pytest.mark.parametrize(
    ("name", "racks", "trays", "gpus", "cliques"),
    [("gb200-nvl72", 1, 18, 72, 1), ("two-gb200-nvl72", 2, 36, 144, 2), ("hgx-h100", 1, 4, 32, 4), ("cpu", 1, 1, 5, 1)],
)
def test_the_examples_are_what_they_say(name: str, racks: int, trays: int, gpus: int, cliques: int) -> None:
    topology = read_rack_file(EXAMPLES / f"{name}.yaml")
    assert (len(topology.racks), len(topology.trays), len(topology.seats)) == (racks, trays, gpus)
    assert len({seat.clique for seat in topology.seats}) == cliques
    assert read_rack_file(EXAMPLES / f"{name}.yaml").content_id == topology.content_id, (
        "what is made up is the same again"
    )


def test_a_tray_of_gb200_has_two_gpus_at_each_cpu_and_a_card_for_each() -> None:
    gpus = read_rack_file(EXAMPLES / "gb200-nvl72.yaml").racks[0].trays[3].gpus
    assert [(gpu.numa, gpu.cpus, gpu.nics) for gpu in gpus] == [
        (0, "0-71", ("mlx5_0",)), (0, "0-71", ("mlx5_1",)), (1, "72-143", ("mlx5_3",)), (1, "72-143", ("mlx5_4",)),
    ]  # fmt: skip


def test_a_rack_may_be_cut_into_cliques(tmp_path: Path) -> None:
    topology = read(
        tmp_path,
        """
format: 1
racks:
  - serial: a
    trays: 6
    nvlink: {domain: d, cliques: [{id: 1, trays: [0-2]}, {id: 2, trays: ["3", 4]}]}
""",
    )
    of = {seat.tray.index: seat.clique for seat in topology.seats}
    assert of == {**dict.fromkeys(range(3), CliqueId("d", 1)), 3: CliqueId("d", 2), 4: CliqueId("d", 2),
                  5: CliqueId("host:tray-05", 0)}  # fmt: skip


def test_trays_and_gpus_may_be_named_one_by_one(tmp_path: Path) -> None:
    topology = read(
        tmp_path,
        """
format: 1
trays: {gpus: 2}
racks:
  - serial: a
    trays:
      - {name: left, host: node7, slot: 11, serial: T1, gpus: [{uuid: GPU-1, bdf: "0000:01:00.0"}, {uuid: GPU-2, numa: 1}]}
      - {gpus: 1}
      - {}
""",
    )
    left, one, two = topology.racks[0].trays
    assert (left.name, left.host, left.slot, left.serial) == ("left", "node7", 11, "T1")
    assert [(gpu.uuid, gpu.bdf, gpu.numa) for gpu in left.gpus] == [("GPU-1", "0000:01:00.0", None), ("GPU-2", "", 1)]
    assert (one.name, len(one.gpus), len(two.gpus)) == ("tray-01", 1, 2)


MISTAKES = [
    ("", "is empty", ""),
    ("format: [", ":1: no YAML", "mend"),
    ("format: 2\nracks: [{serial: a, trays: 1}]", "not of format 1", "newer release"),
    ("racks: [{serial: a, trays: 1}]", ":1: the file has no 'format'", "add format"),
    ("format: 1\nrakcs: []", ":2: the file has no field 'rakcs'", "did you mean 'racks'?"),
    ("format: 1\nracks: []", "0 racks", "1 to"),
    ("format: 1\nracks:\n  - serial: a", ":3: rack 0 has no trays", "trays: 18"),
    ("format: 1\nracks:\n  - serial: a\n    trays: 0", ":4: 'trays' of rack 0 is 0", "give 1 to"),
    ("format: 1\nracks:\n  - serial: a\n    trays: many", ":4: 'trays' of rack 0 is 'many'", "whole number"),
    ("format: 1\nracks:\n  - serial: a\n    trays: {count: 2, gpus: 4, numa: [0, 1]}", "'numa' has 2 entries for 4", "each GPU"),
    ("format: 1\nracks:\n  - serial: a\n    trays: {count: 2, gpus: 999}", "is 999", "give 1 to 64"),
    ("format: 1\nracks:\n  - {serial: a, trays: 1, serial: b}", ":3: 'serial' is there twice", "keep one"),
    ("format: 1\nracks:\n  - {serial: a, trays: 1}\n  - {serial: a, trays: 1}", "the chassis serial a is there twice", "its own"),
    ("format: 1\nracks:\n  - serial: a\n    trays: [{gpus: [{uuid: X}]}, {gpus: [{uuid: X}]}]", "the GPU UUID X is there twice", "its own"),
    ("format: 1\nracks:\n  - serial: a\n    trays: [{gpus: [{numa: 1}]}]", ":4: GPU 0 in 'gpus' of tray 0 has no 'uuid'", "add uuid"),
    ("format: 1\nracks:\n  - serial: a\n    trays: [{name: a/b}]", "is 'a/b'", "letters"),
    ("format: 1\nracks:\n  - {serial: a, trays: 2, nvlink: {domain: d}}", ":3: 'nvlink' of rack 0 has no 'clique'", "add clique"),
    ("format: 1\nracks:\n  - {serial: a, trays: 2, nvlink: rack}", "is 'rack'", "`tray`"),
    ("format: 1\nracks:\n  - {serial: a, trays: 2, nvlink: {domain: d, cliques: [{id: 1, trays: [0-2]}]}}", "'0-2'", "0 to 1"),
    ("format: 1\nracks: 3", ":2: 'racks' of the file is '3'", "a list"),
    ("format: 1\nracks: [3]", ":2: rack 0 is '3'", "mapping of: serial"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what", "remedy"), MISTAKES, ids=[what for _, what, _ in MISTAKES])
def test_a_mistake_is_told_with_its_line_and_a_remedy(text: str, what: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(RackFileError) as error:
        read(tmp_path, text)
    assert str(tmp_path / "rack.yaml") in error.value.what
    assert what in error.value.what
    assert remedy in error.value.remedy


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"a: \x00"])
def test_a_file_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "rack.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RackFileError):
        read_rack_file(path)


# -- what is wrong with the whole, and domains over racks
TWICE = [
    ("  - {serial: a, trays: [{name: x}]}\n  - {serial: b, trays: [{name: y}, {name: x}]}\n", 4, "tray name x"),
    ("  - {serial: a, trays: 1}\n\n  - {serial: a, trays: 1}\n", 5, "chassis serial a"),
    (
        "  - serial: a\n    trays:\n      - {gpus: [{uuid: GPU-1}]}\n      - gpus:\n          - {uuid: GPU-1}\n",
        7,
        "GPU UUID GPU-1",
    ),
    (
        "  - serial: a\n    trays: [{serial: s}, {}]\n  - serial: b\n    trays:\n      - {serial: s}\n",
        7,
        "tray serial s",
    ),
]


@pytest.mark.parametrize(("racks", "line", "what"), TWICE)
def test_what_does_not_go_together_names_a_line_too(racks: str, line: int, what: str, tmp_path: Path) -> None:
    path = tmp_path / "rack.yaml"
    path.write_text(f"format: 1\nracks:\n{racks}")
    with pytest.raises(RackFileError) as error:
        read_rack_file(path)
    assert str(error.value).startswith(f"{path}:{line}: the {what} is there twice")


def test_a_domain_may_reach_over_two_racks() -> None:
    """NVL36x2: each rack has half of it; their trays are the racks' own."""
    rack = read_rack_file(Path(__file__).resolve().parents[3] / "examples" / "racks" / "nvl36x2.yaml")
    assert (len(rack.racks), len(rack.trays), len(rack.seats)) == (2, 18, 72)
    assert len({seat.clique for seat in rack.seats}) == 1
    assert len({seat.rack.serial for seat in rack.seats}) == 2
