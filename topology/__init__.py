"""The rack: its parts, the health of its GPUs, and which rank is placed where.

`model` has the values that all other rooms use. `gpu_driver` reads NVML and the kernel's log. `sources` merges that
with what other sources (Slurm, Kubernetes' labels, nvidia-smi) report of the topology. `health` judges the GPUs.
`placement` decides which rank is placed where, and the environment of its process; `drawing` draws it. See
docs/topology.md.
"""
