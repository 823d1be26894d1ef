"""The coordinator's port: agents, people, metrics."""
