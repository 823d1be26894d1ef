"""Random numbers as a pure function of (seed, step, shard), so that it does not matter which rank computes a shard."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive", "reseed", "undrawn"]


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed computed from ``parts``, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Context manager that restores the generators of torch, NumPy and Python, as if nothing had been drawn inside."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - what scripts use
    try:
        yield
    finally:
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def reseed(*parts: int | str) -> None:
    """Seed the generators of torch (all devices), NumPy and Python from ``parts``."""
    seed = derive(*parts)
    torch.default_generator.manual_seed(
        seed
    )  # torch.manual_seed queues a call, with a traceback, while CUDA is not in use
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that scripts and data sets use
    random.seed(seed)
