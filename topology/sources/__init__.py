"""Read the topology from several sources, and merge what they report."""
