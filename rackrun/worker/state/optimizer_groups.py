"""Which parameters each group of an optimizer trains: a script changes that when it unfreezes a part of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from rackrun.errors import StepError
from rackrun.worker.tensors.tensor_lists import same_objects
from rackrun.worker.torch_compat.data_parallel import fsdp

__all__ = ["OptimizerGroups"]


class OptimizerGroups:
    """Of one optimizer. What its groups had when it was tracked is the same on every rank; what they have instead by now is told by the paths of
    parameters, so that a newcomer gets it, and so that an abandoned step takes it back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._at_first = [list(group["params"]) for group in optimizer.param_groups]
        self._all_at_first = list(chain.from_iterable(self._at_first))

    def changed(self, paths: Mapping[int, str], *, sharded: bool = False) -> dict[str, list[str]]:
        """Number of each group with other parameters than at first -> their paths. ``paths``: of all tracked parameters, by ``id``. ``sharded``: some
        are FSDP2's.

        Raises `StepError` when the script has added a parameter of no tracked module.
        """
        found = {}
        for index in self._changed():
            trained = self._optimizer.param_groups[index]["params"]
            known = [paths.get(id(parameter), "") for parameter in trained]
            if "" in known:
                raise self._refused(index, known.index(""), paths, sharded=sharded)
            found[str(index)] = known
        return found

    def has_changed(self) -> bool:
        return bool(self._changed())

    def put(self, count: int, changed: Mapping[str, Sequence[str]], parameters: Mapping[str, torch.Tensor]) -> None:
        """Have ``count`` groups, those of ``changed`` with these parameters and the others as at first. Options of a group that is made are the
        optimizer's defaults. State of what is trained no more is dropped."""
        optimizer = self._optimizer
        for index in range(count):
            held = optimizer.param_groups[index]["params"] if index < len(optimizer.param_groups) else None
            wanted = self._wanted(index, changed, parameters)
            if held is None:
                optimizer.add_param_group({"params": wanted})
            elif not same_objects(held, wanted):
                optimizer.param_groups[index]["params"] = wanted
        del optimizer.param_groups[count:]
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in trained]:
            if isinstance(parameter, torch.Tensor):
                del optimizer.state[parameter]

    # -- helpers
    def _refused(self, index: int, at: int, paths: Mapping[int, str], *, sharded: bool) -> StepError:
        """What a script is told whose group ``index`` has a parameter of no tracked module as its ``at``-th."""
        trained = self._optimizer.param_groups[index]["params"]
        first = self._at_first[index] if index < len(self._at_first) else []
        former = paths.get(id(first[at]), "") if len(first) == len(trained) else ""
        shape, puts_back = tuple(trained[at].shape), f" {fsdp.PUTS_BACK}" if sharded else ""
        if former:
            return StepError(
                f"{former.replace('/param/', '.')} was exchanged in a tracked optimizer for a parameter (shape {shape}) that no tracked module "
                f"has.{puts_back}",
                remedy=fsdp.WRITE_INTO
                if sharded
                else "put it into its tracked module as well, or write its values into the parameter that there is.",
            )
        return StepError(
            f"a parameter (shape {shape}) that no tracked module has was added to a tracked optimizer.",
            remedy="pass the module that owns it to run.track as well."
            + (f" Where it is to replace a parameter of fully_shard: {fsdp.WRITE_INTO}" if sharded else ""),
        )

    def _changed(self) -> list[int]:
        first, groups = self._at_first, self._optimizer.param_groups
        now = [group["params"] for group in groups]
        if list(map(len, now)) == list(map(len, first)) and same_objects(
            list(chain.from_iterable(now)), self._all_at_first
        ):
            return []
        return [index for index, held in enumerate(now) if index >= len(first) or not same_objects(held, first[index])]

    def _wanted(
        self, index: int, changed: Mapping[str, Sequence[str]], parameters: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        paths = changed.get(str(index))
        if paths is None and index < len(self._at_first):
            return self._at_first[index]
        if paths is None or any(path not in parameters for path in paths):
            raise StepError(
                f"parameter group {index} of an optimizer is not to be had on the rank that takes over: {', '.join(paths or ['nothing'])}.",
                remedy="build the same model and optimizer on every rank and spare; nothing may depend on the rank before run.steps().",
            )
        return [parameters[path] for path in paths]
