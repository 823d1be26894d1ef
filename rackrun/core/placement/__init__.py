"""Which rank sits in which slot, and who keeps whose snapshots."""
