"""Whether it is the same training, and where two runs part."""
