"""Execution of the core's commands."""
