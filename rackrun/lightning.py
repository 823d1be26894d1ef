"""``Trainer(strategy=rackrun.lightning.Elastic())``: Lightning's training loop on ranks that may be replaced.

Importing this makes the process a worker, so that the process group exists before a Trainer or Fabric looks for one. See
docs/lightning.md.
"""

from rackrun.frameworks.lightning.elastic_strategy import Elastic

__all__ = ["Elastic"]
