"""A script with a Trainer of TRL: what it trains and logs goes to a file for each rank.

``train_trl.py FOLDER KIND KILL ARGUMENTS``: as `train_hf.py`, but for KILL, which is ``STEP:RANK``: SIGKILL in the forward
after so many steps. ARGUMENTS: ``trainer`` is ``sft``, ``dpo`` or ``reward``, ``lora`` says whether adapters alone are
trained; the rest is the trainer's own.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

folder, kind, kill, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
if kind == "elastic":
    import rackrun.hf
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # noqa: E402

transformers.logging.set_verbosity_error()
WORDS = [a + b for a in "bdfg" for b in "aeiou"]
SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **SPECIAL)


def text(seed, count):
    drawn = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in drawn.tolist())


name, lora = arguments.pop("trainer"), arguments.pop("lora", False)
stock, config_class, columns = {
    "sft": (SFTTrainer, SFTConfig, ("prompt", "completion")),
    "dpo": (DPOTrainer, DPOConfig, ("prompt", "chosen", "rejected")),
    "reward": (RewardTrainer, RewardConfig, ("chosen", "rejected")),
}[name]
data = Dataset.from_list([{c: text(10 * i + n, 3 + (i + n) % 4) for n, c in enumerate(columns)} for i in range(26)])


class Mine(*((rackrun.hf.Elastic,) if kind == "elastic" else ()), stock):
    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        here = f"{self.state.global_step}:{torch.distributed.get_rank()}"
        if model.training and here == kill and not (folder / "struck").exists():
            (folder / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=1, bos_token_id=2, eos_token_id=3, **sizes)
config.pad_token_id, config.num_labels = 1, 1
model = (LlamaForSequenceClassification if name == "reward" else LlamaForCausalLM)(config)
more = {"peft_config": LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])} if lora else {}
if name == "dpo" and not lora:
    reference = LlamaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    more["ref_model"] = reference
given = config_class(
    output_dir=str(folder / "output"),
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_length=16,
    max_steps=6,
    learning_rate=1e-2,
    logging_steps=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    **arguments,
)
trainer = Mine(model, args=given, train_dataset=data, processing_class=tokenizer, **more)
trainer.train()
weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
trained = sorted(key for key, parameter in trainer.model.named_parameters() if parameter.requires_grad)
history = [
    {k: v for k, v in one.items() if "runtime" not in k and "second" not in k} for one in trainer.state.log_history
]
found = {"weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(), "history": history, "trained": trained}
(folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
