"""Tests whether this torch does what rackrun needs of its private parts: each need is tried, not looked up by name.

A trial is a module of one parameter in a world of one rank on the CPU. A failed need is refused where a script uses it,
so a torch in which one part has changed still runs the rest. All trials together take 0.05 s, once for each torch:
success is recorded in ``$XDG_CACHE_HOME/rackrun`` (``~/.cache/rackrun``) where that can be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from rackrun.worker.torch_compat import nccl_groups
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp, fsdp_reduce, grad_norms

__all__ = ["TRIALS", "known_problems", "problems"]

_INTERFACE = "GLOO_SOCKET_IFNAME"
_VALUES = [3.0, 5.0]
"""Values of the parameter. The loss is its sum of squares, so its gradient is twice these values."""


class _One(nn.Module):
    """A module of one parameter, whose creation uses no random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(_VALUES))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.weight).sum() * factor


def _expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{what} is {found}, not {wanted}")


def _local(parameter: torch.Tensor) -> list[float]:
    gradient = parameter.grad
    assert gradient is not None, "no gradient"
    local: list[float] = getattr(gradient, "_local_tensor", gradient).tolist()
    return local


_ONCE = [2 * value for value in _VALUES]


# -- the trials --------------------------------------------------------------------------------------------------------
def _buckets_of_ddp() -> None:
    """Check that DDP's buckets are laid out once, and again after a forward without a backward."""
    if names := ddp.missing():
        raise AssertionError("; ".join(names))
    module = DistributedDataParallel(_One())
    ddp.freeze(module)
    ddp.begin(module)
    module(torch.ones(()))
    ddp.reset(module)
    module(torch.ones(())).backward()
    _expect("the gradient after an abandoned forward", _local(module.module.weight), _ONCE)
    _expect("what DDP reduces", [id(p) for p in ddp.reduced_by(module)], [id(module.module.weight)])


def _sums_of_ddp() -> None:
    """Check that another sum can replace DDP's own."""
    module, seen = DistributedDataParallel(_One()), []

    def triple(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().mul_(3))
        return done

    ddp.hook(module, triple)
    module(torch.ones(())).backward()
    _expect("the gradient that a hook has tripled", _local(module.module.weight), [3 * value for value in _ONCE])
    _expect("the number of buckets", len(seen), 1)


def _sharded(mesh: DeviceMesh | None = None) -> nn.Module:
    module: Any = fully_shard(_One(), mesh=mesh or init_device_mesh("cpu", (1,)))
    return cast("nn.Module", module)


def _going_back_of_fsdp() -> None:
    """Check that a step can be left in the middle: after a micro-batch whose gradient was not reduced, and after a
    forward without a backward."""
    module = _sharded()
    subs = fsdp.modules_of(module)
    one = torch.ones(())
    fsdp.synchronise_gradients(subs, last=False)
    module(one).backward()
    held = [fsdp.gradient_before_reduction(param) for param in fsdp.params(subs)]
    _expect("what is not reduced yet", [g.tolist() for g, _ in held if g is not None], [_ONCE])
    module(one)
    fsdp.reset(subs)
    _expect("what is gathered after a reset", fsdp.is_gathered(subs), False)
    _expect(
        "what a reset has left",
        [g for g, _ in map(fsdp.gradient_before_reduction, fsdp.params(subs)) if g is not None],
        [],
    )
    fsdp.synchronise_gradients(subs, last=True)
    module(one).backward()
    parameter = next(module.parameters())
    _expect("the gradient after a reset", _local(parameter), _ONCE)
    fsdp.begin(subs)
    _expect("the gradient of the step before, when another begins", _local(parameter), _ONCE)


def _another_place_in_fsdp() -> None:
    """Check that a built model can take another rank's place; here its own."""
    if names := fsdp.missing():
        raise AssertionError("; ".join(names))
    mesh = init_device_mesh("cpu", (1,))
    module = _sharded(mesh)
    fsdp.promote_sharded([module], 0, [mesh])
    _expect("the coordinate in the mesh", list(mesh.get_coordinate() or ()), [0])
    module(torch.ones(())).backward()
    _expect("the gradient after that", _local(next(module.parameters())), _ONCE)


def _sums_of_fsdp() -> None:
    """Check that another sum can replace FSDP2's own, and finds what earlier micro-batches have left."""
    if names := fsdp_reduce.missing():
        raise AssertionError("; ".join(names))
    module, decoded = _sharded(), []

    def encode(parameters: Any, gradients: Any, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        _expect("the number of ranks", ranks, 1)
        _expect("the parameters of a reduction", [id(p) for p in parameters], [id(p) for p in module.parameters()])
        return [gradient * 3 for gradient in gradients], torch.full((1,), 7.0)

    def add(output: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
        _expect("the size of its group", group.size(), 1)
        if whole is not output:
            output.copy_(whole)

    def decode(parameters: Any, sizes: Any, flat: torch.Tensor) -> None:
        decoded.append((len(parameters), flat[sum(sizes) :].tolist()))

    fsdp_reduce.divert(torch.float32, encode, add, decode)
    subs = fsdp.modules_of(module)
    try:
        fsdp.synchronise_gradients(subs, last=False)
        module(torch.ones(())).backward()
        found = [(gradient.tolist(), part().tolist()) for _, gradient, part in fsdp_reduce.local_gradients(module)]
        _expect("what is not reduced yet", found, [(_ONCE, _ONCE)])
        fsdp_reduce.clear_local_gradients(module)
        fsdp.synchronise_gradients(subs, last=True)
        module(torch.ones(())).backward()
    finally:
        fsdp_reduce.restore()
    _expect("the gradient that a sum has tripled", _local(next(module.parameters())), [3 * value for value in _ONCE])
    _expect("what goes with it", decoded, [(1, [7.0])])


def _norm_of_sharded_gradients() -> None:
    """Check that rackrun's norm can clip gradients."""
    if names := grad_norms.missing():
        raise AssertionError("; ".join(names))
    module = _sharded()
    module(torch.ones(())).backward()
    grad_norms.divert()
    try:
        total = clip_grad.clip_grad_norm_(module.parameters(), 1e9)
    finally:
        grad_norms.restore()
    exact: Any = grad_norms.exact_norm([p.grad for p in module.parameters() if p.grad is not None])
    _expect(
        "the norm by which clip_grad_norm_ clips",
        float(getattr(total, "_local_tensor", total)),
        float(exact.to_local()),
    )


def _names_of_nccl() -> None:
    """Check that a GPU's collectives are NCCL's."""
    if names := nccl_groups.missing():
        raise AssertionError("; ".join(names))


TRIALS: Mapping[str, tuple[str, Callable[[], None]]] = {
    "ddp": ("DistributedDataParallel", _buckets_of_ddp),
    "ddp exact": ('DistributedDataParallel with reduction="exact"', _sums_of_ddp),
    "fsdp": ("fully_shard (FSDP2)", _going_back_of_fsdp),
    "fsdp place": ("a spare for fully_shard (FSDP2)", _another_place_in_fsdp),
    "fsdp exact": ('fully_shard (FSDP2) with reduction="exact"', _sums_of_fsdp),
    "nccl": ("GPUs", _names_of_nccl),
    "norm exact": ('clip_grad_norm_ with reduction="exact"', _norm_of_sharded_gradients),
}
"""Need -> (what a script does that needs it, the trial)."""


# -- trying them -------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _world_of_one() -> Iterator[None]:
    interface = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = "lo"  # this host's name need not be resolvable
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        del os.environ[_INTERFACE]
        if interface is not None:
            os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        dist.destroy_process_group()
        fsdp.forget_meshes()  # a mesh of the script may equal one of the trials


def problems() -> dict[str, str]:
    """Run all trials, and return need -> error for those that failed. To be called before there is a default group."""
    found = {}
    with warnings.catch_warnings(), contextlib.ExitStack() as world:
        warnings.simplefilter("ignore")
        try:
            world.enter_context(_world_of_one())
        except Exception as error:  # noqa: BLE001 - then nothing can be tried
            return dict.fromkeys(TRIALS, f"no world of one rank: {type(error).__name__}: {error}")
        for name, (_, trial) in TRIALS.items():
            try:
                trial()
            except Exception as error:  # noqa: BLE001 - whatever it is, this torch is not known
                found[name] = f"{type(error).__name__}: {error}"
    return found


def known_problems() -> dict[str, str]:
    """Return `problems`, or nothing if this torch has passed before. Only success is recorded, because a failure may be
    temporary."""
    path = _passed()
    if path.exists():
        return {}
    found = problems()
    if not found:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return found


def _passed() -> Path:
    """Return the path of the file that exists when this torch has passed the trials of this rackrun."""
    mark = hashlib.blake2b(f"{torch.__file__} {torch.version.git_version}".encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        mark.update(source.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rackrun" / f"torch-{torch.__version__}-{mark.hexdigest()}-passed"
