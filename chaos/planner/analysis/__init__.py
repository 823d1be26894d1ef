"""What the planner makes of simulated runs: formulas, sensitivity, recommendations."""
