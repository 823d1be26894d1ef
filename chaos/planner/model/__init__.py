"""Model of the fleet and its job."""
