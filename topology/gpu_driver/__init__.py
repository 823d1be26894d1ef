"""Read what NVIDIA's driver reports: NVML, and the kernel's log."""
