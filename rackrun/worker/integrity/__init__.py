"""Checks that the state is right: replicas, silent corruption, losses that are not finite."""
