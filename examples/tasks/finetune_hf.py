"""Fine-tune a model with the Hugging Face Trainer: one line is not transformers' own.

rackrun --standalone --nproc-per-node 3 --spares 1 examples/tasks/finetune_hf.py
"""

import sys
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from rackrun.hf import Trainer

FOLDER = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()

drawn = torch.randint(0, 50, (64, 16), generator=torch.Generator().manual_seed(0))  # your tokenized texts
samples: Any = [{"input_ids": one, "labels": one} for one in drawn]
config: Any = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=FOLDER,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=1e-3,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=samples, eval_dataset=samples[:8])
trainer.train()
trainer.save_model()
