"""Injectors for memory, storage, clocks, bits and GPUs."""
