"""How many spares, where, which policy, how often a checkpoint: answered by simulating months of a job with the core's own policy and placement."""
