"""The agent of one tray: it starts, watches and ends the tray's workers."""
