"""The cost of a swap on GPUs: the model's shape, its public points, and its honesty."""

from __future__ import annotations

import math

import msgspec
import pytest

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.swap_model import stage_costs
from rackrun.chaos.planner.swap_model.predict_swap import COLD, WARM, SwapScenario, predict_swap
from rackrun.chaos.planner.swap_model.stage_costs import FIGURES, GROWN_BY_S, SHRUNK_BY_S, between, built_s, cold_s
from rackrun.worker.communicators.gate_tree import FANOUT, blocks_of
from rackrun.worker.communicators.on_demand import EAGER_RANKS

WHOLE, WHOLE_COLD = "whole swap, spare warm", "whole swap, spare cold"


def question(ranks: int = 64, **changed: object) -> SwapScenario:
    fields = {"groups": {"tp": 8, "dp": ranks // 8}, "state_bytes": 12.7e9, **changed}
    return SwapScenario(ranks=ranks, **fields)  # type: ignore[arg-type]


# -- it adds up
@pytest.mark.parametrize("edge", ["low", "likely", "high"])
def test_the_whole_is_the_sum_of_the_stages_that_count(edge: str) -> None:
    found = predict_swap(question())
    parts = [getattr(row, edge) for row in found.rows if row.counts]
    assert len(parts) == 5
    assert getattr(found.row(WHOLE), edge) == pytest.approx(sum(parts))
    difference = getattr(found.row(COLD), edge) - getattr(found.row(WARM), edge)
    assert getattr(found.row(WHOLE_COLD), edge) - getattr(found.row(WHOLE), edge) == pytest.approx(difference)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024, 10_240])
def test_likely_lies_between_its_bounds_in_every_row(ranks: int) -> None:
    for row in predict_swap(question(ranks, groups={"dp": ranks})).rows:
        assert math.isnan(row.likely) or 0 <= row.low <= row.likely <= row.high


def test_no_stage_takes_less_with_more_ranks() -> None:
    before = predict_swap(question(16, groups={"dp": 16}))
    for ranks in (32, 64, 256, 1024, 8192):
        found = predict_swap(question(ranks, groups={"dp": ranks}))
        for row in found.rows:
            if not row.stage.startswith("shrink"):
                assert row.likely >= before.row(row.stage).likely, (row.stage, ranks)
        before = found


# -- what it must agree with
@pytest.mark.parametrize(
    ("size", "low", "high"), [(8, 0.3, 0.8), (64, 0.5, 1.5), (1024, 2.0, 5.0), (10_000, 10.0, 30.0)]
)
def test_a_build_lies_in_the_ranges_that_public_points_leave(size: int, low: float, high: float) -> None:
    assert low <= built_s(FIGURES.build.likely, FIGURES.build_growth.likely, size) <= high


def test_a_cold_build_of_eight_is_that_of_the_published_log() -> None:
    """NVIDIA/nccl #1646: 0.4 + 0.6 + 1.1 + 0.4 s for 8 B200, kernels loaded apart."""
    cold = built_s(FIGURES.build.likely, FIGURES.build_growth.likely, 8)
    cold += cold_s(FIGURES.first_build.likely, FIGURES.first_build_doubling.likely, 8)
    assert cold == pytest.approx(2.5, rel=0.2)


def test_between_published_points_it_goes_straight_and_beyond_them_it_says_nothing() -> None:
    assert between(GROWN_BY_S, 8) == between(GROWN_BY_S, 32) == (1.73, 1.73)
    assert between(GROWN_BY_S, 1024) == (4.19, 4.19)
    low, high = between(SHRUNK_BY_S, 724) or (0.0, 0.0)  # half way, by the logarithm
    assert low == 2.0
    assert high == pytest.approx(3.2, abs=0.01)
    assert between(SHRUNK_BY_S, 1025) is None
    row = predict_swap(question(4096, groups={"dp": 4096})).row("shrink and grow instead")
    assert math.isnan(row.likely)
    assert "nobody has published it for 4096 ranks" in row.where


def test_a_group_of_one_is_no_communicator() -> None:
    assert built_s(0.45, 0.03, 1) == cold_s(1.7, 0.2, 1) == 0.0
    alone = predict_swap(question(2, groups={"tp": 1}))
    assert alone.row(WARM).likely == FIGURES.host_pair.likely
    assert alone.row(COLD).likely == alone.row(WARM).likely
    assert not any(row.stage.startswith("shrink") for row in alone.rows)


# -- what a choice changes
def test_a_gate_on_hosts_saves_the_build_of_a_group_as_large_as_the_world() -> None:
    host, gpu = (
        predict_swap(question(8192, groups={"dp": 128}, gate=gate)).row(WARM).likely for gate in ("host", "gpu")
    )
    saved = built_s(FIGURES.build.likely, FIGURES.build_growth.likely, 8192) + 8191 * FIGURES.host_pair.likely
    assert gpu - host == pytest.approx(saved)
    assert saved > 10


@pytest.mark.parametrize(
    ("ranks", "connections"),
    [(2, 1), (32, 31), (33, 32 + 31 + 1), (128, 127 + 31 + 3), (129, 31 + 4), (1024, 62), (1025, 63)],
)
def test_hosts_connect_all_pairs_of_a_small_world_and_the_blocks_of_a_large_one(ranks: int, connections: int) -> None:
    assert question(ranks, groups={"dp": 1}).on_hosts() == connections
    if ranks > FANOUT:
        tree = sum(len(block.ranks) - 1 for block in blocks_of(0, ranks, FANOUT))
        assert connections == tree + (ranks - 1 if ranks <= EAGER_RANKS else 0)


def test_the_model_knows_what_the_workers_do() -> None:
    assert (stage_costs.EAGER_RANKS, stage_costs.GATE_FANOUT) == (EAGER_RANKS, FANOUT)


def test_groups_built_at_once_take_as_long_as_the_largest() -> None:
    serial, parallel = (
        predict_swap(question(1024, groups={"tp": 8, "dp": 128}, at_once=at)).row(WARM).likely for at in (False, True)
    )
    each = [built_s(FIGURES.build.likely, FIGURES.build_growth.likely, size) for size in (8, 128)]
    hosts = (31 + 31) * FIGURES.host_pair.likely
    assert serial == pytest.approx(sum(each) + hosts)
    assert parallel == pytest.approx(max(*each, hosts))


def test_state_goes_over_the_link_that_is_named() -> None:
    times = {
        link: predict_swap(question(link=link)).row(f"restore over {link}") for link in ("nvlink", "host", "network")
    }
    assert times["nvlink"].likely < times["host"].likely < times["network"].likely
    start = FIGURES.restore_start.likely
    assert times["host"].likely - start == pytest.approx(12.7e9 / FIGURES.restore["host"].likely)
    assert times["host"].low - FIGURES.restore_start.low == pytest.approx(12.7e9 / FIGURES.restore["host"].high)


# -- honesty
def test_a_sum_is_as_sure_as_its_least_sure_part() -> None:
    found = predict_swap(question())
    assert found.row(WHOLE).source == "reasoned"
    assert found.row(WHOLE).where == "of 5 stages 2 measured, 3 reasoned"
    assert found.calibration == "not calibrated"


def test_what_grows_by_thought_is_thought_once_it_has_grown() -> None:
    assert predict_swap(question(64)).row("notice a dead process").source == "measured"
    assert predict_swap(question(128)).row("notice a dead process").source == "reasoned"


def test_every_figure_says_where_it_is_from() -> None:
    flat = [getattr(FIGURES, name) for name in FIGURES.__struct_fields__ if name != "restore"]
    for figure in [*flat, *FIGURES.restore.values()]:
        assert figure.where
        assert figure.low < figure.likely < figure.high, figure


# -- what is refused
@pytest.mark.parametrize(
    ("ranks", "changed", "why"),
    [
        (1, {"groups": {}}, "a swap needs a peer"),
        (64, {"groups": {"tp": 7}}, "do not divide"),
        (64, {"groups": {"tp": 0}}, "do not divide"),
        (64, {"groups": {"tp": 8, "dp": 64}}, "a mesh of 8 x 64 needs more than the 64 ranks"),
        (64, {"state_bytes": -1.0}, "the state of a rank cannot have"),
        (64, {"state_bytes": math.nan}, "the state of a rank cannot have"),
        (64, {"gate": "tree"}, "the gate cannot run on 'tree'"),
    ],
)
def test_what_cannot_be_is_refused(ranks: int, changed: dict[str, object], why: str) -> None:
    with pytest.raises(PlannerError, match=why):
        question(ranks, **changed)


def test_a_prediction_is_the_same_on_its_way_through_json() -> None:
    found = predict_swap(question())
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
