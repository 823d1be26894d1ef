"""The simulated fleet and its job."""
