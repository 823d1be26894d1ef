"""A driver without GPUs: what agents ask is answered from a file that injectors and tests write."""
