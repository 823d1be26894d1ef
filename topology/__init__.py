"""The rack: what it consists of, how it is, and which rank sits where.

`model` is what everything else speaks of. It comes from a file (`rack_file`), or from what the machines say (`discover`, and
`labels`, `slurm`, `smi` where the driver cannot be asked), put together by `sources`. `nvml_watch` tells how the GPUs are,
`kernel_log` and `kmsg` what the kernel's log adds, `health` what to make of both, and `breaker` when not to act on it. `placement` says
which rank sits where, `environment` what its process is told, `render` draws it. See docs/topology.md.
"""
