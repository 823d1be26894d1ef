"""A tray's workers: commands from the coordinator, liveness checks, and the link to the coordinator."""
