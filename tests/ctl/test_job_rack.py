"""``rackctl topology --run``: a job on its rack, from the journal that the real core and driver have written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.protocol.events import DeviceJudged
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from tests.coordinator.journaled_job import JournaledJob
from tests.core.core_harness import verdict_on
from tests.ctl.conftest import Said

Rackctl = Callable[..., Said]
GOLDEN = Path(__file__).parent / "golden"
DP, TP = "dp", "tp"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    yield journal
    journal.close()


@pytest.fixture
def shown(rackctl: Rackctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The picture, without the blanks at the ends of its lines."""
    monkeypatch.setenv("COLUMNS", "100")

    def show(run: Path = tmp_path) -> str:
        said = rackctl("topology", "show", "--run", run)
        assert said.code == 0, said
        return "".join(f"{line.rstrip()}\n" for line in said.out.splitlines())

    return show


def nvl72(journal: Journal) -> JournaledJob:
    """64 ranks in groups of four, and eight spares."""
    job = JournaledJob(JobConfig(trays_min=18, trays_max=18, spares=8, mesh=((DP, 16), (TP, 4))), journal)
    for tray in range(18):
        job.join(f"tray-{tray:02}", clique="3a5f1c2e")
    job.train()
    return job


def swap(job: JournaledJob, passed: int) -> None:
    """All park, and the spares take over."""
    job.park_all(passed=passed)
    job.now += 400
    job.resume_all()


def a_bad_day(journal: Journal) -> JournaledJob:
    """A planned swap, a tray that is lost, and GPUs in every state there is."""
    job = nvl72(journal)
    job.now = 60_000
    job.judges("tray-03/1", Health.DEGRADED)
    job.pause_all()
    job.now += 100
    swap(job, 9)
    job.now = 90_000
    job.tray_lost("tray-05")
    swap(job, 12)
    job.exits("tray-03/1")
    job.checks("tray-17/3", "its fabric registration is in progress, not completed")
    for _ in range(3):
        job.exits("tray-17/2", code=1)
    job.judges("tray-17/1", Health.LOST)
    job.judges("tray-07/0", Health.DEGRADED)
    job.judges("tray-09/2", Health.FABRIC, fabric=True)
    job.judges("tray-10/2", Health.FABRIC, fabric=True)
    return job


def hosts(journal: Journal) -> JournaledJob:
    """Nine hosts of eight GPUs, each a clique; the last one waits."""
    job = JournaledJob(JobConfig(trays_min=9, trays_max=9, spares=8, mesh=((DP, 8), (TP, 8))), journal)
    for host in range(9):
        job.join(f"hgx-{host:02}", 8, clique=f"host:hgx-{host:02}")
    job.train()
    return job


def a_host_to_be_rebooted(journal: Journal) -> JournaledJob:
    job = hosts(journal)
    job.judges("hgx-03/1", Health.REBOOT)
    return job


def on_cpus(journal: Journal) -> JournaledJob:
    """Rank 2 was killed and swapped; then rank 5 and its replacement meet the same bug."""
    job = JournaledJob(JobConfig(trays_min=3, trays_max=3, spares=3), journal)
    for tray in range(3):
        job.join(f"tray-{tray}")
    job.train()
    job.exits("tray-0/2")
    swap(job, 3)
    for _ in range(2):
        slot = next(rank.slot for rank in job.view.ranks if rank.rank == 5)
        job.exits(slot, bug="train.py:3", step=4)
        if job.driver.over is None:
            swap(job, 3)
    return job


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `a_bad_day`, which takes a while and is only looked at."""
    place = tmp_path_factory.mktemp("run")

    async def live() -> None:
        journal = Journal(place / "journal.sqlite", run_id="job-1")
        a_bad_day(journal).end()
        journal.close()

    asyncio.run(live())
    return place


@pytest.mark.parametrize(("name", "story"), [("nvl72", nvl72), ("hosts", a_host_to_be_rebooted), ("cpus", on_cpus)])
async def test_the_picture_is_as_it_was_looked_at(
    name: str, story: Callable[[Journal], JournaledJob], journal: Journal, shown: Callable[..., str]
) -> None:
    story(journal).end()
    assert_as_looked_at(name, shown())


def test_the_picture_of_a_bad_day_has_a_letter_and_a_line_for_everything(
    bad_day: Path, shown: Callable[..., str]
) -> None:
    assert_as_looked_at("bad-day", shown(bad_day))


def assert_as_looked_at(name: str, picture: str) -> None:
    assert max(map(len, picture.splitlines())) <= 100
    assert picture == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_a_rank_has_a_story(bad_day: Path, rackctl: Rackctl) -> None:
    said = rackctl("topology", "explain", 13, "--run", bad_day)
    because = "GPU 1 is degraded: it was tested (nvml)"
    assert said.out.splitlines() == [
        "rank 13 (dp 3, tp 1) sits on tray-16/0: rack rack of 3a5f1c2e, tray 16, GPU 0, clique 3a5f1c2e.1.",
        "Its tp group is the 4 ranks 12, 13, 14, 15: all in one clique.",
        "It was placed on tray-03/1 in generation 1, at the start.",
        f"In generation 2, 60.1 s after the start, it moved to tray-16/0: rank 13 leaves tray-03/1 ({because}) -> tray-16/0 in 0.50 s.",
        "If it is lost now: no spare that may take over is ready; it would wait for tray-03/1.",
    ]
    assert "has stayed" in rackctl("topology", "explain", 0, "--run", bad_day).out


async def test_who_is_named_as_the_successor_takes_over(journal: Journal, rackctl: Rackctl, tmp_path: Path) -> None:
    job = nvl72(journal)
    job.checks("tray-16/0", "links are down")
    for _ in range(2):
        journal.flush()
        said = rackctl("topology", "explain", 33, "--run", tmp_path, "--json").json["lines"][-1]
        job.exits(next(rank.slot for rank in job.view.ranks if rank.rank == 33))
        swap(job, 5)
        now = next(rank.slot for rank in job.view.ranks if rank.rank == 33)
        assert said.startswith(f"If it is lost now: {now} takes over; then tray-")
    job.end()


async def test_a_group_that_would_move_as_a_whole_is_told_of(
    journal: Journal, rackctl: Rackctl, tmp_path: Path
) -> None:
    job = hosts(journal)
    journal.flush()
    said = rackctl("topology", "explain", 0, "--run", tmp_path).out
    assert "If it is lost now: hgx-08/0 takes over, and ranks 1, 2, 3, 4, 5, 6, 7 move with it." in said
    job.judges("hgx-03/1", Health.REBOOT)
    job.end()
    assert "its recovery is under way" in rackctl("topology", "explain", 25, "--run", tmp_path).out
    said = rackctl("topology", "explain", 0, "--run", tmp_path).out
    assert "If it is lost now: no spare that may take over is ready." in said, "those of hgx-08 are needed for others"


async def test_a_rank_on_a_failing_gpu_is_told_where_it_goes(
    journal: Journal, rackctl: Rackctl, tmp_path: Path
) -> None:
    job = nvl72(journal)
    job.judges("tray-07/0", Health.DEGRADED)
    job.end()
    said = rackctl("topology", "explain", 28, "--run", tmp_path).out
    assert "Its slot is failing: degraded: it was tested (nvml)" in said
    assert "At the next step boundary it leaves for tray-16/0." in said


async def test_a_job_that_is_well_has_no_problems_and_one_that_is_not_has_them_all(
    journal: Journal, rackctl: Rackctl, tmp_path: Path
) -> None:
    job = nvl72(journal)
    journal.flush()
    assert rackctl("topology", "check", "--run", tmp_path, "--json").json == {"problems": []}
    assert (
        rackctl("topology", "check", "--run", tmp_path).out
        == "generation 1, 64 ranks (dp=16,tp=4), 8 of 8 spares ready\n"
    )
    job.tray_lost("tray-05")
    swap(job, 12)
    job.tell(DeviceJudged(tray=TrayId("tray-06"), verdict=verdict_on(3, Health.DEGRADED)))
    job.end()
    said = rackctl("topology", "check", "--run", tmp_path)
    assert said.code == 1
    assert said.out.splitlines()[1:] == [
        "tray-05/0-3: its tray is lost: lease lapsed",
        "rank 27 on tray-06/3: failing: degraded: it was tested (nvml). Repair: drain it, then reset it; replace it if that does not help",
        "4 of 8 spares are ready",
    ]


async def test_a_group_over_two_cliques_is_a_problem_also_where_it_is_allowed(
    journal: Journal, rackctl: Rackctl, tmp_path: Path
) -> None:
    job = JournaledJob(JobConfig(trays_min=2, trays_max=2, spares=0, cross_clique=True), journal)
    for tray in "ab":
        job.join(tray, 2, clique=f"of {tray}")
    for slot in job.members:
        job.ready(slot, mesh={TP: 4})
    job.end()
    said = rackctl("topology", "check", "--run", tmp_path)
    assert "the tp group of ranks 0, 1, 2, 3 sits in 2 cliques (of a.1, of b.1): NVLink does not join them" in said.out
    assert "all in 2 cliques" in rackctl("topology", "explain", 0, "--run", tmp_path).out


async def test_after_the_end_the_ranks_are_where_they_were(
    journal: Journal, rackctl: Rackctl, tmp_path: Path, shown: Callable[..., str]
) -> None:
    job = nvl72(journal)
    for slot in job.members:
        job.finishes(slot)
    for slot in list(job.incarnation):
        job.exits(slot, code=0)
    job.end()
    picture = shown()
    assert "ended with exit code 0" in picture
    assert "tray-15  60   61   62   63\n" in picture
    assert "L" not in picture.partition("tray-00")[2]
    assert rackctl("topology", "check", "--run", tmp_path).code == 0
    assert "If it is lost" not in rackctl("topology", "explain", 3, "--run", tmp_path).out


def test_json_and_svg_have_the_same_as_the_picture(bad_day: Path, rackctl: Rackctl, tmp_path: Path) -> None:
    found = rackctl("topology", "show", "--run", bad_day, "--json").json
    assert found["seats"][13] == "tray-16/0"
    assert found["mesh"] == {DP: 16, TP: 4}
    assert {slot["trouble"] for slot in found["slots"]} == {
        "", "lost", "out", "quarantined", "failing", "unfit", "withheld",
    }  # fmt: skip
    assert len(found["topology"]["racks"][0]["trays"]) == 18
    out = tmp_path / "job.svg"
    assert rackctl("topology", "show", "--run", bad_day, "--svg", out).code == 0
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"0", "28F", "38W", "L", "SU", "Q", "X", "tray-05/0-3: its tray is lost: lease lapsed"} <= texts
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "tray-07/1: rank 29, clique A" in titles


async def test_a_journal_without_its_config_is_drawn_too(journal: Journal, shown: Callable[..., str]) -> None:
    job = nvl72(journal)
    journal.fact("config", "")
    job.end()
    assert "generation 1, 64 ranks (dp=64)\n" in shown()


async def test_a_job_that_never_formed_is_drawn_with_its_trays(journal: Journal, shown: Callable[..., str]) -> None:
    job = JournaledJob(JobConfig(trays_min=2, trays_max=2, spares=0), journal)
    job.join("tray-0")
    job.end()
    picture = shown()
    assert "no world was formed" in picture
    assert "tray-0  ·   ·   ·   ·\n" in picture


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("show", "--run", "nowhere"), "there is no run nowhere"),
        (("show", "--run", "HERE", "--mesh", "dp=2"), "a run has its mesh"),
        (("explain", 64, "--run", "HERE"), "it has 64 ranks"),
        (("show", "--run", "HERE", "--svg", "/nowhere/rack.svg"), "/nowhere/rack.svg"),
    ],
)
async def test_what_cannot_be_shown_is_refused_with_a_remedy(
    arguments: tuple[object, ...], what: str, journal: Journal, rackctl: Rackctl, tmp_path: Path
) -> None:
    nvl72(journal).end()
    said = rackctl("topology", *(tmp_path if one == "HERE" else one for one in arguments))
    assert said.code == 2
    assert what in said.err


async def test_a_job_that_was_refused_for_its_scripts_mesh_is_drawn(
    journal: Journal, shown: Callable[..., str]
) -> None:
    job = JournaledJob(JobConfig(trays_min=1, trays_max=1, spares=0), journal)
    job.join("a", 2, clique="x")
    job.ready("a/0", mesh={"dp": 0, "tp": 64})
    job.end()
    assert "exit code 2" in shown()


async def test_a_rank_whose_slot_is_there_no_more_is_told_of(
    journal: Journal, rackctl: Rackctl, tmp_path: Path, shown: Callable[..., str]
) -> None:
    job = JournaledJob(JobConfig(trays_min=2, trays_max=2, spares=1), journal)
    job.join("a", 2, clique="x")
    job.join("b", 2, clique="x")
    job.train()
    lost = next(rank.rank for rank in job.view.ranks if rank.slot == "a/1")
    job.tray_lost("a")
    job.join("a", 1, clique="x")
    job.end()
    assert "a/0-1  ranks 0 to 1  L  its worker is gone: its tray was lost (lease lapsed)" in shown()
    assert "its worker is gone" in rackctl("topology", "explain", str(lost), "--run", tmp_path).out
    assert "ranks 0 to 1 on a/0-1" in rackctl("topology", "check", "--run", tmp_path).out
