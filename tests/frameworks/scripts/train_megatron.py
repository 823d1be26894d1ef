"""Trains a small GPT of Megatron-Core: the weights, losses and norms of each rank go to a file.

``train_megatron.py FOLDER KIND KILL ARGUMENTS``. KIND: ``stock`` (Megatron alone), ``elastic``. KILL:
``STEP:RANK:SIGNAL:WHERE``, once for the job, or several with commas between; "": nobody. At ``entry`` STEP counts how
often the process has entered ``main``. ARGUMENTS, as JSON: ``tp``, ``distributed`` (the optimizer),
``instances`` (of it), ``bits`` (32, 16 for bf16), ``fp16``, ``overlap``, ``dropout``, ``tokens``
(loss per token), ``steps``, ``evaluate`` (after every so many steps), ``by_hand`` (a step function that calls Megatron
itself).
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import megatron_on_cpu  # noqa: F401 - before Megatron is imported
import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.optim.optimizer import register_optimizer_step_post_hook

import rackrun

FOLDER, KIND, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
GIVEN = {"tp": 1, "distributed": False, "bits": 32, "overlap": False, "dropout": 0.0, "fp16": False, "steps": 6}
GIVEN |= {"evaluate": 0, "by_hand": False, "instances": 1, "tokens": False} | json.loads(sys.argv[4])
BATCH, MICRO, LENGTH, WORDS, SEED = 8, 2, 8, 64, 7
SIZES = {"tensor_model_parallel_size": GIVEN["tp"], "num_distributed_optimizer_instances": GIVEN["instances"]}
DTYPE = torch.float16 if GIVEN["fp16"] else torch.bfloat16 if GIVEN["bits"] == 16 else torch.float32


def strike(where):
    for number, kill in enumerate(KILL.split(",") if KILL else ()):
        step, rank, signalled, place = kill.split(":")
        struck = FOLDER / ("struck" if not number else f"struck-{number}")
        if (place, int(step), int(rank)) == (where, strike.step, dist.get_rank()) and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{signalled}"))


strike.step = strike.entries = 0


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randint(0, WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


def build():
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bf16=DTYPE is torch.bfloat16,
        fp16=DTYPE is torch.float16,
        params_dtype=DTYPE,
        attention_dropout=GIVEN["dropout"],
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=GIVEN["tp"],
        calculate_per_token_loss=GIVEN["tokens"],
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH)
    model = model if DTYPE is torch.float32 else Float16Module(config, model)
    shards, overlap = GIVEN["distributed"], GIVEN["overlap"]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=shards,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and shards,
        bucket_size=2000,
        num_distributed_optimizer_instances=GIVEN["instances"],
    )
    model = DistributedDataParallel(config, ddp, model)
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        clip_grad=0.5,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=2.0**20,
        hysteresis=1,
        loss_scale_window=2,
        use_distributed_optimizer=shards,
        overlap_param_gather=overlap and shards,
    )
    optimizer = get_megatron_optimizer(options, [model])
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 1e-3, 8, 80, "linear", 0.01, 0.01, 80, "constant")
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync if overlap else None
    return model, optimizer, scheduler


def forward_step(iterator, model):
    strike("forward")
    words = next(iterator)
    words = words if words.dim() == 2 else words[0]
    tokens, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    output = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=labels)
    if GIVEN["tokens"]:
        count = torch.tensor(tokens.numel(), dtype=torch.int)
        return output, lambda losses: (losses.float().sum(), count, losses.detach().float().sum() / count)
    return output, lambda losses: (losses.float().mean(), losses.detach().float().mean())


def evaluate(model):
    strike("evaluation")
    model.eval()
    with torch.no_grad():
        output, loss_of = forward_step(iter([torch.stack([Data()[index] for index in range(4)])]), model)
        loss = loss_of(output)[0]
    model.train()
    dist.all_reduce(loss)
    return loss.item()


def strike_in_optimizer():
    norm = optimizers.optimizer.get_grad_norm_fp32

    def get_grad_norm_fp32(*args, **kwargs):
        strike("norm")
        return norm(*args, **kwargs)

    optimizers.optimizer.get_grad_norm_fp32 = get_grad_norm_fp32
    register_optimizer_step_post_hook(lambda *_: strike("applied"))


def write(model, optimizer, told):
    weights = {name: value.float().tolist() for name, value in model.named_parameters()}
    main = [[one.tolist() for one in group["params"]] for group in optimizer.param_groups]
    scale = optimizer.get_loss_scale().item()
    rank = dist.get_rank()
    (FOLDER / f"{rank}.json").write_text(json.dumps({"weights": weights, "main": main, "told": told, "scale": scale}))


def stock():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**SIZES)
    model, optimizer, scheduler = build()
    place, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine, told, data = BATCH // ranks, [], Data()
    for step in range(GIVEN["steps"]):
        first = (step * BATCH + place * mine) % len(data)
        samples = torch.stack([data[index] for index in range(first, first + mine)])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(samples.split(MICRO)),
            model=[model],
            num_microbatches=mine // MICRO,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
        )
        updated, norm, _ = optimizer.step()
        if updated:
            scheduler.step(increment=BATCH)
        loss = sum(one.double() * (MICRO / BATCH) for one in losses)
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        told.append({"loss": loss.item(), "grad_norm": norm, "skipped": not updated})
        if GIVEN["evaluate"] and (step + 1) % GIVEN["evaluate"] == 0:
            if GIVEN["distributed"] and GIVEN["overlap"]:
                model.start_param_sync(force_sync=True)
            told[-1]["evaluation"] = evaluate(model)
    if GIVEN["distributed"] and GIVEN["overlap"]:
        model.start_param_sync(force_sync=True)
    write(model, optimizer, told)


MESH = {"dp": -1, "tp": GIVEN["tp"]} if GIVEN["tp"] > 1 else None


@rackrun.elastic(global_batch_size=BATCH, micro_batch_size=MICRO, seed=SEED, mesh=MESH)
def elastic(run):
    from rackrun import megatron

    megatron.initialize(run, **SIZES)
    strike.entries += 1
    strike.step = strike.entries
    strike("entry")
    model, optimizer, scheduler = build()
    training = megatron.track(run, [model], optimizer, scheduler)
    data = run.loader(Data(), shuffle=False)
    strike_in_optimizer()

    @run.step
    def train_step(step):
        strike.step = int(step)
        strike("begin")
        found = training.train_step(step, forward_step, data, seq_length=LENGTH)
        strike("end")
        return found

    @run.step
    def by_hand(step):
        strike.step = int(step)
        training.begin(step)
        get_forward_backward_func()(
            forward_step_func=training.weighted(step, forward_step),
            data_iterator=iter(data),
            model=[model],
            num_microbatches=len(data),
            seq_length=LENGTH,
            micro_batch_size=MICRO,
        )
        updated, norm, _ = optimizer.step()
        if updated:
            scheduler.step(increment=step.batch_size)
        return {"loss": step.loss, "grad_norm": norm, "skipped": not updated}

    for step in run.steps(GIVEN["steps"], phases=True):
        found = (by_hand if GIVEN["by_hand"] else train_step)(step)
        value = (
            run.phase(partial(evaluate, model)) if GIVEN["evaluate"] and (step + 1) % GIVEN["evaluate"] == 0 else None
        )
        with (FOLDER / f"told-{run.rank}.txt").open("a") as file:
            file.write(json.dumps([step, found, value]) + "\n")
    training.gather()
    lines = [json.loads(line) for line in (FOLDER / f"told-{run.rank}.txt").read_text().splitlines()]
    told = {}  # a process that takes the rank over goes through the last turn again
    for step, found, value in lines:
        evaluated = {} if value is None else {"evaluation": value}
        told[step] = found | evaluated
    told = [told[step] for step in sorted(told)]
    write(model, optimizer, told)


stock() if KIND == "stock" else elastic()
