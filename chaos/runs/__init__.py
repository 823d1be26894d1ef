"""Runs of a job under faults: one plan, a campaign, a soak."""
