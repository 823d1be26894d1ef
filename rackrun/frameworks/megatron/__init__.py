"""Megatron-Core under `rackrun.elastic`: what its optimizers hold, its own DistributedDataParallel, its process groups."""
