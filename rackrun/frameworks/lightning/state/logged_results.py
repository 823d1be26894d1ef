"""What ``self.log`` has collected on this rank since the epoch began, and the metrics of torchmetrics in the module.

Both are sums of this rank's own micro-batches. They change in the step, so they are put back when a step runs again, and
a process that takes a rank over receives those of the rank that is lost.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["captured_metrics", "captured_results", "restore_metrics", "restore_results"]

_BUILT_IN = {"max": max, "min": min, "sum": sum}
_OF_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_OF_METRIC = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_to_sync", "_should_unsync")


def captured_results(results: Any) -> dict[str, Any]:
    """Return the content of a collection of Lightning's results."""
    return {key: _captured_result(metric) for key, metric in results.items()}


def restore_results(results: Any, found: dict[str, Any], trainer: Any, package: Any) -> None:
    """Give a collection the content that `captured_results` has returned."""
    for key in [key for key in results if key not in found]:
        del results[key]
    for key, state in found.items():
        if key not in results:
            results[key] = _new_result(state, trainer, package)
        metric = results[key]
        for name, value in state["values"].items():
            setattr(metric, name, value.clone() if isinstance(value, torch.Tensor) else value)
    results.batch = results.batch_size = None


def captured_metrics(module: torch.nn.Module) -> dict[str, Any]:
    """Return the states of all metrics in ``module`` that have counted something."""
    return {
        name: {
            "states": {**_own_tensors(metric), **metric.metric_state},
            "values": {one: getattr(metric, one) for one in _OF_METRIC if hasattr(metric, one)},
        }
        for name, metric in _metrics(module).items()
        if metric._update_count or _own_tensors(metric)
    }


def restore_metrics(module: torch.nn.Module, found: dict[str, Any]) -> None:
    """Give the metrics in ``module`` the states that `captured_metrics` has returned, and reset all others."""
    for name, metric in _metrics(module).items():
        if name not in found:
            if metric._update_count:
                metric.reset()
            continue
        for one, value in found[name]["states"].items():
            setattr(metric, one, value.clone() if isinstance(value, torch.Tensor) else list(value))
        for one, value in found[name]["values"].items():
            setattr(metric, one, value)


def _own_tensors(metric: Any) -> dict[str, Any]:
    """Return name -> tensor of those that a metric keeps beside its states, as a minimum over time."""
    return {
        name: one
        for name, one in vars(metric).items()
        if isinstance(one, torch.Tensor) and name[0] != "_" and name not in metric._defaults
    }


def _metrics(module: torch.nn.Module) -> dict[str, Any]:
    from torchmetrics import Metric

    return {name: one for name, one in module.named_modules() if isinstance(one, Metric)}


def _captured_result(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    reduce = meta.reduce_fx
    built_in = any(reduce is one for one in _BUILT_IN.values())
    names = ["_forward_cache", "_computed", "_update_count", "has_reset"]
    if metric.is_tensor:
        names += ["value", *(["cumulated_batch_size"] if meta.is_mean_reduction else [])]
    return {
        "meta": {name: getattr(meta, name) for name in _OF_META},
        "reduce": [reduce.__name__, built_in],
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "is_tensor": metric.is_tensor,
        "values": {name: getattr(metric, name) for name in names},
    }


def _new_result(state: dict[str, Any], trainer: Any, package: Any) -> Any:
    """Make the entry that the first ``self.log`` of a name has made on the rank that is lost."""
    result = package.part("trainer.connectors.logger_connector.result")
    name, built_in = state["reduce"]
    meta = result._Metadata(**state["meta"], reduce_fx=_BUILT_IN[name] if built_in else getattr(torch, name))
    should, rank_zero_only = state["sync"]
    meta.sync = result._Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    metric = result._ResultMetric(meta, state["is_tensor"])
    if not state["is_tensor"]:
        metric.value = dict(trainer.lightning_module.named_modules())[meta.metric_attribute]
    return metric.to(trainer.strategy.root_device)
