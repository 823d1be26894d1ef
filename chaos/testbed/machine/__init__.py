"""Change this machine and undo the change: processes, cgroups, clocks, files."""
