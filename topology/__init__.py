"""The rack: what it consists of, how it is, and which rank sits where.

`model` is what everything else speaks of. `gpu_driver` asks NVML and reads the kernel's log; `sources` puts what it and others (Slurm,
Kubernetes' labels, nvidia-smi) say of the topology together; `health` judges the GPUs. `placement` says which rank sits where, and what its
process is told of it; `drawing` draws it. See docs/topology.md.
"""
