"""A tray: the coordinator's commands to its workers, and the link to the coordinator."""
