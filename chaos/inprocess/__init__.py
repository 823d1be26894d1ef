"""What is loaded into a job's own processes: faults, and what records the state."""
