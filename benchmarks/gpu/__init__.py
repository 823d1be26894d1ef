"""What a GPU has to show for rackrun to be trusted on it: checks with limits, a line for each, a table and a document (docs/gpu_kit.md)."""
