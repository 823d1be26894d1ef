"""Analyse simulated runs: closed forms, sensitivity, recommendations."""
