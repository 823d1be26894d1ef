"""Batch sizes, learning rates and shares of the work, by the number of ranks."""
