"""Converts the values of ``run.log`` to numbers or short texts. It accepts any object, because a log line must not end
a training."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rackrun.protocol.encodable import bounded, number_or_text

__all__ = ["log_values"]

_NAME_CHARS_MAX = 200
_TEXT_CHARS_MAX = 1_000
_VALUES_MAX = 1_000


def log_values(values: Mapping[str, object]) -> dict[str, float | int | str]:
    """Return at most the first thousand values as numbers or texts.

    Numbers stay numbers, including those of NumPy and torch (tensors with one element); integers above 64 bits are
    rounded. Everything else becomes text.
    """
    first = list(values.items())[:_VALUES_MAX]
    return {
        bounded(str(name), _NAME_CHARS_MAX): number_or_text(_without_grad(value), _TEXT_CHARS_MAX)
        for name, value in first
    }


def _without_grad(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value
