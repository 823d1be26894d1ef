"""Records which parameters each group of an optimizer trains, because a script that unfreezes part of its model changes
that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_

import torch

from rackrun.errors import StepError
from rackrun.worker.tensors.tensor_lists import same_objects
from rackrun.worker.torch_compat.data_parallel import fsdp

__all__ = ["OptimizerGroups"]


class OptimizerGroups:
    """The parameter groups of one optimizer.

    The initial groups are the same on every rank. Later changes are described by the paths of parameters, so that a
    newcomer receives them and an abandoned step undoes them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._at_first = [list(group["params"]) for group in optimizer.param_groups]
        self._all_at_first = list(chain.from_iterable(self._at_first))
        self._all_inside = -1
        """For how many parameters the optimizer had state when all of them were in the initial groups."""

    def changed(self, paths: Mapping[int, str], *, sharded: bool = False) -> dict[str, list[str]]:
        """Return the groups whose parameters differ from the initial ones: the group's index, as text -> paths of its
        parameters.

        ``paths``: of all tracked parameters, by ``id``. ``sharded``: whether some are FSDP2's. Raises `StepError` when
        the script has added a parameter of no tracked module.
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
        """Whether any group differs from its initial parameters."""
        return bool(self._changed())

    def outside(self, changed: bool | None = None) -> list[torch.Tensor]:
        """Return the parameters in no group for which the optimizer has state.

        ``changed``: what `has_changed` has just returned, if it is known. While groups are the initial ones, this looks
        again only when there is state for more or fewer parameters than before.
        """
        changed = self.has_changed() if changed is None else changed
        state = self._optimizer.state
        if not changed and len(state) == self._all_inside:
            return []
        trained = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        others = [one for one in state if isinstance(one, torch.Tensor) and id(one) not in trained]
        found = [one for one in others if state[one]]
        self._all_inside = -1 if changed or found else len(state)
        return found

    def put(
        self,
        count: int,
        changed: Mapping[str, Sequence[str]],
        parameters: Mapping[str, torch.Tensor],
        outside: Sequence[str] | None,
    ) -> None:
        """Change the optimizer to ``count`` groups: those in ``changed`` with these parameters, the others as at first.

        A new group has the optimizer's default options. State of parameters in no group is dropped, except of those
        with a path in ``outside``; None drops nothing. Raises `StepError` for a path that this rank does not have.
        """
        optimizer = self._optimizer
        for index in range(count):
            held = optimizer.param_groups[index]["params"] if index < len(optimizer.param_groups) else None
            wanted = self._wanted(index, changed, parameters)
            if held is None:
                optimizer.add_param_group({"params": wanted})
            elif not same_objects(held, wanted):
                optimizer.param_groups[index]["params"] = wanted
        del optimizer.param_groups[count:]
        self._all_inside = -1
        if outside is None:
            return
        kept = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kept |= {id(parameters[path]) for path in outside if path in parameters}
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in kept]:
            if isinstance(parameter, torch.Tensor):
                del optimizer.state[parameter]

    # -- helpers
    def _refused(self, index: int, at: int, paths: Mapping[int, str], *, sharded: bool) -> StepError:
        """Return the error for a script whose group ``index`` has, at position ``at``, a parameter of no tracked
        module."""
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
        if list(map(len, now)) == list(map(len, first)) and all(map(is_, chain.from_iterable(now), self._all_at_first)):
            return []
        return [index for index, held in enumerate(now) if index >= len(first) or not same_objects(held, first[index])]

    def _wanted(
        self, index: int, changed: Mapping[str, Sequence[str]], parameters: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        paths = changed.get(str(index))
        if paths is None and index < len(self._at_first):
            return list(self._at_first[index])  # a copy, because the script may change the group's list in place
        if paths is None or any(path not in parameters for path in paths):
            raise StepError(
                f"parameter group {index} of an optimizer is not to be had on the rank that takes over: {', '.join(paths or ['nothing'])}.",
                remedy="build the same model and optimizer on every rank and spare; nothing may depend on the rank before run.steps().",
            )
        return [parameters[path] for path in paths]
