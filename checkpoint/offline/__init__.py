"""Checkpoints without a job: survey, rebuild, convert, export."""
