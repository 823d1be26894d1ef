"""Linux facilities of a tray's host: processes, control groups, priorities, cores and memory nodes."""
