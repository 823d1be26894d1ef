"""Hosts in network namespaces, and links between them that can be cut or made bad."""
