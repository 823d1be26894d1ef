"""One data shard of a stream: which samples its micro-batches have, from wherever the reading begins."""

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from rackrun.errors import StepError, UsageError
from rackrun.worker.data.shard_reader import ShardReader, StreamSource, copied
from rackrun.worker.data.stream_positions import ShardEntry, start_of
from rackrun.worker.data.stream_states import decode_state, digest_of, encode_state
from tests.worker.data.streamed import CountsEpochs, KeepsStart, Numbers, Refills, Stateless, Vectors, one_shot

SHARDS, MICRO = 4, 3


def reader(make: Callable[[int, int], Any], shard: int = 1, **how: Any) -> ShardReader:
    given = {"shards": SHARDS, "micro_batch": MICRO, "collate": list, "batched": False, "seed": 7, "number": 0, **how}
    return ShardReader(StreamSource(make=make, **given), shard)


def read(one: ShardReader, count: int, since: int = 0) -> list[Any]:
    return [one.take(position) for position in range(since, since + count)]


def recorded(one: ShardReader, count: int) -> list[ShardEntry]:
    """The entries after each of the first ``count`` micro-batches."""
    found = []
    for position in range(count):
        one.take(position, record="state")
        found.append(one.entry(position + 1))
    return found


def test_a_micro_batch_goes_on_into_the_next_epoch_and_every_sample_of_an_epoch_is_used() -> None:
    samples = [sample for batch in read(reader(Numbers), 10) for sample in batch]
    assert sorted(samples[:15]) == sorted(samples[15:]) == list(range(1, 60, SHARDS))
    assert samples[:15] != samples[15:], "set_epoch was called"


@pytest.mark.parametrize("make", [one_shot, lambda shard, shards: list(one_shot(shard, shards))])
def test_an_iterable_is_made_anew_for_each_epoch(make: Callable[[int, int], Any]) -> None:
    made: list[int] = []

    def noted(shard: int, shards: int) -> Any:
        made.append(shard)
        return make(shard, shards)

    samples = [sample for batch in read(reader(noted), 4) for sample in batch]
    assert samples == [1, 5, 9, 13, 17, 21] * 2
    assert made == [1, 1]


@pytest.mark.parametrize("make", [Numbers, Stateless, Vectors, one_shot, KeepsStart, CountsEpochs])
@pytest.mark.parametrize("position", [0, 1, 4, 5, 6, 11])
def test_from_any_position_the_same_micro_batches_follow(make: Callable[[int, int], Any], position: int) -> None:
    undisturbed = reader(make)
    entries = recorded(undisturbed, 14)
    expected = [undisturbed.take(at) for at in range(14)]
    for known in (entries[:0], entries[:1], entries[2:4], entries[-2:]):
        again = reader(make)
        usable = [entry for entry in known if entry.position <= position]
        found = [again.take(at, usable) for at in range(position, 14)]
        assert digest_of(found) == digest_of(expected[position:])


def test_a_rank_begins_at_the_last_state_but_one_and_so_meets_a_known_digest() -> None:
    entries = [ShardEntry(at, 0, at, b"{}", 0) for at in (1, 16, 32)]
    assert start_of(entries[:2], 20) is entries[0]
    assert start_of(entries[1:], 40) is entries[1]
    assert start_of(entries[1:], 20) is None, "from the beginning: the digest after 16 shows whether it is the same"
    assert start_of([ShardEntry(16, 0, 16, b"", 0)] * 2, 20) is None


def test_a_reader_that_is_behind_reads_on_and_does_not_open_the_stream_again() -> None:
    one = reader(Numbers)
    one.take(0)
    stream = one.stream
    expected = read(reader(Numbers), 5)[4]
    assert one.take(4) == expected
    assert one.stream is stream
    one.forget_before(5)
    one.take(3)
    assert one.stream is not stream


def test_a_micro_batch_that_is_asked_for_again_is_not_read_again() -> None:
    one = reader(Numbers)
    first = one.take(0)
    one.take(1)
    assert one.take(0) is first


def test_an_iterable_may_fill_one_buffer_again_and_again() -> None:
    one = reader(Refills, batched=True, collate=None)
    assert [batch.tolist() for batch in read(one, 3)] == [[1], [5], [9]]
    assert [batch.tolist() for batch in read(one, 3)] == [[1], [5], [9]]


def test_an_entry_of_a_micro_batch_that_was_kept_without_one_is_made_by_reading_again() -> None:
    one = reader(Numbers)
    first = one.take(0)
    assert one.take(0, record="state") == first
    assert one.entry(1) == recorded(reader(Numbers), 1)[0]


class Named(NamedTuple):
    a: Any


class Bag(dict[str, Any]):
    pass


class Row(list[Any]):
    pass


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_tensors_in_any_container_are_copied_to_the_device(device: torch.device | None) -> None:
    x = torch.ones(2)
    batch = Bag(a=Named(x), b=OrderedDict(c=x), d=Row([x, (x,)]))
    found = copied(batch, device)
    tensors = [found["a"].a, found["b"]["c"], found["d"][0], found["d"][1][0]]
    assert all(one is not x and one.device.type == (device.type if device else "cpu") for one in tensors)
    assert type(found["a"]) is Named
    assert type(found["d"]) is Row
    if found["a"].a.device.type == "cpu":
        assert type(found) is Bag
        assert type(found["b"]) is OrderedDict


def test_data_that_have_changed_are_never_trained_on() -> None:
    entries = recorded(reader(Numbers), 6)

    def other(shard: int, shards: int) -> Any:
        return Numbers(shard, shards, count=56)

    with pytest.raises(StepError, match=r"data shard 1 .* its micro-batch 5 is not the one that was trained on"):
        reader(other).take(6, entries[4:])


def test_a_stream_that_has_raised_is_not_taken_for_one_that_has_ended() -> None:
    fails = [True]

    def make(shard: int, shards: int) -> Iterator[int]:
        for number in range(12):
            if number == 4 and fails.pop():
                fails.append(False)
                raise OSError("the disk")
            yield number

    one = reader(make)
    one.take(0)
    with pytest.raises(OSError, match="the disk"):
        one.take(1)
    assert one.take(1) == [3, 4, 5]


@pytest.mark.parametrize(("make", "said"), [(lambda *_: [], "no samples."), (lambda *_: iter([1, 2]), None)])
def test_an_empty_data_shard_is_refused(make: Callable[[int, int], Any], said: str | None) -> None:
    if said:
        with pytest.raises(UsageError, match="data shard 1 of 4 of stream 0 has no samples"):
            reader(make).take(0)
    else:
        assert reader(make).take(0) == [1, 2, 1]


def test_a_data_shard_that_is_empty_in_a_later_epoch_is_refused() -> None:
    class Once(list[int]):
        def set_epoch(self, epoch: int) -> None:
            if epoch:
                self.clear()

    with pytest.raises(UsageError, match="has no samples in epoch 1"):
        reader(lambda *_: Once([1, 2])).take(0)


def test_what_make_returns_must_be_iterable() -> None:
    with pytest.raises(UsageError, match="has returned a int, which is no iterable"):
        reader(lambda *_: 3).take(0)


def test_items_may_be_whole_micro_batches() -> None:
    assert read(reader(lambda *_: iter("abc"), batched=True, collate=None), 4) == ["a", "b", "c", "a"]
    assert read(reader(lambda *_: iter("abc"), batched=True, collate=str.upper), 2) == ["A", "B"]


def test_a_generator_may_hold_its_state_itself() -> None:
    class Counter:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Counter:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at

        def state_dict(self) -> int:
            return self.at

        def load_state_dict(self, state: int) -> None:
            self.at = state

    class Source:
        def __iter__(self) -> Counter:
            return Counter()

    entries = recorded(reader(lambda *_: Source()), 4)
    again = reader(lambda *_: Source())
    again.begin_at(entries[3])
    assert again.take(4) == [13, 14, 15]


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        worker: Any = torch.utils.data.get_worker_info()
        yield from range(worker.id, 40, worker.num_workers)


def test_processes_of_a_stream_end_with_its_reader() -> None:
    one = reader(lambda *_: DataLoader(Lines(), num_workers=2, batch_size=None))
    assert one.take(0) == [0, 1, 2]
    processes = list(one._iterator._workers)  # type: ignore[union-attr]
    assert all(process.is_alive() for process in processes)
    one.close()
    assert not any(process.is_alive() for process in processes)


def test_processes_of_a_stream_outlive_a_signal_to_every_process_of_the_job() -> None:
    """A DataLoader of the script, one within its iterable, and one that is begun late."""

    def begun_late(*_: int) -> Iterator[int]:
        yield from range(3)
        yield from loader()

    def loader() -> Any:
        return DataLoader(Lines(), num_workers=2, batch_size=None)

    for make, before in ((lambda *_: loader(), 0), (lambda *_: iter(loader()), 0), (begun_late, 1)):
        children = set(multiprocessing.active_children())
        one = reader(make)
        read(one, before + 1)
        begun = set(multiprocessing.active_children()) - children
        assert len(begun) == 2
        for process in begun:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                subprocess.run(["kill", f"-{number}", str(process.pid)], check=True)
        read(one, 3, before + 1)
        assert all(process.is_alive() for process in begun)
        for process in begun:
            process.terminate()
            process.join()
            assert process.exitcode == 0, "as its parent has asked for"
        one.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGUSR1}


def test_a_worker_init_fn_of_the_scripts_own_runs_too(tmp_path: Path) -> None:
    def begins(worker: int) -> None:
        (tmp_path / str(worker)).touch()

    one = reader(lambda *_: DataLoader(Lines(), num_workers=2, batch_size=None, worker_init_fn=begins))
    read(one, 3)
    one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, None, True, 2.5, "x"], "b": {"c": (1, (2,))}},
        {1: "a", ("b", 2): {3: None}},
        random.Random(3).getstate(),
        b"\x00\xff",
        2**130,
        {"__rackrun__": "tuple"},
    ],
)
def test_states_are_kept_exactly(state: Any) -> None:
    found = decode_state(encode_state(state))
    assert found == state
    assert repr(found) == repr(state)


def test_tensors_and_arrays_in_states_are_kept_exactly() -> None:
    state: dict[str, Any] = {
        "t": torch.arange(6).reshape(2, 3),
        "b": torch.tensor([1.5], dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "zero": torch.tensor(7),
        "n": np.arange(5, dtype=np.uint32),
        "s": np.float32(1.25),
    }
    found = decode_state(encode_state(state))
    for key, value in state.items():
        assert type(found[key]) is type(value)
        assert found[key].dtype == value.dtype
        assert found[key].tolist() == value.tolist()
        assert tuple(found[key].shape) == tuple(value.shape)


def test_a_state_that_cannot_be_kept_is_refused_by_its_path() -> None:
    with pytest.raises(UsageError, match=r"holds a builtins.set at state\['a'\]\[1\]"):
        encode_state({"a": [1, {2}]})


def test_a_digest_covers_contents_types_and_shapes() -> None:
    one = {"x": torch.arange(4.0), "y": [np.arange(3), "text", 1, None]}
    assert digest_of(one) == digest_of({"x": torch.arange(4.0), "y": [np.arange(3), "text", 1, None]})
    others = [
        {"x": torch.arange(4.0).reshape(2, 2), "y": one["y"]},
        {"x": torch.arange(4), "y": one["y"]},
        {"x": one["x"], "y": [np.arange(3), "text", 2, None]},
        {"x": one["x"], "y": [np.arange(3), "texts", 1, None]},
        {"z": one["x"], "y": one["y"]},
    ]
    assert len({digest_of(other) for other in (one, *others)}) == 6
