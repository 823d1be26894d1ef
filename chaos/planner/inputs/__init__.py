"""What the planner is given: the fleet, failures, costs, options."""
