"""Run a job under faults: one plan, a campaign of many, or a soak."""
