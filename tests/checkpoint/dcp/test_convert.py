"""`rackctl ckpt convert`: every layout to every other, bit for bit, as torch's and Hugging Face's own readers see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from rackrun.checkpoint import CheckpointManager
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError
from rackrun.checkpoint.dcp.dcp_storage import RackrunStorageReader, RackrunStorageWriter
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.offline.convert import convert
from rackrun.ctl.ckpt.ckpt_commands import ckpt
from rackrun.ctl.ckpt.export_names import model_names
from rackrun.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def tensors(seed: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.0.weight": torch.randn(5, 6),
        "model.0.bias": torch.randn(5).to(torch.bfloat16),
        "model.norm": torch.tensor([float("nan"), -0.0, float("inf")]),
        "model.empty": torch.empty(0, 4),
        "model.mask": torch.tensor([True, False, True]),
        "model.fp8": torch.randn(4, 3).to(torch.float8_e4m3fn),
        "model.count": torch.tensor(41, dtype=torch.int64),
    }


def bits(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (one.dtype, one.shape, one.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, one in state.items()
    }


def made(layout: str, place: Path) -> None:
    """With the layout's own tools."""
    state = tensors()
    if layout == "hf":
        place.mkdir()
        names = sorted(state)
        files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
        for file, held in files.items():
            save_file({name: state[name] for name in held}, place / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": {n: f for f, held in files.items() for n in held}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        writer = dcp.FileSystemWriter(str(place)) if layout == "dcp" else RackrunStorageWriter(place)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)


def read(layout: str, place: Path) -> dict[str, torch.Tensor]:
    if layout == "hf":
        weight_map = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
        found: dict[str, torch.Tensor] = {}
        for file in set(weight_map.values()):
            found |= load_file(place / file)
        assert found.keys() == weight_map.keys()
        return found
    into = {name: torch.empty_like(one) for name, one in tensors().items()}
    reader = dcp.FileSystemReader(str(place)) if layout == "dcp" else RackrunStorageReader(place)
    dcp.load(into, storage_reader=reader, no_dist=True)
    return into


@pytest.mark.parametrize("target", ["rackrun", "dcp", "hf"])
@pytest.mark.parametrize("source", ["rackrun", "dcp", "hf"])
def test_every_layout_becomes_every_other_bit_for_bit(tmp_path: Path, source: Any, target: Any) -> None:
    made(source, tmp_path / "in")
    done = convert(tmp_path / "in", tmp_path / "out", target, file_bytes_max=100, unsafe_pickle=source == "dcp")
    assert (done.source, done.target, done.tensors) == (source, target, len(tensors()))
    assert bits(read(target, tmp_path / "out")) == bits(tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_nested_state_with_an_optimizer_goes_to_rackrun_and_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(tmp_path / "a")), no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", "rackrun", unsafe_pickle=True)
    convert(tmp_path / "b", tmp_path / "c", "dcp")
    again = nn.Linear(3, 2)
    other = torch.optim.AdamW(again.parameters())
    again(torch.zeros(1, 3)).sum().backward()
    other.step()
    into: dict[str, Any] = {"model": again.state_dict(), "optim": other.state_dict(), "step": 0}
    dcp.load(into, storage_reader=dcp.FileSystemReader(str(tmp_path / "c")), no_dist=True)
    assert into["step"] == 3
    assert bits(into["model"]) == bits(model.state_dict())
    assert bits(into["optim"]["state"][0]) == bits(optimizer.state_dict()["state"][0])


def test_pickles_are_read_only_when_asked_for(tmp_path: Path) -> None:
    made("dcp", tmp_path / "in")
    with pytest.raises(UsageError, match="--unsafe-pickle"):
        convert(tmp_path / "in", tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_one_model_of_several_is_chosen_by_its_name(tmp_path: Path) -> None:
    generator, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    with CheckpointManager(tmp_path / "in", memory=None) as one:
        one.prepare({"models": nn.ModuleDict({"gen": generator, "critic": critic}), "step": {"n": 1}})
        assert one.save(1, durable=True).durable.result()
    out = tmp_path / "out"
    done = CliRunner().invoke(ckpt, ["convert", str(tmp_path / "in"), str(out), "--to", "hf", "--module", "models/gen"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert bits(load_file(next(out.glob("*.safetensors")))) == bits(generator.state_dict())
    done = CliRunner().invoke(ckpt, ["convert", str(tmp_path / "in"), str(out), "--to", "hf"])
    assert "is there already" in str(done.exception)


def test_names_of_a_part_of_a_module() -> None:
    held = ["models/param/module.gen.weight", "models/param/module.critic.weight", "other/param/weight"]
    assert model_names(held, "models.gen") == {held[0]: "weight"}
    assert model_names(held, "models.critic") == {held[1]: "weight"}
    assert model_names(["gen.weight", "critic.weight"], "gen") == {"gen.weight": "weight"}
    with pytest.raises(UsageError, match="critic, gen"):
        model_names(held, "models.no")


@pytest.mark.parametrize("harm", ["flip a length", "cut short", "a file is missing", "outside", "deep", "not text"])
def test_a_set_that_is_damaged_or_hostile_is_refused_and_nothing_is_left(tmp_path: Path, harm: str) -> None:
    made("hf", tmp_path / "in")
    file, index = (
        tmp_path / "in" / name for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    )
    data = file.read_bytes()
    if harm == "flip a length":
        file.write_bytes(b"\xff" * 8 + data[8:])
    elif harm == "cut short":
        file.write_bytes(data[:-3])
    elif harm == "a file is missing":
        file.unlink()
    elif harm == "outside":
        index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    elif harm == "deep":
        index.write_text("[" * 100_000)
    else:
        index.write_bytes(b"\xff\xfe")
    with pytest.raises(IntegrityError):
        convert(tmp_path / "in", tmp_path / "out", "rackrun")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_was_written_wrong_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    made("hf", tmp_path / "in")
    real = dcp.FileSystemWriter.write_data

    def wrong(self: Any, plan: Any, planner: Any) -> Any:
        resolve = planner.resolve_data
        planner.resolve_data = lambda item: resolve(item) + 1 if item.index.fqn == "model.count" else resolve(item)
        return real(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", wrong)
    with pytest.raises(CheckpointError, match=r"model\.count"):
        convert(tmp_path / "in", tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()
    assert DurableStore(tmp_path, "out").checkpoints() == []
