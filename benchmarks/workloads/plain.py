"""Seven kinds of script as people write them for torchrun, none of which knows rackrun: plain.py --kind KIND --steps N --marks FILE --folder DIR.

Each keeps a checkpoint every few steps (all but ``nothing``, which begins again) and marks every step that it has finished.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import SEED, Marks, Noise, ResidualMLP, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, LAYERS, BATCH, EVERY = 64, 4, 4, 10
KINDS = ("ddp", "workers", "fsdp", "alone", "nothing", "accelerate", "trainer")


def batches(steps: int, rank: int, size: int) -> list[Any]:
    data = Noise(WIDTH)
    return [
        torch.utils.data.default_collate([data[(step * size + rank) * BATCH + one] for one in range(BATCH)])
        for step in range(steps)
    ]


class Saved:
    """A checkpoint in one file, for each rank or for rank 0 alone."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, writes: bool) -> None:
        self._path, self._model, self._optimizer, self._writes = path, model, optimizer, writes

    def first(self) -> int:
        """Load what is there, and return the step to begin with."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"]) + 1

    def save(self, step: int) -> None:
        if self._writes and step % EVERY == EVERY - 1:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": step}
            part = self._path.with_suffix(".part")
            torch.save(state, part)
            part.replace(self._path)


def loop(kind: str, args: argparse.Namespace) -> None:
    """A loop of the script's own: DDP, DDP with loading processes, FSDP2, each rank alone, DDP without a checkpoint."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    bare = ResidualMLP(WIDTH, LAYERS)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(bare)
        model: nn.Module = bare
    else:
        model = bare if kind == "alone" else DDP(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = kind in ("fsdp", "alone")
    saved = Saved(
        args.folder / (f"saved-{rank}.pt" if own else "saved.pt"),
        model,
        optimizer,
        writes=kind != "nothing" and (own or rank == 0),
    )
    first = saved.first()
    if own:  # ranks may have saved different steps
        least = torch.tensor(first)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        first = int(least)
    data: Iterable[Any] = batches(args.steps, rank, size)[first:]
    if kind == "workers":
        samples = TensorDataset(*(torch.cat(part) for part in zip(*batches(args.steps, 0, 1), strict=True)))
        sampler: Any = DistributedSampler(samples, shuffle=False)
        data = list(DataLoader(samples, BATCH // size, sampler=sampler, num_workers=1))[first:]
    marks = Marks(args.marks)
    for step, batch in enumerate(data, start=first):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saved.save(step)
        marks.write(rank=rank, step=step, loss=loss.item())
    dist.barrier()
    dist.destroy_process_group()


def accelerate(args: argparse.Namespace) -> None:
    """Accelerate's own loop, with its own checkpoints."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(SEED)
    model: Any = ResidualMLP(WIDTH, LAYERS)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    position, first = args.folder / "position", 0
    if position.exists():
        first = int(position.read_text()) + 1
        accelerator.load_state(str(args.folder / f"state-{first - 1}"))
    marks, rank = Marks(args.marks), accelerator.process_index
    for step, batch in enumerate(batches(args.steps, rank, accelerator.num_processes)[first:], start=first):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            accelerator.save_state(str(args.folder / f"state-{step}"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                position.write_text(str(step))
        marks.write(rank=rank, step=step, loss=loss.item())
    accelerator.end_training()


def trainer(args: argparse.Namespace) -> None:
    """transformers' Trainer, which resumes from its newest checkpoint."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = ResidualMLP(WIDTH, LAYERS)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.body(x), labels)}

    marks = Marks(args.marks)

    class Marking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            marks.write(rank=dist.get_rank(), step=state.global_step - 1, loss=0.0)

    samples = [{"x": x, "labels": y} for x, y in (Noise(WIDTH)[index] for index in range(args.steps * BATCH))]
    arguments = TrainingArguments(
        output_dir=str(args.folder / "output"),
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=args.steps,
        save_steps=EVERY,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(SEED)
    one = Trainer(Model(), arguments, train_dataset=samples, callbacks=[Marking()])
    folders = (args.folder / "output").glob("checkpoint-*")
    whole = [folder for folder in folders if (folder / "trainer_state.json").exists()]
    one.train(resume_from_checkpoint=bool(whole))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    own: dict[str, Callable[[argparse.Namespace], None]] = {"accelerate": accelerate, "trainer": trainer}
    if args.kind in own:
        own[args.kind](args)
    else:
        loop(args.kind, args)


if __name__ == "__main__":
    main()
