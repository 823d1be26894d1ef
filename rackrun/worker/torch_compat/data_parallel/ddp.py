"""DDP's buckets, torch 2.10 to 2.15: one layout, the same on every rank and in every generation.

DDP rebuilds its buckets after the first backward, in the order in which gradients came. A newcomer's DDP, freshly made,
would have other buckets than the survivors': their all-reduces would not match (gloo ends the process), and the order of
summation, hence the bits, would differ. So the layout is frozen at construction, in *reverse* parameter order, which is
about the order of backward: in forward order all communication would start only after backward has ended.
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


def missing() -> list[str]:
    needed = ("_build_params_for_reducer",)
    reducer = ("_push_all_rebuilt_params", "_rebuild_buckets", "_reset_state")
    found = [f"DistributedDataParallel.{name} is gone" for name in needed if not hasattr(DistributedDataParallel, name)]
    if not hasattr(dist, "_register_builtin_comm_hook"):
        found.append("torch.distributed._register_builtin_comm_hook is gone")
    return found + [
        f"Reducer.{name} is gone" for name in reducer if not hasattr(torch._C._distributed_c10d.Reducer, name)
    ]


def exchanges_parameters(module: nn.Module) -> bool:
    """DDP over tensor parallelism, as torch joins them (``DDP(..., device_mesh=)``): hooks make DTensors of parameters before each forward, and
    leave others in their place. Source: ``torch/distributed/tensor/parallel/ddp.py``."""
    hooks = [hook for one in module.modules() for hook in one._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") == "torch.distributed.tensor.parallel.ddp" for hook in hooks)


def install() -> None:
    if getattr(DistributedDataParallel, "_rackrun_frozen_buckets", False):
        return
    build: Callable[[DistributedDataParallel], tuple[list[Any], list[Any]]] = (
        DistributedDataParallel._build_params_for_reducer
    )
    init = DistributedDataParallel.__init__

    def build_reversed(self: DistributedDataParallel) -> tuple[list[Any], list[Any]]:
        parameters, sparse = build(self)
        return list(reversed(parameters)), list(reversed(sparse))

    def init_frozen(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._rackrun_reduces = _reduces_now(self)  # type: ignore[assignment]
        freeze(self)

    DistributedDataParallel._build_params_for_reducer = build_reversed  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = init_frozen  # type: ignore[method-assign]
    DistributedDataParallel._rackrun_frozen_buckets = True  # type: ignore[attr-defined]


def begin(module: DistributedDataParallel) -> None:
    """Before a unit: a step that was left between two micro-batches must not decide whether this one's first forward
    broadcasts buffers. A newcomer's would, and the survivors' would not."""
    module.require_forward_param_sync = True
    module.require_backward_grad_sync = True


def reset(module: DistributedDataParallel) -> None:
    """After a forward whose backward never came: the reducer still expects it, and would communicate in the next backward of
    all, even one under no_sync. Its buckets are made anew, in the same layout."""
    module.reducer._reset_state()
    freeze(module)


def synchronise_gradients(module: DistributedDataParallel, last: bool) -> None:
    """Communicate in the coming backward pass, or not. Raises `StepError` where torch cannot leave it out: with ``static_graph=True``
    its reducer learns the graph in the first backward pass that communicates, and fails in one before that."""
    if module.static_graph and not getattr(module, "_rackrun_knows_graph", False):
        if not last:
            raise StepError(
                "DistributedDataParallel(static_graph=True) cannot begin with a step of several micro-batches: torch's reducer must "
                "communicate in its first backward pass.",
                remedy="leave out static_graph=True, or give each rank one micro-batch a step (micro_batch_size = global_batch_size / ranks).",
            )
        module._rackrun_knows_graph = True  # type: ignore[assignment]
    module.require_backward_grad_sync = last


def hook(
    module: DistributedDataParallel, reduce: Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]
) -> Callable[[], None]:
    """Have ``reduce`` sum the buckets: DDP then divides nothing. Returns what lets go of it, without which the reducer, which
    Python cannot look into, would hold on to it for ever. Raises `StepError` where the script has a hook of its own."""
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
    """What the script's communication hooks keep from one step to the next: the error that PowerSGD feeds back, say."""
    states = [state for _, state in getattr(module, "_comm_hooks", ())]
    return [state for state in states if state is not None and not isinstance(state, dist.ProcessGroup)]


def divide_alike(module: DistributedDataParallel) -> None:
    """Have DDP round the mean over the ranks in one way, whatever a gradient was before the backward pass. At run.steps(), when no
    other hook of ours will be registered.

    With ``gradient_as_bucket_view=True`` torch's reducer divides a gradient by the number of ranks where it is the bucket's view
    already (``zero_grad(set_to_none=False)`` leaves it one), and multiplies it by the reciprocal where it was None: other bits, unless
    the number is a power of two. A newcomer's gradients are None, and so are all after a resume. torch's own hook always divides.
    """
    if not module.gradient_as_bucket_view:
        return
    with contextlib.suppress(RuntimeError):  # with a hook of the script's own the reducer divides nothing
        dist._register_builtin_comm_hook(module.reducer, dist.BuiltinCommHookType.ALLREDUCE)


def reduced_by(module: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """The parameters whose gradients DDP reduces: not those that were frozen when it was made."""
    known: Sequence[nn.Parameter] | None = getattr(module, "_rackrun_reduces", None)
    return _reduces_now(module) if known is None else known


def ignored_by(module: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """Those that DDP was told to leave alone, by those who reduce them elsewhere, or not."""
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    return [parameter for name, parameter in module.module.named_parameters() if name in ignored]


def _reduces_now(module: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """What it would reduce if it were made now."""
    left_alone = {id(parameter) for parameter in ignored_by(module)}
    return [p for p in module.module.parameters() if p.requires_grad and id(p) not in left_alone]


def clear(module: DistributedDataParallel, parameter: torch.Tensor) -> None:
    """Forget the gradient of a micro-batch that is not the last. DDP expects to find one where an earlier micro-batch made it, if
    parameters may be unused in a later."""
    if parameter.grad is not None and (module.find_unused_parameters or module.static_graph):
        parameter.grad.zero_()
    else:
        parameter.grad = None


def freeze(module: DistributedDataParallel) -> None:
    """Lay the buckets out now, for good. DDP would have rank 0 tell the others of the layout, which is the same on all: a rank lost in that
    would leave another with a layout of garbage, for which torch raises."""
    if not module.find_unused_parameters:  # then DDP never rebuilds them
        asking_nobody = getattr(module.process_group, "asking_nobody", contextlib.nullcontext)
        with asking_nobody():
            module.reducer._push_all_rebuilt_params()
            module.reducer._rebuild_buckets()
