"""The adapter of transformers' ``Trainer``."""
