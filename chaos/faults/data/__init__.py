"""Faults of what a job computes with: the bits of its state, its clocks, its samples."""
