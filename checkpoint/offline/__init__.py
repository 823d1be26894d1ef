"""Checkpoints without a running job: survey, rebuild, convert, export."""
