"""Fixes the layout of DDP's buckets (torch 2.10 to 2.15): the same on every rank and in every generation.

DDP rebuilds its buckets after the first backward pass, in the order in which gradients came. A newcomer's new DDP would
have other buckets than the survivors': their all-reduces would not match (gloo ends the process), and the order of
summation, and so the bits, would differ. So the layout is fixed at construction, in *reverse* parameter order, which is
about the order of a backward pass. In forward order all communication would start only at the end of the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import StepError

__all__ = [
    "begin",
    "clear",
    "divide_alike",
    "exchanges_parameters",
    "freeze",
    "hook",
    "hook_states",
    "ignored_by",
    "install",
    "missing",
    "reduced_by",
    "reset",
    "synchronise_gradients",
]


_EXPECTS = "_rackrun_expects"


def missing() -> list[str]:
    """Return what this torch lacks, as messages."""
    needed = ("_build_params_for_reducer", "_post_forward")
    reducer = ("_push_all_rebuilt_params", "_rebuild_buckets", "_reset_state")
    found = [f"DistributedDataParallel.{name} is gone" for name in needed if not hasattr(DistributedDataParallel, name)]
    if not hasattr(dist, "_register_builtin_comm_hook"):
        found.append("torch.distributed._register_builtin_comm_hook is gone")
    return found + [
        f"Reducer.{name} is gone" for name in reducer if not hasattr(torch._C._distributed_c10d.Reducer, name)
    ]


def exchanges_parameters(module: nn.Module) -> bool:
    """Whether DDP is combined with tensor parallelism in torch's way (``DDP(..., device_mesh=)``): hooks convert
    parameters to DTensors before each forward pass, and leave others in their place. Source:
    ``torch/distributed/tensor/parallel/ddp.py``."""
    hooks = [hook for one in module.modules() for hook in one._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") == "torch.distributed.tensor.parallel.ddp" for hook in hooks)


def install() -> None:
    """Patch DDP's construction, so that buckets are fixed, and its forward pass, so that it is known which of them
    expect a backward pass."""
    if getattr(DistributedDataParallel, "_rackrun_frozen_buckets", False):
        return
    build: Callable[[DistributedDataParallel], tuple[list[Any], list[Any]]] = (
        DistributedDataParallel._build_params_for_reducer
    )
    init = DistributedDataParallel.__init__
    post_forward: Callable[[DistributedDataParallel, Any], Any] = DistributedDataParallel._post_forward

    def build_reversed(self: DistributedDataParallel) -> tuple[list[Any], list[Any]]:
        parameters, sparse = build(self)
        return list(reversed(parameters)), list(reversed(sparse))

    def init_frozen(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._rackrun_reduces = _reduces_now(self)  # type: ignore[assignment]
        # whether the reducer expects a backward pass; a list, which torch.save(module) writes without rackrun
        vars(self)[_EXPECTS] = expects = [False]
        if reduced := reduced_by(self):
            reduced[0].register_post_accumulate_grad_hook(lambda _: expects.__setitem__(0, False))
        freeze(self)

    def expecting(self: DistributedDataParallel, output: Any) -> Any:
        if self.require_backward_grad_sync and torch.is_grad_enabled() and (known := vars(self).get(_EXPECTS)):
            known[0] = True
        return post_forward(self, output)

    DistributedDataParallel._build_params_for_reducer = build_reversed  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = init_frozen  # type: ignore[method-assign]
    DistributedDataParallel._post_forward = torch.compiler.disable(expecting)  # type: ignore[method-assign]
    DistributedDataParallel._rackrun_frozen_buckets = True  # type: ignore[attr-defined]


def begin(module: DistributedDataParallel) -> None:
    """Reset flags before a unit. A step that was left between two micro-batches must not decide whether this unit's
    first forward pass broadcasts buffers: a newcomer's would, and the survivors' would not. Nor must a forward pass
    whose backward pass never came decide in which micro-batch this unit reduces gradients."""
    _expect_nothing(module)
    # a module's own __setattr__ takes a hundred times as long as a comparison
    if module.require_forward_param_sync is not True:
        module.require_forward_param_sync = True
    if module.require_backward_grad_sync is not True:
        module.require_backward_grad_sync = True


def reset(module: DistributedDataParallel) -> None:
    """Reset the reducer after a forward pass without a backward pass. It would still expect that, and communicate in
    the next backward pass, even under no_sync. Its buckets are built again in the same layout."""
    module.reducer._reset_state()
    freeze(module)
    if known := vars(module).get(_EXPECTS):
        known[0] = False


def _expect_nothing(module: DistributedDataParallel) -> None:
    """Reset the reducer if a forward pass has no backward pass of the module's parameters: it was for an evaluation
    without no_grad(), or its parameters were frozen meanwhile, as a GAN's discriminator."""
    if (known := vars(module).get(_EXPECTS)) and known[0]:
        reset(module)


def synchronise_gradients(module: DistributedDataParallel, last: bool) -> None:
    """Set whether the coming backward pass communicates (``last``).

    Raises `StepError` where torch cannot skip that: with ``static_graph=True`` its reducer learns the graph in the
    first backward pass that communicates, and fails in one before that.
    """
    if module.static_graph and not getattr(module, "_rackrun_knows_graph", False):
        if not last:
            raise StepError(
                "DistributedDataParallel(static_graph=True) cannot begin with a step of several micro-batches: torch's reducer must "
                "communicate in its first backward pass.",
                remedy="leave out static_graph=True, or give each rank one micro-batch a step (micro_batch_size = global_batch_size / ranks).",
            )
        module._rackrun_knows_graph = True  # type: ignore[assignment]
    if not last:
        _expect_nothing(module)
    if module.require_backward_grad_sync is not last:
        module.require_backward_grad_sync = last


def hook(
    module: DistributedDataParallel, reduce: Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]
) -> Callable[[], None]:
    """Make ``reduce`` sum the buckets, without a division by DDP. Raises `StepError` where the script has a hook of its
    own.

    Returns a function that releases ``reduce``. Without it the reducer, whose references Python cannot see, would keep
    it forever.
    """
    if getattr(module, "_delay_all_reduce_params", None):
        raise StepError(
            "DDP(delay_all_reduce_named_params=...) reduces gradients past every hook.",
            remedy="leave that argument out.",
        )
    held = [reduce]
    try:
        module.register_comm_hook(None, lambda _, bucket: held[0](bucket))
    except RuntimeError as error:
        raise StepError(
            'the script has registered a communication hook of DDP, which reduction="exact" needs itself.',
            remedy='do not register one, or use reduction="fast".',
        ) from error
    return held.clear


def hook_states(module: DistributedDataParallel) -> list[object]:
    """Return the state of the script's communication hooks that lasts from step to step, such as PowerSGD's error
    feedback."""
    states = [state for _, state in getattr(module, "_comm_hooks", ())]
    return [state for state in states if state is not None and not isinstance(state, dist.ProcessGroup)]


def divide_alike(module: DistributedDataParallel) -> None:
    """Make DDP round the mean over ranks in one way, whatever a gradient was before the backward pass. To be called at
    run.steps(), when no other hook of rackrun will be registered.

    With ``gradient_as_bucket_view=True`` torch's reducer divides a gradient by the number of ranks where it is the
    bucket's view already (``zero_grad(set_to_none=False)`` keeps it), and multiplies it by the reciprocal where it was
    None. These bits differ, unless the number is a power of two. A newcomer's gradients are None, as are all after a
    resume. torch's own hook always divides.
    """
    if not module.gradient_as_bucket_view:
        return
    with contextlib.suppress(RuntimeError):  # with a hook of the script, the reducer divides nothing
        dist._register_builtin_comm_hook(module.reducer, dist.BuiltinCommHookType.ALLREDUCE)


def reduced_by(module: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """Return the parameters whose gradients DDP reduces: not those that were frozen when it was made."""
    known: Sequence[nn.Parameter] | None = getattr(module, "_rackrun_reduces", None)
    return _reduces_now(module) if known is None else known


def ignored_by(module: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """Return the parameters that DDP must ignore, because they are reduced elsewhere or not at all."""
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    return [parameter for name, parameter in module.module.named_parameters() if name in ignored]


def _reduces_now(module: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """Return the parameters that DDP would reduce if it were made now."""
    left_alone = {id(parameter) for parameter in ignored_by(module)}
    return [p for p in module.module.parameters() if p.requires_grad and id(p) not in left_alone]


def clear(module: DistributedDataParallel, parameter: torch.Tensor) -> None:
    """Clear the gradient of a micro-batch that is not the last. It becomes zero, not None, where parameters may be
    unused later, because DDP expects a gradient where an earlier micro-batch made one."""
    if parameter.grad is not None and (module.find_unused_parameters or module.static_graph):
        parameter.grad.zero_()
    else:
        parameter.grad = None


def freeze(module: DistributedDataParallel) -> None:
    """Lay out the buckets now, for good.

    DDP would let rank 0 send the layout to the others, though it is the same on all. A rank lost during that would
    leave another with garbage for a layout, for which torch raises an error.
    """
    if not module.find_unused_parameters:  # otherwise DDP never rebuilds them
        asking_nobody = getattr(module.process_group, "asking_nobody", contextlib.nullcontext)
        with asking_nobody():
            module.reducer._push_all_rebuilt_params()
            module.reducer._rebuild_buckets()
