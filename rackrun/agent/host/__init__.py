"""What Linux tells and does: processes, cgroups, priorities, cores and memory nodes."""
