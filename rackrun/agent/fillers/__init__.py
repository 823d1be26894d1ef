"""Other work on idle GPUs, and how it is stopped."""
