"""What many say at once is not about them: the breaker withholds what would empty the job, and blames the switch."""

from __future__ import annotations

from rackrun.protocol.gpu_health import Evidence, GpuVerdict, Health, response_to
from rackrun.topology.health.circuit_breaker import (
    Breaker,
    BreakerPolicy,
    Decision,
    PassedVerdict,
    SwitchSuspected,
    WithheldVerdict,
)
from rackrun.topology.model.racks import CliqueId

LEFT, RIGHT = CliqueId("left", 1), CliqueId("right", 1)
TRAYS: dict[str, CliqueId | None] = {
    f"{side}-{at}": of for side, of in (("left", LEFT), ("right", RIGHT)) for at in range(6)
}


def verdict(health: Health = Health.DEGRADED, *, fabric: bool = False, at_ms: int = 0, gpu: int = 0) -> GpuVerdict:
    response, scope, repair = response_to(health)
    evidence = Evidence(at_ms=at_ms, source="nvml", what="something", health=health, fabric=fabric)
    return GpuVerdict(
        at_ms=at_ms, uuid="GPU-0", index=gpu, health=health, response=response, scope=scope, repair=repair, evidence=(evidence,)
    )  # fmt: skip


def kinds(decisions: list[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def test_what_leaves_everything_in_place_passes() -> None:
    breaker = Breaker(TRAYS)
    for health in (Health.OK, Health.APP):
        for at, tray in enumerate(TRAYS):
            assert kinds(breaker.handle(at, tray, verdict(health))) == ["PassedVerdict"]


def test_more_than_half_of_the_trays_within_five_minutes_opens_it_until_a_person_has_looked() -> None:
    breaker = Breaker(TRAYS)
    for at, tray in enumerate(list(TRAYS)[:6]):
        assert kinds(breaker.handle(at * 1000, tray, verdict())) == ["PassedVerdict"]
    assert breaker.open_since_ms is None
    (withheld,) = breaker.handle(7000, "right-0", verdict(Health.RESET))
    assert isinstance(withheld, WithheldVerdict)
    assert "more than 50% of 12 trays" in withheld.reason
    assert kinds(breaker.handle(3_600_000, "right-1", verdict())) == ["WithheldVerdict"], "time alone does not close it"
    assert list(breaker.withheld) == [("right-0", 0), ("right-1", 0)]
    breaker.handle(3_600_000, "right-1", verdict(Health.OK))
    assert list(breaker.withheld) == [("right-0", 0)], "the other got well by itself"
    breaker.reset()
    assert kinds(breaker.handle(3_600_001, "right-1", verdict())) == ["PassedVerdict"]


def test_trays_that_go_slowly_do_not_open_it() -> None:
    breaker = Breaker(TRAYS)
    for number, tray in enumerate(TRAYS):
        assert kinds(breaker.handle(number * 60_000, tray, verdict())) == ["PassedVerdict"]


def test_the_same_tray_counts_once() -> None:
    breaker = Breaker(TRAYS)
    for at in range(20):
        assert kinds(breaker.handle(at, "left-0", verdict())) == ["PassedVerdict"]


def test_one_tray_of_a_small_job_may_always_go() -> None:
    breaker = Breaker({"a": None})
    assert kinds(breaker.handle(0, "a", verdict())) == ["PassedVerdict"]
    pair = Breaker({"a": None, "b": None})
    assert kinds(pair.handle(0, "a", verdict())) == ["PassedVerdict"]
    assert kinds(pair.handle(1, "b", verdict())) == ["WithheldVerdict"]


def test_a_gpu_that_is_gone_is_gone_also_with_the_breaker_open() -> None:
    breaker = Breaker(TRAYS, BreakerPolicy(share=0.0))
    assert kinds(breaker.handle(0, "left-0", verdict())) == ["PassedVerdict"]
    assert kinds(breaker.handle(1, "left-1", verdict())) == ["WithheldVerdict"]
    assert kinds(breaker.handle(2, "left-2", verdict(Health.LOST))) == ["PassedVerdict"]


def test_a_single_tray_that_lost_its_fabric_goes_after_the_others_had_time_to_speak() -> None:
    breaker = Breaker(TRAYS)
    assert breaker.handle(0, "left-0", verdict(Health.FABRIC, fabric=True)) == []
    assert breaker.wake_at_ms == 500
    assert breaker.tick(499) == []
    (passed,) = breaker.tick(500)
    assert isinstance(passed, PassedVerdict)
    assert passed.tray == "left-0"
    assert breaker.wake_at_ms is None


def test_two_trays_of_one_clique_blame_the_switch_and_keep_their_gpus() -> None:
    breaker = Breaker(TRAYS)
    assert breaker.handle(0, "left-0", verdict(Health.FABRIC, fabric=True)) == []
    suspected, waited, own = breaker.handle(100, "left-3", verdict(Health.DEGRADED, fabric=True))
    assert isinstance(suspected, SwitchSuspected)
    assert (suspected.clique, suspected.trays) == (LEFT, ("left-0", "left-3"))
    assert isinstance(waited, WithheldVerdict)
    assert isinstance(own, WithheldVerdict)
    assert (waited.tray, own.tray) == ("left-0", "left-3")
    assert kinds(breaker.handle(200, "left-4", verdict(fabric=True))) == ["WithheldVerdict"], (
        "the clique is told of once"
    )
    assert breaker.tick(10_000) == []


def test_gpus_of_one_tray_or_of_two_cliques_do_not_blame_a_switch() -> None:
    breaker = Breaker(TRAYS)
    for at, tray in enumerate(["left-0", "left-0", "left-0", "right-0"]):
        assert breaker.handle(at, tray, verdict(fabric=True, gpu=at)) == []
    assert kinds(breaker.tick(1000)) == ["PassedVerdict"] * 4


def test_what_is_not_about_the_fabric_passes_while_a_switch_is_suspected() -> None:
    breaker = Breaker(TRAYS)
    breaker.handle(0, "left-0", verdict(fabric=True))
    breaker.handle(1, "left-1", verdict(fabric=True))
    assert kinds(breaker.handle(2, "left-2", verdict(Health.REBOOT))) == ["PassedVerdict"]


def test_links_that_fail_far_apart_in_time_are_the_gpus_own() -> None:
    breaker = Breaker(TRAYS)
    breaker.handle(0, "left-0", verdict(fabric=True))
    assert kinds(breaker.handle(60_000, "left-1", verdict(fabric=True))) == ["PassedVerdict"], (
        "the first; the second waits"
    )
    assert kinds(breaker.tick(61_000)) == ["PassedVerdict"]


def test_a_gpu_that_speaks_again_while_it_waits_has_its_last_word() -> None:
    breaker = Breaker(TRAYS)
    assert breaker.handle(0, "left-0", verdict(fabric=True)) == []
    assert kinds(breaker.handle(10, "left-0", verdict(Health.REBOOT))) == ["PassedVerdict"]
    assert breaker.tick(1000) == []
