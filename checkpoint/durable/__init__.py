"""Checkpoints on disk or in an object store."""
