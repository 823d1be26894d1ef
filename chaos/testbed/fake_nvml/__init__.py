"""An NVML driver without GPUs: it answers agents from a file that injectors and tests write."""
