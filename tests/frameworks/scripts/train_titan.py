"""Trains two layers of torchtitan's llama3 debug model: digests of the weights, and what was logged, of each rank go to a file.

``train_titan.py FOLDER KIND KILL ARGUMENTS``. KIND: ``stock``, ``elastic`` (`rackrun.titan.Trainer`), ``unchanged``
(for ``rackrun --framework titan``). KILL: ``STEP:RANK:SIGNAL:WHERE``, once for the job, or several with commas between;
"": nobody. SIGNAL is KILL, STOP, or END: the launcher is asked to end. The texts and the
tokenizer are in FOLDER/../assets. ARGUMENTS, as JSON: ``steps``, ``accumulate``, ``tp``, ``replicate``,
``save`` (every so many steps), ``validate`` (likewise), ``log`` (likewise), ``tensorboard``, ``optimizers`` (2: the norms have
their own), ``bits`` (of parameters in forward and backward), ``set`` (other options, {"training.max_norm": 1}).
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import titan_on_cpu  # noqa: F401 - before the rest of torchtitan
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan import trainer as stock_trainer
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry

FOLDER, KIND, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
GIVEN = {"steps": 6, "accumulate": 1, "tp": 1, "replicate": 1, "save": 0, "validate": 0, "log": 1, "tensorboard": False}
GIVEN |= {"optimizers": 1, "bits": 16, "set": {}} | json.loads(sys.argv[4])
ASSETS, BATCH = FOLDER.parent / "assets", 2
RANKS = int(os.environ["WORLD_SIZE"]) // GIVEN["tp"]

if KIND == "elastic":
    from rackrun.titan import Trainer
else:
    Trainer = stock_trainer.Trainer


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def strike(where):
    for number, kill in enumerate(KILL.split(",") if KILL else ()):
        step, rank, signalled, place = kill.split(":")
        struck = FOLDER / ("struck" if not number else f"struck-{number}")
        if (place, int(step), int(rank)) == (where, strike.trainer.step, dist.get_rank()) and not struck.exists():
            struck.touch()
            if signalled == "END":
                os.kill(parent(parent(os.getppid())), signal.SIGTERM)  # the launcher
            else:
                os.kill(os.getpid(), getattr(signal, f"SIG{signalled}"))


class Told(BaseLogger):
    """Writes what is logged, except times, with the rank that this process has then."""

    def log(self, metrics, step):
        kept = {
            name: value
            for name, value in metrics.items()
            if not any(one in name for one in ("time", "tps", "flops", "mem", "mfu"))
        }
        with (FOLDER / f"told-{dist.get_rank()}.txt").open("a") as file:
            file.write(json.dumps([step, kept]) + "\n")


def config():
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    options = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=options)]
    if GIVEN["optimizers"] == 2:
        groups.insert(0, ParamGroupConfig(pattern=r"norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3}))
    texts = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(ASSETS / "texts"))
    found = Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))),
        hf_assets_path=str(ASSETS / "tokenizer"),
        dump_folder=str(FOLDER / "out"),
        model_spec=spec,
        optimizer=OptimizersContainer.Config(param_groups=groups),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, total_steps=8),
        training=TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=BATCH * RANKS * GIVEN["accumulate"],
            seq_len=32,
            steps=GIVEN["steps"],
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if GIVEN["bits"] == 16 else "float32",
        ),
        dataloader=texts,
        metrics=MetricsProcessor.Config(log_freq=GIVEN["log"], enable_tensorboard=GIVEN["tensorboard"]),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            tensor_parallel_degree=GIVEN["tp"],
            data_parallel_replicate_degree=GIVEN["replicate"],
        ),
        checkpoint=CheckpointManager.Config(
            enable=bool(GIVEN["save"]), interval=GIVEN["save"] or 1, last_save_model_only=False
        ),
        validator=Validator.Config(
            enable=bool(GIVEN["validate"]), freq=GIVEN["validate"] or 1, steps=2, dataloader=texts
        ),
        debug=DebugConfig(seed=7),
    )
    for name, value in GIVEN["set"].items():
        part, _, field = name.rpartition(".")
        setattr(getattr(found, part) if part else found, field, value)
    return found


def strike_in_parts(trainer):
    trainer.model_parts[0].register_forward_pre_hook(lambda *_: strike("forward"))
    trainer.model_parts[0].lm_head.register_full_backward_hook(lambda *_: strike("backward"))
    register_optimizer_step_post_hook(lambda *_: strike("applied"))
    norm = torch.nn.utils.clip_grads_with_norm_

    def clip(*args, **kwargs):
        strike("clip")
        return norm(*args, **kwargs)

    torch.nn.utils.clip_grads_with_norm_ = clip
    run = trainer.gc_handler.run

    def collect(step):
        strike("between")
        return run(step)

    trainer.gc_handler.run = collect
    if GIVEN["save"]:
        save = trainer.checkpointer.dcp_save

        def dcp_save(*args, **kwargs):
            strike("saving")
            found = save(*args, **kwargs)
            strike("saved")
            return found

        trainer.checkpointer.dcp_save = dcp_save
    if GIVEN["validate"]:
        process = trainer.validator.post_dataloading_process

        def processed(*args):
            strike("validating")
            return process(*args)

        trainer.validator.post_dataloading_process = processed


def digest(tensor):
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def told():
    """Return what was logged by this rank: a process that takes it over goes through the last turn again."""
    found = {}
    for line in (FOLDER / f"told-{dist.get_rank()}.txt").read_text().splitlines():
        step, kept = json.loads(line)
        name = f"{step} {'validation' if any('validation' in one for one in kept) else ''}"
        assert found.setdefault(name, kept) == kept, f"{name} was logged otherwise before"
    return found


trainer = strike.trainer = config().build()
if not GIVEN["tensorboard"]:
    trainer.metrics_processor.logger = Told()
strike_in_parts(trainer)
trainer.train()
strike("end")
weights = {name: digest(one) for name, one in trainer.model_parts[0].named_parameters()}
moments = [digest(value) for one in trainer.optimizers for state in one.state.values() for value in state.values()]
rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
rest = {
    "step": trainer.step,
    "tokens": trainer.ntokens_seen,
    "rates": rates,
    "training": trainer.model_parts[0].training,
}
told = {} if GIVEN["tensorboard"] else told()
(FOLDER / f"{dist.get_rank()}.json").write_text(
    json.dumps({"weights": weights, "moments": moments, "told": told, **rest})
)
trainer.close()
assert dist_utils.dist_sum.__module__ == dist_utils.__name__, "rackrun's functions are taken out again"
