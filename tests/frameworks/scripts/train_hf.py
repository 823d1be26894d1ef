"""A Trainer's script: what it trains, what it logs and which callbacks it has called go to a file for each rank.

``train_hf.py FOLDER KIND KILL [ARGUMENTS]``. KIND: ``stock``, ``elastic`` or ``framework``. KILL: ``STEP:RANK:SIGNAL:WHERE``, once for the job;
"": nobody. ARGUMENTS: of TrainingArguments, as JSON; with ``"subclass": false`` the Trainer's own class is used, and with ``"tally": true`` a
callback counts steps in an object; with ``"wordy": true`` the subclass keeps a long text in step 3 that differs per rank.
"""

import hashlib
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

folder, kind, kill = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if kind == "elastic":
    from rackrun.hf import Trainer
else:
    from transformers import Trainer

transformers.logging.set_verbosity_error()
OF_TIME = ("runtime", "per_second")


class Data(Dataset):
    def __init__(self, samples, first=0):
        self.samples, self.first = samples, first

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        ids = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(self.first + index))
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def strike(where, state):
    if not kill:
        return
    step, rank, number, place = kill.split(":")
    struck = folder / "struck"
    if (place, int(step), int(rank)) == (
        where,
        state.global_step,
        torch.distributed.get_rank(),
    ) and not struck.exists():
        struck.touch()
        os.kill(os.getpid(), getattr(signal, f"SIG{number}"))


class Tally:
    """An object of the script's own, which has no state that could be restored."""

    def __init__(self):
        self.steps = 0


class Calls(TrainerCallback):
    def __init__(self, tally):
        self.calls, self.tally = {}, tally

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            (folder / f"begun-{os.getpid()}").touch()

    def on_step_begin(self, args, state, control, **kwargs):
        self.count("step_begin")
        if self.tally:
            self.tally.steps += 1
        strike("begin", state)

    def on_substep_end(self, args, state, control, **kwargs):
        self.count("substep_end")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.count("optimizer_step")

    def on_step_end(self, args, state, control, **kwargs):
        self.count("step_end")
        strike("end", state)

    def on_log(self, args, state, control, **kwargs):
        self.count("log")

    def on_evaluate(self, args, state, control, **kwargs):
        self.count("evaluate")

    def on_save(self, args, state, control, **kwargs):
        self.count("save")
        strike("save", state)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.count("epoch_end")

    def count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1


class Mine(Trainer):
    """It keeps metrics of its own, as TRL's trainers do: they change in a step, and `log` empties some of them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forwards = 0
        self.own = defaultdict(list)

    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        self.forwards += 1
        self.own["train" if model.training else "eval"].append((loss[0] if isinstance(loss, tuple) else loss).item())
        if wordy and model.training and self.state.global_step == 3:
            self.own["notes"].append(f"rank {self.args.process_index}: " + "x" * 1000)
        strike("forward" if model.training else "evaluation", self.state)
        return loss

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        super().log({**logs, "forwards": self.forwards, "since": len(self.own[mode])}, start_time)
        if self.state.global_step % 2:
            self.own[mode].clear()


given = json.loads(sys.argv[4])
subclass, tally, wordy = given.pop("subclass", True), given.pop("tally", False), given.pop("wordy", False)
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=100, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir=folder / "output",
    use_cpu=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_steps=2,
    max_grad_norm=0.5,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    **given,
)
calls = Calls(Tally() if tally else None)
sets = {"train_dataset": Data(21), "eval_dataset": Data(5, 1000)}
trainer = (Mine if subclass else Trainer)(model, arguments, callbacks=[calls], **sets)
if not subclass:
    model.register_forward_hook(lambda *_: strike("forward" if model.training else "evaluation", trainer.state))
trainer.train()
rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
history = [{k: v for k, v in one.items() if not k.endswith(OF_TIME)} for one in trainer.state.log_history]
found = {
    "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    "history": history,
    "best": [trainer.state.best_metric, trainer.state.best_global_step, trainer.state.total_flos],
    "own": trainer.own if subclass else None,
    "calls": calls.calls,
}
(folder / f"{rank}.json").write_text(json.dumps(found))
