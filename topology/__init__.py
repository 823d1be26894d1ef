"""The rack: what it consists of, how it is, and which rank sits where.

`model` is what everything else speaks of; `rack_file` reads it from a file. See docs/topology.md.
"""
