"""What NVIDIA's driver tells: NVML, and the kernel's log."""
