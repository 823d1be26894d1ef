"""torch.distributed.checkpoint on the durable tier: users' save, load and async_save code, other world sizes, damage."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, LayoutMismatch, NoUsableCheckpoint
from rackrun.checkpoint.dcp.dcp_storage import RackrunStorageReader, RackrunStorageWriter
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.safetensors_image import TensorEntry, plan_image, write_image
from rackrun.protocol import crash_points
from tests.checkpoint.dcp_ranks import differences
from tests.checkpoint.storage import killed_at
from tests.conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*, assuming the intent:UserWarning")

RANKS = Path(__file__).parents[1] / "dcp_ranks.py"
TORCHRUN_S = 90
BEFORE_WHOLE = [
    "durable.directory", "durable.chunk", "durable.data_synced", "durable.data_named", "durable.read_back",
    "durable.fragment_synced", "durable.fragment_named", "durable.manifest_synced", "durable.manifest_named", "durable.directory_synced",
]  # fmt: skip


def state_of(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.randn(7, generator=generator)},
        "layers": [{"scale": torch.full((3,), float(seed))}, {"scale": torch.zeros(0, 4)}],
        "lr": 0.1 * seed,
        "betas": (0.9, 0.999),
        "note": f"seed {seed}",
        "nothing": None,
    }


def save(state: dict[str, Any], directory: Path, **options: Any) -> None:
    dcp.save(state, checkpoint_id=directory, storage_writer=RackrunStorageWriter(**options))


def load(directory: Path, into: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    state = state_of(99) if into is None else into
    dcp.load(state, checkpoint_id=directory, storage_reader=RackrunStorageReader(**options))
    return state


def refusal(directory: Path, into: dict[str, Any] | None = None) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        load(directory, into)
    return why(raised.value)


def why(raised: CheckpointException) -> BaseException:
    (failure,) = raised.failures.values()
    return failure[0]


def shard_in(directory: Path) -> Path:
    (shard,) = directory.glob("gen-*/*.safetensors")
    return shard


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


# -- real ranks
def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(RANKS), *arguments], env=environment, capture_output=True, text=True, timeout=TORCHRUN_S
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved before one of them was killed."""
    folder = tmp_path_factory.mktemp("dcp")
    ran = torchrun(2, "save", str(folder))
    assert (folder / "died").exists(), ran.stderr[-5000:]
    assert ran.returncode != 0
    return folder


@pytest.mark.stories
def test_another_world_size_loads_what_fsdp2_saved_bit_for_bit_also_asynchronously(saved: Path) -> None:
    ran = torchrun(3, "load", str(saved))
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert sorted(path.name for path in saved.glob("loaded-*")) == ["loaded-0", "loaded-1", "loaded-2"]


@pytest.mark.stories
@pytest.mark.parametrize(("directory", "expected"), [("run/gen-000000000000", "0.pt"), ("run", "1.pt")])
def test_one_process_loads_what_two_ranks_saved_bit_for_bit(saved: Path, directory: str, expected: str) -> None:
    wanted = torch.load(saved / expected, weights_only=True)
    assert differences(load(saved / directory, zeroed(wanted)), wanted) == []


def test_a_rank_that_is_killed_while_it_saves_leaves_no_checkpoint(saved: Path) -> None:
    names = sorted(os.listdir(saved / "run"))
    assert [name for name in names if not name.startswith(".tmp-gen-2-")] == ["gen-000000000000", "gen-000000000001"]
    assert len(names) == 3


def test_the_save_after_one_that_was_killed_does_not_mix_with_it(saved: Path) -> None:
    save(state_of(5), saved / "run")
    assert differences(load(saved / "run"), state_of(5)) == []
    (saved / "run" / "gen-000000000003").rename(saved / "apart")


def zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return [zeroed(item) for item in value] if isinstance(value, list) else value


# -- what is saved is loaded
def test_a_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "run")
    assert differences(load(tmp_path / "run"), state_of(1)) == []


def test_bits_are_kept_whatever_the_dtype_and_the_strides(tmp_path: Path) -> None:
    bits = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float64,
        torch.int64,
        torch.complex64,
    )
    state = {str(dtype): bits.view(dtype) for dtype in dtypes}
    state |= {
        "bool": bits > 127,
        "scalar": torch.tensor(7),
        "strided": bits.view(torch.int16).t()[1::2],
        "none": bits[:0],
    }
    save(dict(state), tmp_path / "run")
    found = load(tmp_path / "run", {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    for name, tensor in state.items():
        assert found[name].dtype is tensor.dtype
        assert bytes_of(found[name]) == bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    bits: list[int] = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return bits


def test_a_state_is_rebuilt_from_the_checkpoint_alone(tmp_path: Path) -> None:
    save(state_of(2), tmp_path / "run")
    rebuilt = _load_state_dict_from_keys(checkpoint_id=tmp_path / "run", storage_reader=RackrunStorageReader())
    assert differences(rebuilt, state_of(2)) == []


def test_a_dtype_that_differs_is_converted_as_torch_does(tmp_path: Path) -> None:
    save({"w": torch.arange(5.0)}, tmp_path / "run")
    found = load(tmp_path / "run", {"w": torch.zeros(5, dtype=torch.bfloat16)})
    assert found["w"].tolist() == [0, 1, 2, 3, 4]


def test_the_files_are_safetensors_with_a_manifest(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    save(state_of(1), tmp_path / "run")
    tensors = safetensors.load_file(shard_in(tmp_path / "run"))
    assert torch.equal(tensors["model.weight"], state_of(1)["model"]["weight"])
    assert DurableStore(tmp_path, "run").verify(0).ok


# -- checkpoints
def test_every_save_into_a_directory_is_a_checkpoint_and_a_load_takes_the_newest(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        save(state_of(seed), tmp_path / "run")
    assert differences(load(tmp_path / "run"), state_of(3)) == []
    assert differences(load(tmp_path / "run" / "gen-000000000001"), state_of(2)) == []


def test_a_checkpoint_can_be_named_and_is_never_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "run" / "gen-000000000500"
    save(state_of(1), directory)
    with pytest.raises(CheckpointException) as raised:
        save(state_of(2), directory)
    assert "is not replaced" in str(why(raised.value))
    save(state_of(3), directory.parent)
    assert [info.number for info in DurableStore(tmp_path / "deep", "run").checkpoints()] == [501, 500]


def test_a_folder_that_is_no_checkpoint_of_its_number_does_not_raise_the_numbers(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "run")
    (tmp_path / "run" / "gen-000000000001").mkdir()
    shutil.copytree(tmp_path / "run" / "gen-000000000000", tmp_path / "run" / "gen-000000009999")
    save(state_of(2), tmp_path / "run")
    assert [info.number for info in DurableStore(tmp_path, "run").checkpoints()] == [2, 0]
    assert differences(load(tmp_path / "run"), state_of(2)) == []


def test_only_so_many_are_kept_if_that_is_asked_for(tmp_path: Path) -> None:
    for seed in range(4):
        save(state_of(seed), tmp_path / "run", keep=1)
    assert len(list((tmp_path / "run").glob("gen-*"))) <= 2  # the newest, and the newest that is verified
    assert differences(load(tmp_path / "run"), state_of(3)) == []


def test_a_load_of_nothing_says_so(tmp_path: Path) -> None:
    for directory in (tmp_path / "nowhere", tmp_path, tmp_path / "run" / "gen-000000000001"):
        assert isinstance(refusal(directory), NoUsableCheckpoint)


# -- damage
def test_a_flipped_byte_is_refused_by_the_names_of_tensor_and_chunk(tmp_path: Path) -> None:
    state = {"first": torch.zeros(2**18), "wanted": torch.ones(2**18 + 5), "z": torch.zeros(2**18)}
    save(dict(state), tmp_path / "run")
    shard = shard_in(tmp_path / "run")
    flip(shard, shard.stat().st_size // 2)
    problem = refusal(tmp_path / "run", {name: torch.empty_like(tensor) for name, tensor in state.items()})
    assert isinstance(problem, IntegrityError)
    assert "wanted" in str(problem)
    assert "chunk 1 of" in str(problem)


def test_a_bit_flipped_anywhere_is_refused(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "run")
    files = [path for path in (tmp_path / "run").glob("gen-*/*") if path.name != "VERIFIED.json"]
    rng = random.Random(5)
    assert len(files) == 3
    for path in files:
        for _ in range(8):
            at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
            flip(path, at, bit)
            assert isinstance(refusal(tmp_path / "run"), CheckpointError)
            flip(path, at, bit)
    assert differences(load(tmp_path / "run"), state_of(1)) == []


def test_the_one_before_is_loaded_when_the_newest_is_not_whole(tmp_path: Path) -> None:
    for seed in (1, 2):
        save(state_of(seed), tmp_path / "run")
    (tmp_path / "run" / "gen-000000000001" / "MANIFEST.json").unlink()
    assert differences(load(tmp_path / "run"), state_of(1)) == []


@pytest.mark.parametrize("point", BEFORE_WHOLE)
def test_a_crash_before_the_checkpoint_is_whole_leaves_the_one_before(tmp_path: Path, point: str) -> None:
    save(state_of(1), tmp_path / "run")
    assert killed_at(point, lambda: save(state_of(2), tmp_path / "run"))
    assert differences(load(tmp_path / "run"), state_of(1)) == []
    save(state_of(3), tmp_path / "run")
    assert differences(load(tmp_path / "run"), state_of(3)) == []


def test_every_crash_point_of_a_save_is_known_here() -> None:
    after = ["durable.renamed", "durable.parent_synced"]
    assert [name for name in crash_points.CRASH_POINTS if name.startswith("durable.")] == [*BEFORE_WHOLE, *after]


# -- nothing is unpickled
class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.kill, (os.getpid(), signal.SIGTERM))


class Told(Exception):
    pass


def test_an_item_that_would_run_code_is_refused_by_its_name_and_does_not_run(tmp_path: Path) -> None:
    save({"plain": 1, "bomb": Bomb()}, tmp_path / "run")
    problem = refusal(tmp_path / "run", {"bomb": 0})
    assert isinstance(problem, CheckpointError)
    assert "'bomb'" in str(problem)
    assert "unsafe_pickle" in problem.remedy
    assert load(tmp_path / "run", {"plain": 0})["plain"] == 1


def test_it_runs_only_for_those_who_ask_for_it(tmp_path: Path) -> None:
    def handler(number: int, frame: object) -> None:
        raise Told

    save({"bomb": Bomb()}, tmp_path / "run")
    former = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(CheckpointException) as raised:
            load(tmp_path / "run", {"bomb": 0}, unsafe_pickle=True)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert isinstance(why(raised.value), Told)


# -- what others have written
def by_hand(root: Path, ranks: Sequence[dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]]) -> None:
    """A checkpoint as the runtime writes it: tensor, its global shape, its offsets; a plain part of its own."""
    plain = msgspec.msgpack.encode({"not": "torch's"})
    writer = DurableStore(root, "run").writer(7, 7, 1, len(ranks))
    for rank, tensors in enumerate(ranks):
        layout = plan_image(
            [
                TensorEntry(name, str(part.dtype).removeprefix("torch."), shape, Box(offsets, tuple(part.shape)))
                for name, (part, shape, offsets) in tensors.items()
            ],
            len(plain),
        )
        payload = memoryview(bytearray(layout.total_bytes))
        write_image(layout, {name: part for name, (part, _, _) in tensors.items()}, plain, payload)
        assert writer.write_shard(rank, payload, layout.layout_hash, chunk_crcs(payload))
    assert writer.finish()


def test_a_checkpoint_of_the_runtime_is_read_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    whole = torch.randn(5, 3)
    own = torch.tensor([1.0, 2.0])
    by_hand(
        tmp_path,
        [
            {"model/w": (whole[:3], (5, 3), (0, 0)), "model/b": (own, (2,), (0,))},
            {"model/w": (whole[3:], (5, 3), (3, 0)), "model/b": (own, (2,), (0,))},
        ],
    )
    state = {"model/w": torch.zeros(5, 3), "model/b": torch.zeros(2)}
    assert differences(load(tmp_path / "run", state), {"model/w": whole, "model/b": own}) == []


@pytest.mark.parametrize("offset", [1, 3])
def test_parts_that_leave_a_gap_or_overlap_are_refused_by_the_tensors_name(tmp_path: Path, offset: int) -> None:
    rows = torch.zeros(2, 3)
    by_hand(tmp_path, [{"w": (rows, (5, 3), (0, 0))}, {"w": (rows, (5, 3), (offset, 0)), "v": (rows, (2, 3), (0, 0))}])
    problem = refusal(tmp_path / "run", {"w": torch.zeros(5, 3)})
    assert isinstance(problem, LayoutMismatch)
    assert "'w'" in str(problem)


def test_parts_that_overlap_and_leave_no_gap_are_refused(tmp_path: Path) -> None:
    by_hand(tmp_path, [{"w": (torch.zeros(3), (4,), (0,))}, {"w": (torch.zeros(2), (4,), (2,))}])
    assert "overlap" in str(refusal(tmp_path / "run", {"w": torch.zeros(4)}))


# -- what cannot be
def test_a_cached_plan_is_refused_because_it_names_an_old_checkpoint(tmp_path: Path) -> None:
    class Cached(DefaultSavePlanner):
        """A cache of its own: torch keeps them by the name of the class."""

    for again in (False, True):
        planner = Cached(enable_plan_caching=True)
        if again:
            with pytest.raises(CheckpointException) as raised:
                dcp.save(state_of(1), storage_writer=RackrunStorageWriter(tmp_path / "run"), planner=planner)
            assert "enable_plan_caching" in str(why(raised.value))
        else:
            dcp.save(state_of(1), storage_writer=RackrunStorageWriter(tmp_path / "run"), planner=planner)


@pytest.mark.parametrize("whose", [(0,), (1,), (0, 1)])
def test_a_cached_plan_is_refused_whichever_rank_it_is_of(tmp_path: Path, whose: tuple[int, ...]) -> None:
    plans = [SavePlan([], usable=rank not in whose) for rank in range(2)]
    with pytest.raises(CheckpointError, match="a cached plan"):
        RackrunStorageWriter(tmp_path / "run").prepare_global_plan(plans)


def test_ranks_that_do_not_talk_to_each_other_are_refused(tmp_path: Path) -> None:
    writer = RackrunStorageWriter(tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot agree"):
        dcp.save(state_of(1), storage_writer=writer, use_collectives=False)


@pytest.mark.parametrize("name", ["a b", "step=3", "é"])
def test_a_directory_that_no_job_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointException) as raised:
        save(state_of(1), tmp_path / name)
    assert "cannot be the name" in str(why(raised.value))


def test_storage_that_takes_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointException) as raised:
        save(state_of(1), tmp_path / "file" / "below" / "run")
    assert isinstance(why(raised.value), CheckpointError)


def test_a_tensor_that_no_image_holds_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as raised:
        save({"rackrun.plain": torch.zeros(3)}, tmp_path / "run")
    assert isinstance(why(raised.value), LayoutMismatch)
