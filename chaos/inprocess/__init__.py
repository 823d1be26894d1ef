"""Modules that are loaded into a job's own processes: faults, and recorders of the state."""
