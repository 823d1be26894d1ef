"""State for a rank that takes over, from live ranks or from snapshots."""
