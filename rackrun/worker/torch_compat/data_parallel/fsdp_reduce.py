"""FSDP2's reduction of gradients, torch 2.10 to 2.15: another arithmetic between its copies, and gradients that it has not reduced yet.

What FSDP copies about is not looked at on the way, so it may be integers in floats of the same size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from rackrun.errors import StepError
from rackrun.worker.torch_compat.data_parallel import fsdp

__all__ = ["clear_local_gradients", "divert", "local_gradients", "missing", "parameters_of", "restore"]

_NEEDED = {
    *("fsdp_params", "unsharded_grads", "reduce_scatter_group", "reduce_scatter_comm", "reduce_dtype"),
    *("gradient_divide_factor", "all_reduce_group", "all_reduce_grads", "partial_reduce_output", "all_reduce_hook"),
    "force_sum_reduction_for_comms",
}

Encode = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor], int], tuple[list[torch.Tensor], torch.Tensor]]
Sum = Callable[[torch.Tensor, torch.Tensor, Any], None]
Decode = Callable[[Sequence[nn.Parameter], Sequence[int], torch.Tensor], None]


def missing() -> list[str]:
    reduce = getattr(_fsdp_param_group, "foreach_reduce", None)
    known = reduce is not None and set(inspect.signature(reduce).parameters) >= _NEEDED
    return [] if known else ["FSDP's foreach_reduce is gone, or takes other arguments"]


def parameters_of(module: nn.Module) -> set[int]:
    """The ids of the parameters, resharded, whose gradients FSDP reduces. The module knows them first: FSDP itself takes note of
    those that ``to_empty`` has made in its first forward."""
    owners = (
        (param._module_info.module, param._module_info.param_name) for param in fsdp.params(fsdp.modules_of(module))
    )
    return {id(getattr(owner, name)) for owner, name in owners}


def local_gradients(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor, Callable[[], torch.Tensor]]]:
    """What backward passes without synchronisation have left: whole parameters' gradients, of this rank alone. And what gives the part
    that a tensor-parallel rank has of it, for which collectives may run."""
    for param in fsdp.params(fsdp.modules_of(module)):
        held, part = fsdp.gradient_before_reduction(param)
        if held is not None:
            yield param.sharded_param, held, functools.partial(getattr, param, part)


def clear_local_gradients(module: nn.Module) -> None:
    """To zero: one that is gone would be left out of the reduction, were it not used in the last micro-batch."""
    for param in fsdp.params(fsdp.modules_of(module)):
        fsdp.clear_unreduced(param)


def divert(container: torch.dtype, encode: Encode, add: Sum, decode: Decode) -> None:
    """From now on, all gradients are summed, over as many ranks as ``encode`` is told, as what it makes of them, in ``container``, by ``add``; ``decode`` makes
    gradients of it, in place. Behind the last parameter lies what ``encode`` has added, summed as well."""
    original: Any = _fsdp_param_group.foreach_reduce
    reduce = getattr(original, "_rackrun_original", original)
    signature = inspect.signature(reduce)

    def diverted(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        _refuse(given)
        group, replicas = given["reduce_scatter_group"], given["all_reduce_group"]
        size = 1 if group is None else group.size()
        parameters = [param.sharded_param for param in given["fsdp_params"]]
        ranks = size if replicas is None else size * replicas.size()
        # What it has not reduced at once is of this type already: of each micro-batch, or of none.
        gradients = [gradient.to(given["reduce_dtype"] or gradient.dtype) for gradient in given["unsharded_grads"]]
        carried, more = encode(parameters, gradients, ranks)
        del gradients
        if size > 1:
            sizes = [
                _shard_numel(gradient, param.fsdp_placement.dim, size)
                for param, gradient in zip(given["fsdp_params"], carried, strict=True)
            ]
            given["unsharded_grads"][:] = [*carried, more.expand(size, -1).contiguous()]
            given["reduce_scatter_comm"] = _Summed(parameters, sizes, replicas, add, decode)
        else:
            flat = torch.cat([*(gradient.view(-1) for gradient in carried), more])
            if replicas is not None:
                add(flat, flat, replicas)
            sizes = [gradient.numel() for gradient in carried]
            decode(parameters, sizes, flat)
            parts = flat[: sum(sizes)].split(sizes)
            given["unsharded_grads"][:] = [p.view_as(g) for p, g in zip(parts, carried, strict=True)]
        del carried, more  # FSDP frees them as soon as it has copied them
        given["reduce_dtype"], given["gradient_divide_factor"] = container, 1.0
        given["all_reduce_group"], given["force_sum_reduction_for_comms"] = None, True
        return reduce(*call.args, **call.kwargs)

    diverted._rackrun_original = reduce  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_reduce = diverted


def restore() -> None:
    """What `divert` has done."""
    reduce: Any = _fsdp_param_group.foreach_reduce
    _fsdp_param_group.foreach_reduce = getattr(reduce, "_rackrun_original", reduce)


class _Summed:
    """A reduce-scatter in FSDP's sense, for one call."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], sizes: Sequence[int], replicas: Any, add: Sum, decode: Decode
    ) -> None:
        self._parameters, self._sizes, self._replicas, self._add, self._decode = (
            parameters,
            sizes,
            replicas,
            add,
            decode,
        )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        del op, async_op
        self._add(output_tensor, input_tensor, group)
        if self._replicas is not None:
            self._add(output_tensor, output_tensor, self._replicas)
        self._decode(self._parameters, self._sizes, output_tensor)


def _shard_numel(gradient: torch.Tensor, dim: int, size: int) -> int:
    """Of one rank, padded where rows are not divisible."""
    if dim:
        return gradient.numel() // size
    rows = gradient.shape[0]
    return -(-rows // size) * (gradient.numel() // max(rows, 1))


def _refuse(given: dict[str, Any]) -> None:
    if given["gradient_divide_factor"] is not None or given["all_reduce_hook"] is not None:
        raise StepError(
            'a gradient divide factor or an all-reduce hook of the script\'s own is not known to reduction="exact".',
            remedy='leave FSDP\'s reduction as it is, or use reduction="fast".',
        )
    if given["partial_reduce_output"] is not None or not given["all_reduce_grads"]:
        raise StepError(
            "gradients that are reduced over shards but not over replicas yet cannot be added exactly.",
            remedy='leave set_requires_all_reduce alone, or use reduction="fast".',
        )
