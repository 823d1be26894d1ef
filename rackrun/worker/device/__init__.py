"""A device's stream: what has passed, what hangs, and whose time it was."""
