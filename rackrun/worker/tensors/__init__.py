"""Many tensors at once: versions, bytes, digests, copies."""
