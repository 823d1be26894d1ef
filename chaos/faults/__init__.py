"""Faults as values: the kinds of fault, their targets, and the check that a fault makes sense."""
