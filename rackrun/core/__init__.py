"""The pure core: ``handle(event) -> commands``; no clock, no randomness, no I/O, no environment, no logging."""
