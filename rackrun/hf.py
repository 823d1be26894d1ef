"""``from rackrun.hf import Trainer`` in place of ``from transformers import Trainer``.

Importing this makes the process a worker, so that the process group exists before `transformers.TrainingArguments`
looks for one. See docs/huggingface.md.
"""

from rackrun.frameworks.hf.elastic_trainer import Elastic, Trainer

__all__ = ["Elastic", "Trainer"]
