"""Which rank runs on which slot, and what its process is told of it."""
