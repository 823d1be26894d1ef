"""The coordinator's port, for agents, operators and metrics."""
