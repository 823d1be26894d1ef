"""A rank's snapshots in memory that outlives its process."""
