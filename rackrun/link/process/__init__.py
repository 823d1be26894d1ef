"""This process's own descriptors, streams and end."""
