"""Oracles about the training: whether it is the same as without faults, and where two runs first differ."""
