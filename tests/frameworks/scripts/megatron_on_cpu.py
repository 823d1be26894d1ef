"""Lets Megatron-Core, which asks for "cuda" by name, compute on CPUs. For tests: import it before megatron.core.

What Megatron creates on "cuda" is created on the CPU, ``tensor.type()`` says ``torch.cuda.*``, and the state of "the GPU's" random numbers is
that of the CPU's.
"""

import contextlib
import functools

import torch

_CPU = torch.device("cpu")
_CREATE = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
)


def _on_cpu(function):
    @functools.wraps(function)
    def created(*args, **kwargs):
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = _CPU
        return function(*args, **kwargs)

    return created


def _typed(type_of):
    @functools.wraps(type_of)
    def named(self, *args, **kwargs):
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return named


class _Stream:
    def wait_stream(self, other):
        """There is one queue of work, which is done in order."""


def install():
    for name in _CREATE:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.type = _typed(torch.Tensor.type)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = torch.cuda.default_stream = lambda *_, **__: _Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.manual_seed = torch.manual_seed
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


install()
