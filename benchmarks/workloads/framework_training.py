"""One rank of a training for ``framework_overhead.py``: framework_training.py FRAMEWORK KIND FOLDER WARM BLOCK_STEPS BLOCKS LAYERS.

KIND: ``stock`` or ``elastic``. The transformer has LAYERS layers of width 256, and sequences have 64 tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

VOCABULARY, LENGTH, WIDTH, HEADS, MICRO = 1000, 64, 256, 4, 4
ON_CPU = Path(__file__).resolve().parents[2] / "tests" / "frameworks" / "scripts"
"""What lets Megatron-Core and torchtitan compute on CPUs."""


class Turns:
    """Called by a rank at the beginning and at the end of each step: it waits for its turn, and writes what a block took."""

    def __init__(self, kind: str, folder: Path, warm: int, steps: int, blocks: int) -> None:
        """``warm``: the steps before the first block. ``steps``: those of a block."""
        self.kind, self.folder, self._warm, self._steps = kind, folder, warm, steps
        self.total = warm + steps * blocks
        self._began = (0.0, 0.0)

    def begin(self, step: int) -> None:
        """Wait before a block's first step until the file ``turn-KIND-NUMBER`` is there."""
        block, of_block = divmod(step - self._warm, self._steps)
        if of_block == 0 and step >= self._warm:
            while not (self.folder / f"turn-{self.kind}-{block}").exists():
                time.sleep(0.005)
            self._began = time.perf_counter(), time.process_time()

    def end(self, done: int) -> None:
        """Write after a block's last step the seconds of one of its steps. ``done``: the number of steps so far."""
        block, of_block = divmod(done - self._warm, self._steps)
        if of_block == 0 and block > 0:
            took = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            part = self.folder / f"part-{self.kind}-{block - 1}-{os.environ['RANK']}"
            part.write_text(json.dumps([seconds / self._steps for seconds in took]))
            part.rename(self.folder / f"done-{self.kind}-{block - 1}-{os.environ['RANK']}")


def model(layers: int) -> Any:
    """Return a GPT-2 of this many layers: 4 have 3.5 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def samples() -> list[dict[str, Any]]:
    """Return sequences of 64 tokens."""
    return [{"input_ids": (ids := torch.randint(0, VOCABULARY, (LENGTH,))), "labels": ids} for _ in range(512)]


def train_hf(turns: Turns, layers: int) -> None:
    """Train with transformers' Trainer."""
    import transformers
    from transformers import TrainerCallback, TrainingArguments

    trainers = importlib.import_module("rackrun.hf" if turns.kind == "elastic" else "transformers")
    transformers.logging.set_verbosity_error()

    class TakesTurns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            turns.begin(state.global_step)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            turns.end(state.global_step)

    arguments = TrainingArguments(
        output_dir=str(turns.folder / "unused"),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=2,
        max_steps=turns.total,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainers.Trainer(model=model(layers), args=arguments, train_dataset=samples(), callbacks=[TakesTurns()]).train()


def train_lightning(turns: Turns, layers: int) -> None:
    """Train with Lightning's Trainer, which logs each loss."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model(layers)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    class TakesTurns(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, _: Any, __: Any, index: int) -> None:
            if index % 2 == 0:
                turns.begin(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, _: Any, __: Any, ___: Any, index: int) -> None:
            if index % 2 == 1:
                turns.end(trainer.global_step)

    strategy: Any = "ddp"
    if turns.kind == "elastic":
        strategy = importlib.import_module("rackrun.lightning").Elastic()
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=turns.total,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[TakesTurns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = samples()
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=MICRO, shuffle=True))


def train_megatron(turns: Turns, layers: int) -> None:
    """Train a GPT of Megatron-Core in a loop of the script's own."""
    sys.path.insert(0, str(ON_CPU))
    importlib.import_module("megatron_on_cpu")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    import rackrun

    data: Any = [one["input_ids"] for one in samples()]
    mask = torch.triu(torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool), 1)[None, None]
    batch = 2 * MICRO * int(os.environ["WORLD_SIZE"])

    def build() -> tuple[Any, Any, Any]:
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
        )
        inner = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=5e-5, min_lr=5e-6, clip_grad=1.0), [model]
        )
        scheduler = OptimizerParamScheduler(optimizer, 0.0, 5e-5, 5e-6, 8, 8000, "linear", 0.01, 0.01, 80, "constant")
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return model, optimizer, scheduler

    def forward_step(iterator: Any, model: Any) -> Any:
        words = next(iterator)
        tokens, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        output = model(tokens, torch.arange(LENGTH - 1).expand_as(tokens), mask, labels=labels)
        return output, lambda losses: (losses.float().mean(), losses.detach().float().mean())

    def stock() -> None:
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        model, optimizer, scheduler = build()
        sampler: Any = torch.utils.data.DistributedSampler(data)
        batches: Any = iter([])
        for step in range(turns.total):
            turns.begin(step)
            taken: list[Any] = []
            while len(taken) < 2:
                if (found := next(batches, None)) is None:
                    batches = iter(torch.utils.data.DataLoader(data, batch_size=MICRO, sampler=sampler))
                else:
                    taken.append(found)
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(taken),
                model=[model],
                num_microbatches=2,
                seq_length=LENGTH - 1,
                micro_batch_size=MICRO,
            )
            optimizer.step()
            scheduler.step(increment=batch)
            loss = sum(losses)
            torch.distributed.all_reduce(loss)
            loss.item()
            turns.end(step + 1)

    @rackrun.elastic(global_batch_size=batch, micro_batch_size=MICRO, seed=7)
    def elastic(run: rackrun.Run) -> None:
        from rackrun import megatron

        megatron.initialize(run)
        model, optimizer, scheduler = build()
        training = megatron.track(run, [model], optimizer, scheduler)
        loader = run.loader(data)

        @run.step
        def train_step(step: rackrun.Step) -> Any:
            return training.train_step(step, forward_step, loader, seq_length=LENGTH - 1)

        for step in run.steps(turns.total):
            turns.begin(step)
            train_step(step)
            turns.end(step + 1)

    stock() if turns.kind == "stock" else elastic()


def train_titan(turns: Turns, layers: int) -> None:
    """Train torchtitan's llama3 debug model (width 256) with FSDP2."""
    sys.path[:0] = [str(ON_CPU), str(ON_CPU.parents[2])]
    importlib.import_module("titan_on_cpu")
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry

    from tests.frameworks.titan_assets import make_assets

    assets = make_assets(turns.folder / f"assets-{turns.kind}-{os.environ['RANK']}", documents=2000)
    trainers = importlib.import_module("rackrun.titan" if turns.kind == "elastic" else "torchtitan.trainer")
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    options = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    trainer = trainers.Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))),
        hf_assets_path=str(assets / "tokenizer"),
        dump_folder=str(turns.folder / f"out-{turns.kind}"),
        model_spec=spec,
        optimizer=OptimizersContainer.Config(
            param_groups=[ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=options)]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=MICRO,
            global_batch_size=2 * MICRO * int(os.environ["WORLD_SIZE"]),
            seq_len=LENGTH,
            steps=turns.total,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(assets / "texts")),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    ).build()
    collect = trainer.gc_handler.run

    def between(step: int) -> None:
        """Called by the loop at the beginning of each step, of which the first is 1."""
        turns.end(step - 1)
        turns.begin(step - 1)
        collect(step)

    trainer.gc_handler.run = between
    trainer.train()
    turns.end(turns.total)


FRAMEWORKS = {"hf": train_hf, "lightning": train_lightning, "megatron": train_megatron, "titan": train_titan}

if __name__ == "__main__":
    torch.set_num_threads(1)
    framework, kind, folder = sys.argv[1:4]
    warm, steps, blocks, layers = map(int, sys.argv[4:])
    FRAMEWORKS[framework](Turns(kind, Path(folder), warm, steps, blocks), layers)
