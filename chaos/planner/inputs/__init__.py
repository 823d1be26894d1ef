"""The inputs of the planner: the fleet, failures, costs, options."""
