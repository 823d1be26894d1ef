"""Draw simulated jobs from seeds, and run many of them."""
