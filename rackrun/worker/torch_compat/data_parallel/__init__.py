"""Adapts DistributedDataParallel and FSDP2: buckets, shards, norms."""
