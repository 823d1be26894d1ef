"""A run that the launcher has started, until it is over."""
