"""Break it on purpose, and prove that nothing was lost: faults, plans, oracles, the simulator, the planner, reports."""
