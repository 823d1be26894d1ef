"""The kit's checks, over a rackrun that has a defect."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import primitives
from benchmarks.gpu.registry import Context, Found, check


@check("B4", "a registration that leaves its error", expected="a failure", limit_s=60)
def error_left(context: Context) -> Found:
    from rackrun.checkpoint.host_memory import host_registration

    host_registration._forget_error = lambda: None
    return primitives.failed_registration(context)


@check("B8", "a digest that is blind to the highest bit", expected="a failure", limit_s=60)
def blind_digest(context: Context) -> Found:
    from rackrun.worker.tensors import device_digest as module

    whole = module.device_digest

    def blind(flat: Any) -> Any:
        import torch

        seen = flat.clone()
        seen[7::8] &= torch.tensor(0x7F, dtype=torch.uint8)
        return whole(seen)

    module.device_digest = blind
    return primitives.digest(context)


@check("B9", "a sum that rounds down", expected="a failure", limit_s=100)
def rounds_down(context: Context) -> Found:
    from rackrun.worker.exact import fixed_point as module

    class Down(module._InChunks):
        def add(self, values: Any, scale: float, into: Any, *, fresh: bool) -> float:
            found = super().add(values, scale, into, fresh=fresh)
            if not fresh and into.numel() > 4000:
                into[-1] -= 1
            return found

    module.fixed_point = lambda device: Down()
    return primitives.exact(context)
