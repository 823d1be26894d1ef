"""The axes of ``run.mesh``: the script's, or the launcher's, but not two different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rackrun.errors import UsageError
from rackrun.worker.batch.mesh_axes import MESH_VARIABLE, Axes, axes_of, fitted, unfit_because
from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended, say
from tests.worker.scripts import adam, ddp, fit

BY_LAUNCHER = {MESH_VARIABLE: "dp=4,tp=2"}


@pytest.mark.parametrize(
    ("script", "environment", "axes"),
    [
        (None, {}, ()),
        ({"dp": -1, "tp": 4}, {}, (("dp", 2), ("tp", 4))),
        (None, BY_LAUNCHER, (("dp", 4), ("tp", 2))),
        ({"dp": -1, "tp": 2}, BY_LAUNCHER, (("dp", 4), ("tp", 2))),
    ],
)
def test_no_axis_stays_open(script: dict[str, int] | None, environment: dict[str, str], axes: tuple[Any, ...]) -> None:
    assert axes_of(script, 8, environment) == axes


@pytest.mark.parametrize("script", [{"dp": 8}, {"tp": 2, "dp": 4}, {"dp": -1, "tp": 4}])
def test_two_different_meshes_are_refused_with_both_named(script: dict[str, int]) -> None:
    asked = ",".join(f"{name}={size}" for name, size in script.items())
    with pytest.raises(UsageError, match=rf"mesh {asked}, .* --mesh dp=4,tp=2 .*Remedy: give the same axes"):
        axes_of(script, 8, BY_LAUNCHER)


# -- a world of another size -------------------------------------------------------------------------------------------
RACK = (("dp", 16), ("tp", 4))
HYBRID = (("dp_replicate", 2), ("dp_shard", 4))


@pytest.mark.parametrize(
    ("axes", "ranks", "fit"),
    [
        (RACK, 64, RACK),
        (RACK, 60, (("dp", 15), ("tp", 4))),
        (HYBRID, 4, (("dp_replicate", 1), ("dp_shard", 4))),
        (HYBRID, 12, (("dp_replicate", 3), ("dp_shard", 4))),
        ((("tp", 2), ("fsdp", 4)), 6, (("tp", 2), ("fsdp", 3))),
        ((), 7, ()),
    ],
)
def test_the_first_data_axis_has_what_the_others_leave(axes: Axes, ranks: int, fit: Axes) -> None:
    assert fitted(axes, ranks) == fit


@pytest.mark.parametrize(("axes", "ranks"), [(RACK, 62), (RACK, 2), ((("tp", 4),), 8)])
def test_ranks_that_do_not_fit_are_refused(axes: Axes, ranks: int) -> None:
    with pytest.raises(UsageError, match=rf"cannot be fitted to {ranks} ranks"):
        fitted(axes, ranks)


def test_a_spare_that_starts_in_such_a_world_has_its_axes() -> None:
    assert axes_of({"dp": -1, "tp": 2}, 6, BY_LAUNCHER, changed=True) == (("dp", 3), ("tp", 2))
    assert axes_of({"dp": 4, "tp": 2}, 6, {}, changed=True) == (("dp", 3), ("tp", 2))


@pytest.mark.parametrize(
    ("axes", "script", "because"),
    [
        (RACK, {"dp": -1, "tp": 4}, ""),
        ((), None, ""),
        (RACK, None, ""),
        ((("dp", 2), ("pp", 2)), None, "stages of a pipeline"),
        ((("tp", 2), ("ep", 2)), None, "no axis of its mesh (tp, ep) splits the data"),
        (HYBRID, {"dp_replicate": 2, "dp_shard": -1}, "leaves axis dp_shard open"),
    ],
)
def test_what_holds_a_script_to_its_number_of_ranks(axes: Axes, script: dict[str, int] | None, because: str) -> None:
    found = unfit_because(axes, script)
    assert because in found
    assert bool(found) == bool(because)


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=x", "=4", "dp=4,dp=2", "dp=4,", "dp=0", "dp=-1"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not AXIS=SIZE"):
        axes_of(None, 8, {MESH_VARIABLE: text})


def test_the_launchers_mesh_is_the_runs_and_all_are_ready_with_it(
    train: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MESH_VARIABLE, "dp=1,tp=2")

    def main(run: Run) -> None:
        say(mesh=dict(zip(run.mesh.mesh_dim_names or (), run.mesh.shape, strict=True)))
        model = ddp(run)
        fit(run, model, adam(model), steps=3)

    ended = train(main, ranks=2, spares=1)
    assert ended.exit_code == 0, ended
    assert [said["mesh"] for said in ended.said.values()] == [{"dp": 1, "tp": 2}] * 2
    assert ended.ready.keys() >= {0, 1}, "and the spare, unless all is over before it is ready"
    assert {ready.mesh for ready in ended.ready.values()} == {(("dp", 1), ("tp", 2))}
