"""Copies of the state that outlive the process: snapshots in memory and checkpoints on disk."""
