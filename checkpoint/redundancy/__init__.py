"""Who keeps whose copy or parity, and the arithmetic of it."""
