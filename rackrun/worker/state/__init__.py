"""Tracked objects as tensors and plain values, with names, and how they are described."""
