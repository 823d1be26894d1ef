"""From a loss to the next generation: fence, gather, plan."""
