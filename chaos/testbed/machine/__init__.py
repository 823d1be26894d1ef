"""What is done to this machine, and undone: processes, cgroups, clocks, files."""
