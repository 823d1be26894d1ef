"""Faults of GPUs, as their driver reports them."""
