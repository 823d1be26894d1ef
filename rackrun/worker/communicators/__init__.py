"""The transport between the ranks of one generation: gloo, NCCL, and how they connect."""
