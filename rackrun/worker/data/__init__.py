"""Which samples each step computes on each rank, and the random numbers that belong to them."""
