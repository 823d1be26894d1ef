"""What is decided for a worker, without threads: whether its generation is whole, and whether a unit counts."""
