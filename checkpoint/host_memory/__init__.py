"""Host memory that is fast for a GPU: allocated ahead, and registered with the driver."""
