"""Adapters for the kinds of objects that a script tracks: modules, optimizers, scalers, generators."""
