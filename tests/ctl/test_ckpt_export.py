"""What ``rackctl ckpt export`` writes is a state dict that any plain model takes, with the bits that the ranks held."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rackrun.ctl.ckpt.export_names import model_names
from rackrun.errors import UsageError
from rackrun.protocol import crash_points
from tests.ctl.saved import State, flip, model, save, shard_path, state

Rackctl = Callable[..., Any]
INDEX = "model.safetensors.index.json"


def loaded(path: Path) -> State:
    """As other tools load it: by the index."""
    where = json.loads((path / INDEX).read_text())["weight_map"]
    found = {name: tensor for file in sorted(set(where.values())) for name, tensor in load_file(path / file).items()}
    assert found.keys() == where.keys()
    return found


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(
        tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]) for name, tensor in found.items()
    )


def test_a_fresh_plain_model_takes_it_and_has_the_bits_of_the_ranks(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (4, 9):
        save(tmp_path, step)
    for step, chosen in ((9, []), (4, ["--number", 4])):
        said = rackctl("ckpt", "export", tmp_path, tmp_path / f"out-{step}", *chosen, "--json")
        assert said.code == 0
        assert (said.json["step"], said.json["left_out"]) == (step, 12)
        plain = model(seed=100)
        assert not same(plain.state_dict(), model(seed=step).state_dict())
        plain.load_state_dict(loaded(tmp_path / f"out-{step}"))
        assert same(plain.state_dict(), model(seed=step).state_dict())


def test_all_of_it_under_its_own_names_when_asked(tmp_path: Path, rackctl: Rackctl) -> None:
    save(tmp_path, 4)
    said = rackctl("ckpt", "export", tmp_path, tmp_path / "out", "--all", "--file-gb", 0.001)
    assert said.code == 0
    assert "step 4" in said.out
    assert same(loaded(tmp_path / "out"), state(4))


def test_of_several_tracked_modules_one_is_chosen(tmp_path: Path, rackctl: Rackctl) -> None:
    save(tmp_path, 1, held=state(1) | state(2, name="average"))
    said = rackctl("ckpt", "export", tmp_path, tmp_path / "out")
    assert said.code == 2
    assert "average, model" in said.err
    assert rackctl("ckpt", "export", tmp_path, tmp_path / "out", "--module", "teacher").code == 2
    assert rackctl("ckpt", "export", tmp_path, tmp_path / "out", "--module", "average").code == 0
    assert same(loaded(tmp_path / "out"), model(2).state_dict())


def test_names_that_no_elastic_job_gives_stay_as_they_are(tmp_path: Path, rackctl: Rackctl) -> None:
    foreign = {"layers.0.weight": torch.randn(7, 3), "module.x": torch.randn(5)}
    save(tmp_path, 1, held=foreign)
    assert rackctl("ckpt", "export", tmp_path, tmp_path / "out").code == 0
    assert same(loaded(tmp_path / "out"), foreign)
    assert rackctl("ckpt", "export", tmp_path, tmp_path / "again", "--module", "model").code == 2


def test_a_damaged_tensor_stops_it_and_nothing_is_left(tmp_path: Path, rackctl: Rackctl) -> None:
    store = save(tmp_path, 1)
    held = list(os.listdir(tmp_path))
    flip(shard_path(store, 1, 1), 5000)
    said = rackctl("ckpt", "export", tmp_path, tmp_path / "out", "--all")
    assert said.code == 1
    assert "CRC32C" in said.err
    assert os.listdir(tmp_path) == held


def test_an_interrupt_leaves_nothing(tmp_path: Path, rackctl: Rackctl, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    held = list(os.listdir(tmp_path))

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    crash_points.enable(interrupted)
    try:
        assert rackctl("ckpt", "export", tmp_path, tmp_path / "out").code not in (0, 2)
    finally:
        crash_points.enable(None)
    assert os.listdir(tmp_path) == held


def test_a_place_that_is_taken_or_cannot_be_made_is_bad_usage(tmp_path: Path, rackctl: Rackctl) -> None:
    save(tmp_path, 1)
    (tmp_path / "out").mkdir()
    for out in ("out", "no/where", "run"):
        assert rackctl("ckpt", "export", tmp_path, tmp_path / out).code == 2
    assert os.listdir(tmp_path / "out") == []


PATHS = st.lists(
    st.sampled_from(["0.weight", "module.bias", "a/b", "_orig_mod.x", "deep.module.y"]), min_size=1, unique=True
)


@given(PATHS, st.lists(st.sampled_from(["module.", "_orig_mod."]), max_size=3))
def test_wrappers_that_are_in_front_of_every_name_go_and_no_two_names_become_one(
    paths: list[str], wrappers: list[str]
) -> None:
    held = [f"m/param/{''.join(wrappers)}{path}" for path in paths] + ["optimizer/state/0/0/exp_avg", "m/state/x"]
    named = model_names(held)
    assert set(named) == set(held[: len(paths)])
    assert len(set(named.values())) == len(paths)
    for path, name in zip(paths, named.values(), strict=True):
        assert path.endswith(name)
        assert path == name or all(other.startswith(path.removesuffix(name)) for other in paths)


def test_parts_that_are_no_boxes_are_refused_because_only_their_model_can_join_them() -> None:
    with pytest.raises(UsageError, match="only the model can put them together"):
        model_names(["m/param/flat@0", "m/param/flat@1", "m/param/x"])


def test_the_former_option_generation_still_works_and_is_not_in_the_help(tmp_path: Path, rackctl: Rackctl) -> None:
    for step in (4, 9):
        save(tmp_path, step)
    for name, option in (("a", ["--generation", 4]), ("b", ["--generation=4"])):
        said = rackctl("ckpt", "export", tmp_path, tmp_path / name, *option, "--json")
        assert (said.code, said.json["number"], said.json["generation"]) == (0, 4, 4)
        assert said.err == "rackctl: --generation is deprecated: it is called --number now.\n"
    assert "--generation" not in rackctl("ckpt", "export", "--help").out
