"""Operators' requests to a running job: whether they are allowed, how they are carried out, and the answers."""
