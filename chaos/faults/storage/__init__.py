"""Faults of the storage to which checkpoints are written."""
