"""Memory, storage, clocks, bits and GPUs."""
