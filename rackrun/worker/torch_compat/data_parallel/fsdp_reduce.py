"""Replaces the arithmetic of FSDP2's gradient reduction (torch 2.10 to 2.15), and gives access to gradients that are
not reduced yet.

FSDP does not inspect the values that it copies, so they may be integers in floats of the same size.
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
    """Return what this torch lacks, as messages."""
    reduce = getattr(_fsdp_param_group, "foreach_reduce", None)
    known = reduce is not None and set(inspect.signature(reduce).parameters) >= _NEEDED
    return [] if known else ["FSDP's foreach_reduce is gone, or takes other arguments"]


def parameters_of(module: nn.Module) -> set[int]:
    """Return the ids of the parameters, as shards, whose gradients FSDP reduces.

    They are read from the module, because FSDP itself notices parameters that ``to_empty`` has made only in its first
    forward pass.
    """
    owners = (
        (param._module_info.module, param._module_info.param_name) for param in fsdp.params(fsdp.modules_of(module))
    )
    return {id(getattr(owner, name)) for owner, name in owners}


def local_gradients(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor, Callable[[], torch.Tensor]]]:
    """Yield what backward passes without synchronisation have left on this rank: parameter, gradient of the whole
    parameter, and a function.

    The function returns a tensor-parallel rank's part of the gradient; it may run collectives.
    """
    for param in fsdp.params(fsdp.modules_of(module)):
        held, part = fsdp.gradient_before_reduction(param)
        if held is not None:
            yield param.sharded_param, held, functools.partial(getattr, param, part)


def clear_local_gradients(module: nn.Module) -> None:
    """Set these gradients to zero. Deleted ones would be left out of the reduction, unless the last micro-batch used
    them."""
    for param in fsdp.params(fsdp.modules_of(module)):
        fsdp.clear_unreduced(param)


def divert(container: torch.dtype, encode: Encode, add: Sum, decode: Decode) -> None:
    """Reduce all gradients with another arithmetic from now on.

    ``encode(parameters, gradients, ranks)`` turns gradients into tensors of dtype ``container``, and returns them with
    additional values, which are summed as well. ``add`` sums them over ranks. ``decode`` turns the sums into gradients
    in place; the additional values come after the last parameter.
    """
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
        # Gradients that FSDP has not reduced at once are of this type already: those of every micro-batch, or of none.
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
    """Undo `divert`."""
    reduce: Any = _fsdp_param_group.foreach_reduce
    _fsdp_param_group.foreach_reduce = getattr(reduce, "_rackrun_original", reduce)


class _Summed:
    """A reduce-scatter as FSDP calls it, for one call."""

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
    """Return the number of elements of one rank's shard, padded where rows do not divide evenly."""
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
