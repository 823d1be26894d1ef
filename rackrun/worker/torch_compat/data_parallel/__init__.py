"""DistributedDataParallel and FSDP2 from the inside: buckets, shards, norms."""
