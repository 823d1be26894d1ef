"""Crashes: real processes that die by SIGKILL at a named point, at a random one, or at any moment, against a simple
model.

After each, a reader finds every checkpoint that the model says is whole, byte for byte, and no other.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rackrun.checkpoint.arena.arena import Arena, SlotState
from rackrun.checkpoint.base.errors import StaleFencingToken
from rackrun.checkpoint.base.process_identity import end_session
from rackrun.protocol import crash_points

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

JOB, ROOM, CHUNK = "run-42", 1000, 256
COPY = "copy"
"""A point of our own: within the copy of a payload."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.arena"


@pytest.fixture(autouse=True)
def no_handler() -> Iterator[None]:
    yield
    crash_points.enable(None)


def points() -> list[str]:
    return [name for name in crash_points.CRASH_POINTS if name.startswith("arena.")]


def create(path: Path, slots: int = 2) -> Arena:
    return Arena.create(path, job=JOB, rank=0, fencing_token=1, slots=slots, payload_bytes=ROOM, chunk_bytes=CHUNK)


def content(number: int) -> bytes:
    order = random.Random(number)
    return order.randbytes(order.randrange(ROOM + 1))


def copy_and_seal(arena: Arena, number: int, at: Callable[[str], None]) -> Callable[[], None]:
    """Begins; what it returns does the rest."""
    writer = arena.begin(number, number)

    def rest() -> None:
        data = content(number)
        for start in range(0, len(data), 300):
            at(COPY)
            piece = data[start : start + 300]
            writer.payload[start : start + len(piece)] = piece
        writer.seal(len(data), "layout")

    return rest


def fork(body: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, it ends the fork
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def killed(pid: int) -> bool:
    """Whether it died by SIGKILL; the other way to end is without a fault."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die(_: str = "") -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def whole(arena: Arena) -> dict[int, SlotState]:
    """Checkpoint number -> state, each read and compared."""
    found: dict[int, SlotState] = {}
    for slot in arena.slots():
        assert slot.state is not SlotState.BAD or slot.number >= 0, "a damaged header"
        if slot.state in (SlotState.SEALED, SlotState.COMMITTED):
            assert slot.number not in found
            reader = arena.reader(slot.number)
            reader.verify()
            assert reader.payload == content(slot.number), f"checkpoint {slot.number} is torn"
            found[slot.number] = slot.state
    return found


def look(path: Path) -> dict[int, SlotState]:
    with Arena.attach(path, job=JOB) as arena:
        return whole(arena)


# -- a model: which checkpoints are whole, and what each act does to them

Act = tuple[str, int]
Model = dict[int, SlotState]


def newest_committed(model: Model) -> int:
    return max((n for n, state in model.items() if state is SlotState.COMMITTED), default=-1)


def after(model: Model, act: Act, slots: int) -> Model:
    name, number = act
    model = dict(model)
    if name == "begin" and len(model) == slots:
        model.pop(min(n for n in model if n != newest_committed(model)), None)
    elif name == "seal":
        model[number] = SlotState.SEALED
    elif name == "commit":
        model[number] = SlotState.COMMITTED
    elif name in ("release", "mark_bad"):
        del model[number]
    return model


def script(order: random.Random, model: Model, number: int, slots: int) -> list[Act]:
    """What one process does in its life: acts that are allowed where they stand."""
    acts: list[Act] = []
    for _ in range(order.randrange(1, 6)):
        able = [n for n in model if n != newest_committed(model)]
        choice = order.random()
        if choice < 0.6 or not model:
            number += 1
            end = order.choice(["seal", "seal", "seal", "abandon"])
            new: list[Act] = [("begin", number), (end, number)]
            if end == "seal" and order.random() < 0.8:
                new.append(("commit", number))
        elif choice < 0.75 and able:
            new = [("release", order.choice(able))]
        elif choice < 0.8:
            new = [("mark_bad", order.choice(list(model)))]
        else:
            new = [("commit", order.choice(list(model)))]
        for act in new:
            model = after(model, act, slots)
        acts += new
    return acts


def play(arena: Arena, acts: list[Act], at: Callable[[str], None], begun: Callable[[int], None]) -> None:
    rest: Callable[[], None] = lambda: None  # noqa: E731
    for index, (name, number) in enumerate(acts):
        begun(index)
        if name == "begin":
            rest = copy_and_seal(arena, number, at)
        elif name == "seal":
            rest()
        elif name == "abandon":
            arena._writers[0].abandon()
        elif name == "commit":
            arena.commit(number)
        elif name == "release":
            arena.release(number)
        else:
            arena.mark_bad(number, "chosen by the test")
    begun(len(acts))
    arena.close()


class Shared:
    """A number that a fork can tell."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def set(self, value: int) -> None:
        struct.pack_into("<q", self._memory, 0, value)

    def get(self) -> int:
        value: int = struct.unpack_from("<q", self._memory, 0)[0]
        return value


# -- at every named point


EVERYTHING: list[Act] = [
    *(("begin", 1), ("seal", 1), ("commit", 1)),
    *(("begin", 2), ("seal", 2), ("commit", 2)),
    *(("begin", 3), ("abandon", 3)),
    *(("begin", 4), ("seal", 4), ("commit", 4)),
    ("release", 2),
    *(("begin", 5), ("seal", 5), ("mark_bad", 5)),
]


def _one_life(path: Path, at: Callable[[str], None], begun: Callable[[int], None]) -> None:
    crash_points.enable(at)
    create(path).close()
    play(Arena.attach(path, job=JOB, writable=True, fencing_token=1), EVERYTHING, at, begun)


def _kill_at(point: str, passes: int) -> Callable[[str], None]:
    left = [passes]

    def at(name: str) -> None:
        left[0] -= name == point
        if left[0] == 0:
            die()

    return at


def test_one_life_passes_every_point(path: Path) -> None:
    passed: set[str] = set()
    _one_life(path, passed.add, lambda _: None)
    assert passed == {COPY, *points()}


@pytest.mark.parametrize("point", [COPY, *points()])
def test_a_kill_at_each_point_shows_the_state_before_or_after_the_act(tmp_path: Path, point: str) -> None:
    begun = Shared()
    for passes in range(1, 100):
        path = tmp_path / f"arena-{passes}"
        begun.set(-1)
        if not killed(fork(partial(_one_life, path, _kill_at(point, passes), begun.set))):
            assert passes > 1, "never passed"
            return
        assert set(os.listdir(tmp_path)) <= {f"arena-{n}" for n in range(1, passes + 1)}, "create left something behind"
        if not path.exists():
            assert point in ("arena.create.allocated", "arena.create.formatted")
            create(path).close()
        done: Model = {}
        for earlier in EVERYTHING[: max(begun.get(), 0)]:
            done = after(done, earlier, slots=2)
        now = look(path)
        act = EVERYTHING[begun.get()] if 0 <= begun.get() < len(EVERYTHING) else None
        assert now in (done, after(done, act, slots=2) if act else done)
        with Arena.attach(path, job=JOB, writable=True, fencing_token=1) as arena:  # the dead one's claim is free
            copy_and_seal(arena, 99, lambda _: None)()
            arena.commit(99)
            assert whole(arena)[99] is SlotState.COMMITTED


def test_a_record_is_written_only_once_the_one_before_is_in_place(path: Path) -> None:
    """Payload, then chunk table, then header: seen in the file, at the points between."""
    seen: list[tuple[str, bytes, bytes]] = []

    def at(name: str) -> None:
        if name.startswith("arena.seal."):
            data = path.read_bytes()
            geometry = arena._superblock.geometry
            table, payload = geometry.table_at(0), geometry.payload_at(0)
            seen.append((name, data[table : table + 4], data[payload : payload + 4]))
            assert arena.slots()[0].state is (SlotState.SEALED if "cop" in name else SlotState.WRITING)

    with create(path) as arena:
        rest = copy_and_seal(arena, 3, lambda _: None)
        crash_points.enable(at)
        rest()
        crash_points.enable(None)
        table = arena.reader(3).crcs.tobytes()[:4]
    digested, *others = seen
    assert digested == ("arena.seal.digested", bytes(4), content(3)[:4])
    assert [name for name, _, _ in others] == [
        f"arena.seal.{edge}" for edge in ("tabled", "ready", "one_copy", "both_copies")
    ]
    assert all((there, payload) == (table, content(3)[:4]) for _, there, payload in others)


# -- thousands, at random points


class Stopped(BaseException):
    """A stop without the death of a process: the arena is dropped as it is."""


def stop(_: str = "") -> None:
    raise Stopped


def by_kill(life: Callable[[list[Arena]], None]) -> bool:
    return killed(fork(lambda: life([])))


def by_stop(life: Callable[[list[Arena]], None]) -> bool:
    held: list[Arena] = []
    try:
        life(held)
    except Stopped:
        for arena in held:
            assert arena._me is not None
            end_session(arena._me)
            arena._file.close()
        return True
    finally:
        crash_points.enable(None)
    return False


def crash_again_and_again(path: Path, seed: int, crashes: int, *, kill: bool) -> dict[str, int]:
    """One arena through many lives. Returns how often each point was the last."""
    order = random.Random(seed)
    end, run = (die, by_kill) if kill else (stop, by_stop)
    slots = order.choice([2, 2, 3, 4])
    model: Model = {}
    number, fencing_token, begun, where = 0, 1, Shared(), Shared()
    names = [COPY, *points()]
    ends = dict.fromkeys(names, 0)
    create(path, slots).close()
    while sum(ends.values()) < crashes:
        acts = script(order, model, number, slots)
        number = max([number, *(n for _, n in acts)])
        fencing_token += order.random() < 0.3
        left = [order.randrange(1, 5 * len(acts) + 6)]

        def at(name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                where.set(names.index(name))
                end(name)

        def life(
            held: list[Arena],
            acts: list[Act] = acts,
            at: Callable[[str], None] = at,
            fencing_token: int = fencing_token,
        ) -> None:
            crash_points.enable(at)
            held.append(Arena.attach(path, job=JOB, writable=True, fencing_token=fencing_token))
            play(held[0], acts, at, begun.set)

        begun.set(-1)
        crashed = run(life)
        for act in acts[: max(begun.get(), 0)]:
            model = after(model, act, slots)
        last = acts[begun.get()] if 0 <= begun.get() < len(acts) else None
        now = look(path)
        may_be = [model, after(model, last, slots)] if last and crashed else [model]
        assert now in may_be, f"seed {seed}, crash {sum(ends.values())} in {last}: {now} is none of {may_be}"
        model = now
        if crashed:
            ends[names[where.get()]] += 1
    return ends


@pytest.mark.parametrize(
    ("kill", "crashes"),
    [
        (False, 800),
        pytest.param(False, 2000, marks=pytest.mark.stories),
        (True, 50),
        pytest.param(True, 100, marks=pytest.mark.stories),
    ],
    ids=["stops", "more stops", "kills", "more kills"],
)
def test_hundreds_of_crashes_never_lose_the_newest_committed_checkpoint(
    tmp_path: Path, kill: bool, crashes: int
) -> None:
    ends: Counter[str] = Counter()
    for seed in range(crashes // 50):
        ends.update(crash_again_and_again(tmp_path / f"arena-{seed}", seed, 50, kill=kill))
    assert ends.total() == crashes
    assert kill or all(ends[point] for point in points() if not point.startswith("arena.create")), ends


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_kills(tmp_path: Path) -> None:
    for seed in range(1000, 1200):
        crash_again_and_again(tmp_path / f"arena-{seed}", seed, 50, kill=True)


# -- at any moment


def test_a_kill_at_any_moment_never_shows_less_than_was_committed(path: Path) -> None:
    create(path, slots=3).close()
    number = 0
    for life in range(30):
        told, tell = os.pipe()

        def live(tell: int = tell, life: int = life, number: int = number) -> None:
            arena = Arena.attach(path, job=JOB, writable=True, fencing_token=life + 1)
            while True:
                number += 1
                copy_and_seal(arena, number, lambda _: None)()
                arena.commit(number)
                os.write(tell, struct.pack("<q", number))

        pid = fork(live)
        os.close(tell)
        committed = number
        for _ in range(random.Random(life).randrange(1, 5)):  # the kill then falls anywhere in the next saves
            (committed,) = struct.unpack("<q", os.read(told, 8))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
        while data := os.read(told, 8):
            (committed,) = struct.unpack("<q", data)
        os.close(told)
        found = look(path)
        assert newest_committed(found) in (committed, committed + 1)
        number = max(found)
        number += 1  # it may have been begun


def test_a_fenced_writer_that_lives_on_is_refused_and_mixes_nothing_in(path: Path) -> None:
    create(path, slots=4).close()
    for turn in range(20):
        told, tell = os.pipe()
        first, fencing_token = turn * 10_001, 2 * turn + 2

        def live(tell: int = tell, first: int = first, fencing_token: int = fencing_token) -> None:
            with Arena.attach(path, job=JOB, writable=True, fencing_token=fencing_token) as arena:
                os.write(tell, b"+")
                with contextlib.suppress(StaleFencingToken):
                    for number in range(first, first + 10_000):
                        copy_and_seal(arena, number, lambda _: None)()
                        arena.commit(number)
                    raise AssertionError("it was never refused")

        pid = fork(live)
        assert os.read(told, 1) == b"+"
        with Arena.attach(path, job=JOB, writable=True, fencing_token=fencing_token + 1) as arena:
            copy_and_seal(arena, first + 10_000, lambda _: None)()
            arena.commit(first + 10_000)
            assert not killed(pid)
            assert newest_committed(whole(arena)) == first + 10_000
        os.close(told)
        os.close(tell)
