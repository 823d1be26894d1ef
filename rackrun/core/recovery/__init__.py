"""Recovery from a loss to the next generation: fence, gather, decide, plan."""
