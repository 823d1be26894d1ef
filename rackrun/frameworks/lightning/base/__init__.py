"""Names, values and the order of samples: what the rest of the adapter of Lightning stands on."""
