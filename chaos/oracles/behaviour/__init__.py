"""Whether the job has ended, recovered and accounted for itself as it must."""
