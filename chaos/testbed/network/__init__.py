"""Hosts in network namespaces, and links that can be cut."""
