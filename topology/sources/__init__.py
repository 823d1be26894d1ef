"""Who knows the topology, and how their answers become one."""
