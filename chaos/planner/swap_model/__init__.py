"""How long the stages of a swap take on GPUs."""
