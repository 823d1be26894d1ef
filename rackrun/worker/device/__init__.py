"""A device's streams: what has passed, what hangs, and how much time a rank spent on its own."""
