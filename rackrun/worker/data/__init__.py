"""Which samples a step computes, and random numbers that belong to them."""
