"""Whose fault it is: the script's, a GPU's, the network's, or nobody's that is known."""
