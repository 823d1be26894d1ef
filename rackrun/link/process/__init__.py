"""File descriptors, standard streams and exit of the present process."""
