"""Oracles about the job: whether it ended, recovered and reported its time as it must."""
