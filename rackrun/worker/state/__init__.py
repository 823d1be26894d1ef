"""Tracked objects as named tensors and plain values, and the descriptions of both that other ranks read."""
