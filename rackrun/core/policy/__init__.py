"""Decisions about failures: the rungs and their costs, the active policy, the user's function."""
