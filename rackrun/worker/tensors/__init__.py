"""Operations on many tensors at once: versions, bytes, digests, copies."""
