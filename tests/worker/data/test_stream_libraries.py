"""Streams of the libraries that people read data with: a rank is lost, and it is the same training.

A library that is not installed is skipped.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.data.streamed import Numbers
from tests.worker.data.test_stream_jobs import MICRO, SHARDS, after, each_sample_once, same_with_a_loss, script
from tests.worker.harness import Ended
from tests.worker.scripts import WIDTH

pytestmark = pytest.mark.frameworks

Train = Callable[..., Ended]
Make = Callable[[int, int], Any]
COUNT = 78


def vector(number: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def is_the_same_after_losses(make: Make, train: Train, **stream: Any) -> None:
    """Rank 0 is lost, and rank 2; and all go back to a checkpoint of a step in which no state was recorded."""
    reference = train(script(make, **stream))
    each_sample_once(reference)
    ended = train(script(make, **stream), kill={0: after(3), 2: after(9)}, spares=2)
    same_with_a_loss(ended, reference)
    each_sample_once(ended)


# -- Hugging Face datasets
def of_datasets(change: Callable[[Any], Any] = lambda data: data) -> Make:
    datasets = pytest.importorskip("datasets")

    def make(shard: int, shards: int) -> Any:  # in each worker: a data set holds shared memory
        rows = datasets.Dataset.from_dict({"x": [vector(number).tolist() for number in range(COUNT)]})
        data = change(rows.to_iterable_dataset(num_shards=2 * SHARDS)).with_format("torch")
        return data.shard(num_shards=shards, index=shard)

    return make


def only_x(samples: Any) -> torch.Tensor:
    return torch.stack([sample["x"] for sample in samples])


@pytest.mark.feature("Streams", "IterableDataset of Hugging Face")
def test_iterable_datasets_of_hugging_face(train: Train) -> None:
    is_the_same_after_losses(of_datasets(), train, collate=only_x)


def test_iterable_datasets_of_hugging_face_that_are_mapped(train: Train) -> None:
    """Before datasets 5, their state leaves out the rest of the shard that is being read."""
    make = of_datasets(lambda data: data.map(lambda row: {"x": row["x"]}))
    if int(version("datasets").partition(".")[0]) >= 5:
        is_the_same_after_losses(make, train, collate=only_x)
        return
    ended = train(script(make, collate=only_x), ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert "from its own state_dict()" in ended.because
    is_the_same_after_losses(make, train, collate=only_x, state_every=0)


@pytest.mark.feature("Streams", "its shuffle buffer, with its state", how="refused")
def test_a_shuffle_buffer_of_hugging_face_is_refused_with_the_remedy(train: Train) -> None:
    """Its state leaves out what the buffer holds."""
    make = of_datasets(lambda data: data.shuffle(seed=3, buffer_size=8))
    ended = train(script(make, collate=only_x), ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert "from its own state_dict()" in ended.because
    assert "state_every=0" in ended.because


@pytest.mark.feature("Streams", "its shuffle buffer, read from the beginning (state_every=0)")
def test_a_shuffle_buffer_of_hugging_face_that_is_read_from_the_beginning(train: Train) -> None:
    make = of_datasets(lambda data: data.shuffle(seed=3, buffer_size=8))
    is_the_same_after_losses(make, train, collate=only_x, state_every=0)


# -- torchdata
class Part(torch.utils.data.IterableDataset[Any]):
    def __init__(self, shard: int, shards: int) -> None:
        self._numbers = Numbers(shard, shards, COUNT)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for index, number in enumerate(self._numbers):
            if worker is None or index % worker.num_workers == worker.id:
                yield vector(number)


class Mapped:
    def __init__(self, shard: int, shards: int) -> None:
        self._numbers = range(shard, COUNT, shards)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return vector(self._numbers[index]) + torch.rand(WIDTH)


@pytest.mark.feature("Streams", "StatefulDataLoader of torchdata, with and without processes")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loaders_of_torchdata_over_a_stream(workers: int, train: Train) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make(shard: int, shards: int) -> Any:
        return loaders.StatefulDataLoader(
            Part(shard, shards), batch_size=MICRO, num_workers=workers, drop_last=True, in_order=True
        )

    is_the_same_after_losses(make, train, batched=True)


def test_stateful_data_loaders_of_torchdata_over_a_shuffled_map(train: Train) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make(shard: int, shards: int) -> Any:
        return loaders.StatefulDataLoader(Mapped(shard, shards), batch_size=MICRO, shuffle=True, drop_last=True)

    is_the_same_after_losses(make, train, batched=True)


# -- WebDataset
@pytest.fixture
def archives(tmp_path: Path) -> list[str]:
    """Two archives for each data shard."""
    paths = []
    for archive in range(2 * SHARDS):
        paths.append(str(tmp_path / f"{archive:02}.tar"))
        with tarfile.open(paths[-1], "w") as file:
            for number in range(archive, COUNT, 2 * SHARDS):
                content = vector(number).numpy().tobytes()
                info = tarfile.TarInfo(f"{number:04}.bin")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    return paths


def from_bytes(sample: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(sample[0]), dtype=torch.float32)


@pytest.mark.feature("Streams", "WebDataset")
def test_archives_of_webdataset(archives: list[str], train: Train) -> None:
    webdataset = pytest.importorskip("webdataset")

    def make(shard: int, shards: int) -> Any:
        data = webdataset.WebDataset(archives[shard::shards], shardshuffle=False, nodesplitter=lambda urls: urls)
        return data.to_tuple("bin").map(from_bytes)

    is_the_same_after_losses(make, train)


def test_a_shuffle_of_webdataset_without_a_seed_is_refused(archives: list[str], train: Train) -> None:
    webdataset = pytest.importorskip("webdataset")

    def make(shard: int, shards: int) -> Any:
        data = webdataset.WebDataset(archives[shard::shards], shardshuffle=False, nodesplitter=lambda urls: urls)
        return data.shuffle(100, initial=100).to_tuple("bin").map(from_bytes)

    ended = train(script(make), ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert "does not give the same samples when it is read again" in ended.because
