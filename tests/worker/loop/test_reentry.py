"""The ranks of a sharded world change their number by entering ``main`` again, in the same processes: no step is lost, no bit differs."""

from __future__ import annotations

import functools
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rackrun.checkpoint.arena.arena_format import PAGE
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.protocol.commands import GenerationPlan, Restore
from rackrun.protocol.ids import EVERY, Position, Rank, Step, snapshot_id, step_in
from rackrun.worker.loop.run import Run
from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.worker_membership import WorkerMembership
from tests.worker.forked_worker import hash_of
from tests.worker.harness import Ended, TinyCluster, say
from tests.worker.reshaping import Change, Reshaped, differences, noted
from tests.worker.scripts import Bodies, Script, adam, ddp, fit, fully_sharded, net

Make = Callable[[Run], nn.Module]
Reshape = Callable[..., tuple[Ended, Reshaped]]
STEPS = 14
HOLD, HOLD_AGAIN = 3, 7
NEVER: Mapping[int, int] = {}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fsdp(run: Run, mesh: Any = None) -> nn.Module:
    model = net()
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=mesh)
    return fully_sharded(model, mesh=mesh)


def hsdp(run: Run) -> nn.Module:
    return fsdp(run, run.mesh)


def of_members(_: Reshaped, plan: GenerationPlan) -> GenerationPlan:
    """Replicas have all: who goes has nothing that is needed."""
    assert plan.reshard is not None
    here = {f"/{member.slot}/{member.incarnation}" for member in plan.members}
    images = tuple(one if any(one.endswith(end) for end in here) else "" for one in plan.reshard.images)
    return msgspec.structs.replace(plan, reshard=msgspec.structs.replace(plan.reshard, images=images))


def as_it_is(_: Reshaped, plan: GenerationPlan) -> GenerationPlan:
    return plan


def nothing_again(ended: Ended) -> None:
    assert len(ended.told) == len({(rank, at) for rank, at, _ in ended.told})
    assert not ended.rolled_back, ended


def dies_in(generation: int, slot: str) -> Callable[[Run], None]:
    def die(run: Run) -> None:
        if (run.generation, run._world._slot) == (generation, slot):
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def waits_for_a_break_in(generation: int) -> Callable[[Run], None]:
    def wait(run: Run) -> None:
        if run.generation == generation:
            run._world.wait_broken()

    return wait


def waits_until_it_is_noted(run: Run) -> None:
    """What is of the world before goes when the first gate of the new one has passed."""
    while run.generation > 1 and not noted(run.generation) and not run._world.broken:
        time.sleep(0.001)


def script(
    make: Make,
    *,
    in_main: Callable[[Run], None] = lambda _: None,
    at_steps: Callable[[Run], None] = lambda _: None,
    holds: Mapping[int, int] = {1: HOLD},
    before_a_unit: Callable[[Run], None] = lambda _: None,
    after_a_step: Callable[[Run], bool | None] = lambda _: None,
    dies_after: Mapping[str, int] | None = None,
    workers: int = 0,
    steps: int = STEPS,
) -> Script:
    """Trains, with a phase after every fifth step, and says in the end what all ranks hold together. ``holds``: by generation, the step after which each
    rank waits until it has been told to pause. ``dies_after``: so many steps in
    a world of generation 2, by slot."""
    entered: list[int] = []
    phases: list[list[int]] = []

    def main(run: Run) -> None:
        entered.append(run.generation)
        done: list[int] = []

        def before(step: int) -> None:
            generation, world = run.generation, run._world
            while holds.get(generation) == world.passed.step and not world.pausing and world.generation == generation:
                time.sleep(0.001)  # the control thread hears of it, and tells nobody
            before_a_unit(run)

        def between(step: int) -> bool | None:
            done.append(step)
            leaves = after_a_step(run)
            if run.generation == 2 and (dies_after or {}).get(run._world._slot) == len(done):
                os.kill(os.getpid(), signal.SIGKILL)
            return leaves

        in_main(run)
        model = make(run)
        optimizer = adam(model)

        def at_end() -> None:
            state = optimizer.state_dict()["state"]
            held = {path: whole(tensor) for path, tensor in model.named_parameters()}
            held |= {f"{index}/{key}": whole(value) for index, values in state.items() for key, value in values.items()}
            say(
                whole={path: hash_of(t.contiguous().numpy().tobytes()) for path, t in held.items()},
                rank=run.rank,
                entered=len(entered),
                phases=phases,
            )

        run.at_end(at_end)

        def phase() -> None:
            before_a_unit(run)
            phases.append([run.generation, run._units.passed.step])

        run.every(5, phase)
        at_steps(run)
        fit(
            run,
            model,
            optimizer,
            steps=steps,
            before=before,
            between=between,
            workers=workers,
        )

    return main


@functools.cache
def undisturbed(make: Make, ranks: int = 4, mesh: tuple[tuple[str, int], ...] = ()) -> Ended:
    return TinyCluster(
        script(make, holds=NEVER), ranks=ranks, spares=0, batch=(24, 2), reduction="exact", mesh=dict(mesh) or None
    ).run()


@pytest.fixture
def reshape() -> Iterator[Reshape]:
    clusters: list[Reshaped] = []

    def run(main: Script, *changes: Change, **how: Any) -> tuple[Ended, Reshaped]:
        how = {"ranks": 4, "spares": 0, "batch": (24, 2), "reduction": "exact", **how}
        cluster = Reshaped(main, changes=changes, **how)
        clusters.append(cluster)
        return cluster.run(), cluster

    yield run
    for cluster in clusters:
        cluster.close()


@pytest.mark.stories
@pytest.mark.parametrize("distant", [False, True])
def test_four_sharded_ranks_become_three_and_four_again(distant: bool, reshape: Reshape) -> None:
    """The fourth of the second time was a spare."""
    ended, cluster = reshape(
        script(fsdp, holds={1: HOLD, 2: HOLD_AGAIN}, before_a_unit=waits_until_it_is_noted),
        Change((0, 1, 2), told_after=Position(HOLD)),
        Change((0, 1, 2, 4), told_after=Position(HOLD_AGAIN)),
        spares=1,
        snapshot_every=100,
        distant=distant,
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    nothing_again(ended)
    first, second = ended.plans
    assert (first.world_size, second.world_size) == (3, 4)
    for seen, plan in zip(cluster.seen, ended.plans, strict=True):
        assert plan.reshard is not None
        step = Step(plan.committed.step)
        old, new = (snapshot_id(layout, step) for layout in (plan.reshard.layout, plan.layout))
        for worker, held in seen.pages.items():
            assert new in held, "sealed before it is told"
            assert old in held or worker.slot == "t/4", "the old one is still there"
        assert {ready.fixed for ready in seen.ready.values()} == {""}
        assert all(ready.reenters for ready in seen.ready.values())
    for report in cluster.parked[1].values():
        assert not [one for one in report.snapshots if step_in(first.layout, one) is None], (
            "nothing of the former layout"
        )


@pytest.mark.stories
def test_what_other_trays_had_of_the_old_layout_counts_for_nothing_in_the_new_one(
    reshape: Reshape, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every copy comes through, but no time passes without one: nobody complains."""
    seen: list[tuple[int, int, list[int]]] = []

    def copies_come_through(run: Run) -> None:
        page, snapshots = run._runtime.page, run._units._snapshots
        snapshots.settle()
        seen.append((run.generation, snapshots._mirrored, sorted(snapshots._held)))
        if page.mirroring:
            page.mirror_done(page.mirror_wanted[0], well=True)  # as an agent does
        say(seen=seen)

    def have_mirrors(_: Run) -> None:
        WorkerMembership.has_mirrors = property(lambda _: True)  # type: ignore[method-assign, assignment]

    ended, _ = reshape(
        script(fsdp, in_main=have_mirrors, after_a_step=copies_come_through, holds={1: 5}),
        Change((0, 1, 2), told_after=Position(5)),
        snapshot_every=1,
    )
    assert ended.exit_code == 0, ended
    for rank in range(3):
        found = ended.said[rank]["seen"]
        assert {generation for generation, _, _ in found} == {1, 2}
        assert all(mirrored in held for _, mirrored, held in found if mirrored >= 0), (rank, found)
        assert any(mirrored >= 0 for generation, mirrored, _ in found if generation == 2), (rank, found)
    assert "no snapshot has come through" not in capfd.readouterr().err


@pytest.mark.stories
def test_replicas_of_shards_are_dropped_along_the_first_axis(reshape: Reshape) -> None:
    mesh = {"dp_replicate": 2, "dp_shard": 2}

    def replicas_have_the_same(_: Reshaped, plan: GenerationPlan) -> GenerationPlan:
        assert plan.reshard is not None
        images = plan.reshard.images
        return msgspec.structs.replace(
            plan, reshard=msgspec.structs.replace(plan.reshard, images=(*images[:2], *images[:2]))
        )

    ended, cluster = reshape(
        script(hsdp), Change((0, 1), told_after=Position(HOLD), edit=replicas_have_the_same), mesh=mesh
    )
    assert not differences(ended, undisturbed(hsdp, mesh=tuple(mesh.items()))), ended
    nothing_again(ended)
    (seen,) = cluster.seen
    assert {ready.mesh for ready in seen.ready.values()} == {(("dp_replicate", 1), ("dp_shard", 2))}


@pytest.mark.stories
def test_replicas_may_enter_main_again_as_well(reshape: Reshape) -> None:
    ended, cluster = reshape(script(ddp), Change((2, 0), told_after=Position(HOLD), edit=of_members), ranks=3)
    assert not differences(ended, undisturbed(ddp, 3)), ended
    nothing_again(ended)
    assert [ready.fixed for ready in cluster.seen[0].ready.values()] == ["", ""]
    assert not any(ready.reenters for ready in cluster.seen[0].ready.values()), "but need not"


def own_mesh(run: Run) -> nn.Module:
    return fsdp(run, init_device_mesh("cpu", (1, run.world_size), mesh_dim_names=("dp_replicate", "dp_shard")))


def own_mesh_beside_a_plain_one(run: Run) -> nn.Module:
    model = own_mesh(run)
    model.plain = init_device_mesh("cpu", (run.world_size,))  # type: ignore[assignment]  # no module, and no tensor
    return model


def without_any_mesh(run: Run) -> nn.Module:
    """Its gradients are averaged by hand."""
    return net().to(run.device)


@pytest.mark.parametrize(
    ("make", "mesh", "because"),
    [
        (fsdp, None, ""),
        (hsdp, {"dp_replicate": -1, "dp_shard": 2}, ""),
        (without_any_mesh, None, ""),
        (own_mesh, None, "it is not known which axes its groups lie along"),
        (own_mesh_beside_a_plain_one, None, "it is not known which axes its groups lie along"),
        (hsdp, {"dp_replicate": 1, "dp_shard": -1}, "its mesh leaves axis dp_shard open"),
    ],
)
def test_it_is_told_whether_main_may_be_entered_again(make: Make, mesh: Any, because: str, train: Any) -> None:
    def main(run: Run) -> None:
        model = make(run)
        fit(run, model, adam(model), steps=1, average=make is without_any_mesh)

    ended = train(main, ranks=2, spares=0, mesh=mesh)
    assert ended.exit_code == 0, ended
    for ready in ended.ready.values():
        assert ready.reenters == (not because)
        assert because in ready.fixed
        assert bool(because) == bool(ready.fixed)


def test_a_phase_that_is_committed_is_not_run_again(reshape: Reshape) -> None:
    lost = lost_after_the_gate_of(Position(4, EVERY + 1), "t/1", ranks=3)
    ended, _ = reshape(script(ddp, in_main=lost, holds=NEVER), Change((0, 2), edit=of_members), ranks=3)
    assert not differences(ended, undisturbed(ddp, 3)), ended
    assert ended.plans[0].committed == Position(4, EVERY + 1)
    assert {rank: said["phases"] for rank, said in ended.said.items()} == {0: [[1, 4], [2, 9]], 1: [[1, 4], [2, 9]]}


# -- losses in the middle of it ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [pytest.param(fsdp, marks=pytest.mark.stories), ddp])
def test_a_rank_that_is_lost_in_main_leads_to_another_entry_from_the_same_snapshots(
    make: Make, reshape: Reshape
) -> None:
    """Sharded ranks have nothing to do with each other in main: the others wait at run.steps(). Those under DDP wait in main."""
    ended, _ = reshape(
        script(make, in_main=dies_in(2, "t/1")),
        Change((0, 1, 2), told_after=Position(HOLD), edit=of_members if make is ddp else as_it_is),
        Change((2, 0)),
        snapshot_every=100,
    )
    assert not differences(ended, undisturbed(make)), ended
    first, second = ended.plans
    assert first.reshard == second.reshard
    assert {said["entered"] for said in ended.said.values()} == {3}


def test_a_rank_that_is_lost_while_another_has_left_its_groups_and_made_no_new_ones(reshape: Reshape) -> None:
    begin_again = WorkerMembership.begin_again

    def slowly(self: WorkerMembership, plan: GenerationPlan, rank: int) -> None:
        begin_again(self, plan, rank)
        if plan.generation == 2 and self._slot == "t/1":
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.generation == 2 and self._slot == "t/2":
            with self._changed:
                assert self._changed.wait_for(lambda: self.machine.announced > 2, timeout=60)

    def patched(_: Run) -> None:
        WorkerMembership.begin_again = slowly  # type: ignore[method-assign]

    ended, _ = reshape(
        script(ddp, in_main=patched),
        Change((0, 1, 2), told_after=Position(HOLD), edit=of_members),
        Change((2, 0)),
        snapshot_every=100,
    )
    assert not differences(ended, undisturbed(ddp)), ended


@pytest.mark.stories
def test_who_has_met_nobody_in_main_goes_on_when_a_spare_takes_the_place_of_the_lost(reshape: Reshape) -> None:
    """Nobody goes on before the fourth is there: it holds a shard that no other has."""
    ended, _ = reshape(
        script(fsdp, in_main=dies_in(2, "t/1"), at_steps=waits_for_a_break_in(2)),
        Change((0, 1, 2), told_after=Position(HOLD)),
        Change((0, 4, 2)),
        spares=1,
        snapshot_every=100,
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    nothing_again(ended)
    assert {rank: said["entered"] for rank, said in ended.said.items()} == {0: 2, 1: 2, 2: 2}


@pytest.mark.stories
def test_a_loss_in_the_new_world_is_made_good_from_its_own_first_snapshot(reshape: Reshape) -> None:
    """The former layout's snapshot of the same step is not taken for it."""

    def from_the_first(cluster: Reshaped, plan: GenerationPlan) -> GenerationPlan:
        assert plan.reshard is not None
        (first,) = (seen.plan for seen in cluster.seen)
        lost = Restore(rank=Rank(1), snapshot=plan.reshard.images[1])
        return msgspec.structs.replace(
            plan, reshard=None, layout=first.layout, rollback=Step(first.committed.step), restores=(lost,)
        )

    ended, _ = reshape(
        script(fsdp, dies_after={"t/1": 2}),
        Change((0, 1, 2), told_after=Position(HOLD)),
        Change((0, 4, 2), edit=from_the_first),
        spares=1,
        snapshot_every=100,
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    assert ended.plans[1].rollback == ended.plans[0].committed.step
    assert {rank: said["entered"] for rank, said in ended.said.items()} == {0: 2, 1: 2, 2: 2}, (
        "a spare of a world of four"
    )


@pytest.mark.stories
def test_a_damaged_snapshot_is_told_of_and_never_used(reshape: Reshape, capfd: Any) -> None:
    def spoil(cluster: Reshaped, plan: GenerationPlan) -> GenerationPlan:
        fd = cluster.snapshot_of(3, plan.committed.step)
        at = 6 * PAGE + 100  # behind the arena's records and the image's header: tensors
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
        return plan

    ended, cluster = reshape(
        script(fsdp, holds={1: 5}),
        Change((0, 1, 2), told_after=Position(5), edit=spoil),
        Change((0, 1, 2), rollback=4),
        snapshot_every=4,
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    told, (first, second) = cluster.damaged[0], ended.plans
    assert first.reshard is not None
    assert (told.step, told.where) == (first.committed.step, first.reshard.images[3])
    assert second.committed.step == 4
    assert "cannot be used" in capfd.readouterr().err


@pytest.mark.stories
def test_an_error_of_the_script_ends_the_job_as_ever(reshape: Reshape) -> None:
    def raises(run: Run) -> None:
        if run.generation == 2 and run.rank == 0:
            raise ValueError("the script's own")

    ended, _ = reshape(script(fsdp, in_main=raises), Change((0, 1, 2), told_after=Position(HOLD)), snapshot_every=100)
    assert ended.exit_code == 1
    assert ended.failure is not None
    assert ended.failure.type == "builtins.ValueError"


# -- the code after the call of the step function ----------------------------------------------------------------------
@pytest.fixture
def bodies(tmp_path: Path) -> Bodies:
    return Bodies(tmp_path / "bodies")


def runs(bodies: Bodies) -> Callable[[Run], None]:
    return lambda run: bodies.ran(run, run._units.passed.step)


SLOTS = [f"t/{slot}" for slot in range(4)]


@pytest.mark.stories
def test_when_all_pause_the_code_after_the_call_has_run_on_all_of_them(reshape: Reshape, bodies: Bodies) -> None:
    """Once on each: on who goes, too."""
    ended, _ = reshape(
        script(fsdp, after_a_step=runs(bodies)), Change((0, 1, 2), told_after=Position(HOLD)), snapshot_every=100
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    nothing_again(ended)
    last = ended.plans[0].committed.step
    assert bodies.by_step() == {step: SLOTS[: 4 if step <= last else 3] for step in range(STEPS)}


def lost_after_the_gate_of(at: Position, slot: str, ranks: int = 4) -> Callable[[Run], None]:
    """All have passed it and have told so, and none has returned from the call of the step function, when the world breaks."""
    committed = UnitRunner._committed
    passed = mmap.mmap(-1, ranks)
    """By rank: a peer that has not noticed yet that the gate has passed would do the unit again."""

    def then_break(self: UnitRunner, position: Position, *more: Any) -> None:
        committed(self, position, *more)
        world = self._world
        if (position, world.generation) == (at, 1):
            self._parts.settle()
            passed[world.rank] = 1
            while world._slot == slot and not all(passed[:]):
                time.sleep(0.001)
            if world._slot == slot:
                os.kill(os.getpid(), signal.SIGKILL)
            world.wait_broken()

    def patch(_: Run) -> None:
        UnitRunner._committed = then_break  # type: ignore[method-assign,assignment]

    return patch


@pytest.mark.stories
@pytest.mark.parametrize("step", [5, STEPS - 1])
def test_after_a_loss_it_has_run_on_all_that_are_left_before_they_leave_main(
    step: int, reshape: Reshape, bodies: Bodies
) -> None:
    ended, _ = reshape(
        script(fsdp, in_main=lost_after_the_gate_of(Position(step), "t/1"), after_a_step=runs(bodies), holds=NEVER),
        Change((0, 2, 3)),
        snapshot_every=1,
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    assert ended.plans[0].committed.step == step
    nothing_again(ended)
    left = ["t/0", "t/2", "t/3"]
    assert bodies.by_step() == {number: SLOTS if number < step else left for number in range(STEPS)}


@pytest.mark.stories
def test_it_has_run_where_no_process_stays(reshape: Reshape, bodies: Bodies) -> None:
    """The only rank goes, and a spare takes its place."""
    ended, _ = reshape(
        script(fsdp, after_a_step=runs(bodies)),
        Change((1,), told_after=Position(HOLD)),
        ranks=1,
        spares=1,
        snapshot_every=100,
    )
    assert not differences(ended, undisturbed(fsdp, 1)), ended
    last = ended.plans[0].committed.step
    assert bodies.by_step() == {step: ["t/0" if step <= last else "t/1"] for step in range(STEPS)}


def left_after(step: int) -> Callable[[Run], bool]:
    return lambda run: run._units.passed.step == step


@functools.cache
def stopped(step: int) -> Ended:
    return TinyCluster(
        script(fsdp, after_a_step=left_after(step), holds=NEVER),
        ranks=4,
        spares=0,
        batch=(24, 2),
        reduction="exact",
    ).run()


@pytest.mark.parametrize(
    "slots", [pytest.param((0, 2, 3), marks=pytest.mark.stories), pytest.param((4, 0), marks=pytest.mark.stories)]
)
def test_a_loop_that_was_left_then_stays_left_when_main_is_entered_again(
    slots: tuple[int, ...], reshape: Reshape
) -> None:
    """Also on a spare that joins, which has seen nothing of it."""
    ended, _ = reshape(
        script(fsdp, in_main=lost_after_the_gate_of(Position(5), "t/1"), after_a_step=left_after(5), holds=NEVER),
        Change(slots),
        spares=1,
        snapshot_every=1,
    )
    assert not differences(ended, stopped(5)), ended
    assert ended.plans[0].committed.step == 5
    assert max(ended.losses) == 5
    assert {rank: said["phases"] for rank, said in ended.said.items()} == {
        rank: [] if slot == 4 else [[1, 4]] for rank, slot in enumerate(slots)
    }


@pytest.mark.stories
def test_a_loop_that_was_left_is_begun_again_where_all_go_back_behind_it(reshape: Reshape) -> None:
    ended, _ = reshape(
        script(fsdp, in_main=lost_after_the_gate_of(Position(5), "t/1"), after_a_step=left_after(5), holds=NEVER),
        Change((0, 2, 3), rollback=4),
        snapshot_every=1,
    )
    assert not differences(ended, stopped(5)), ended
    assert max(ended.losses) == 5


# -- what stays, and what does not -------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [pytest.param(fsdp, marks=pytest.mark.stories), ddp])
def test_nothing_of_the_old_model_is_left(make: Make, reshape: Reshape) -> None:
    """Nor processes, nor descriptors: the third entry finds what the second has found."""
    models: list[weakref.ref[nn.Module]] = []
    found: list[list[int]] = []
    descriptors: dict[int, int] = {}

    def counted(run: Run) -> nn.Module:
        if models:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            found.append([sum(ref() is not None for ref in models), len(children)])
        model = make(run)
        models.append(weakref.ref(model))
        return model

    def count(run: Run) -> None:
        for thread in threading.enumerate():
            if thread.name == "rackrun-drop":  # communicators of the former world
                thread.join()
        descriptors[run.generation] = len(os.listdir("/proc/self/fd"))
        say(found=found, descriptors=descriptors)

    ended, _ = reshape(
        script(counted, workers=1, after_a_step=count, holds={1: HOLD, 2: HOLD_AGAIN}),
        Change((0, 1, 2), told_after=Position(HOLD), edit=of_members if make is ddp else as_it_is),
        Change((2, 1, 0), told_after=Position(HOLD_AGAIN)),
        snapshot_every=100,
    )
    assert ended.exit_code == 0, ended
    for said in ended.said.values():
        assert said["found"] == [[0, 0], [0, 0]]
        more = said["descriptors"]["3"] - said["descriptors"]["2"]
        assert more == 0 or (more == 1 and said["rank"] == 0), "who has become rank 0 says what is broadcast"


@pytest.mark.stories
def test_checkpoints_on_disk_go_on_across_it(reshape: Reshape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    monkeypatch.setenv("RACKRUN_CHECKPOINT_KEEP", "20")
    ended, _ = reshape(script(fsdp), Change((0, 1, 2), told_after=Position(HOLD)), snapshot_every=100)
    assert ended.exit_code == 0, ended
    store = DurableStore(tmp_path, "run")
    wrote = {}
    for info in store.checkpoints():
        with store.open(info.number) as reader:
            wrote[info.number] = reader.world_size
    before = {step for step, ranks in wrote.items() if ranks == 4}
    after = {step for step, ranks in wrote.items() if ranks == 3}
    assert before
    assert max(before) <= ended.plans[0].committed.step < min(after)
    assert max(after) == STEPS - 1
    again = TinyCluster(
        script(fsdp, steps=STEPS + 2, holds=NEVER), ranks=2, spares=0, batch=(24, 2), reduction="exact"
    ).run()
    assert min(again.losses) == STEPS
    assert again.exit_code == 0, again
