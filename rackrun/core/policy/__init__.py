"""How the core decides: rungs of the ladder and their prices, the policy in force, the user's function."""
