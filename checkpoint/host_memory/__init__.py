"""Host memory prepared for fast copies: faulted in ahead, and registered with the GPU's driver."""
