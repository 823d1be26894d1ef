"""For scripts under `rackrun.elastic` that train with Megatron-Core. See docs/megatron.md."""

from rackrun.frameworks.megatron.parallel_groups import initialize
from rackrun.frameworks.megatron.training import Training, track

__all__ = ["Training", "initialize", "track"]
