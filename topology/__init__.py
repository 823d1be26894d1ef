"""The rack: what it consists of, how it is, and which rank sits where.

`model` is what everything else speaks of; `rack_file` reads it from a file; `placement` says which rank sits where; `environment` what
its process is told; `render` draws it. See docs/topology.md.
"""
