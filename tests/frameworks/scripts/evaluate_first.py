"""A Trainer's script that evaluates before it trains. ``FOLDER``: each rank writes a hash of its weights there."""

import hashlib
import sys
from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from rackrun.hf import Trainer

transformers.logging.set_verbosity_error()
samples = torch.randint(0, 100, (32, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": one, "labels": one} for one in samples]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    max_steps=3,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
config = GPT2Config(vocab_size=100, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data)
trainer.evaluate()
trainer.train()
weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
Path(sys.argv[1], f"{arguments.process_index}.txt").write_text(digest)
