"""Predict how long the stages of a swap take on GPUs."""
