"""The image of one rank before it is written: its layout, its tensors and its plain part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rackrun.checkpoint.image.image_layout import ImageLayout, TensorEntry, plan_image

__all__ = ["Image", "ImagePlanner"]


class Image(NamedTuple):
    """An image to be written. ``plain`` is a copy; the tensors are the state itself."""

    layout: ImageLayout
    tensors: dict[str, torch.Tensor]
    plain: bytes


class ImagePlanner:
    """Plans the image of one state again and again. The layout stays the same object until the structure changes."""

    def __init__(self) -> None:
        self._planned: tuple[Sequence[TensorEntry], int] | None = None
        self._layout: ImageLayout | None = None

    def image(self, entries: Sequence[TensorEntry], tensors: dict[str, torch.Tensor], plain: bytes) -> Image:
        """Return the image of ``tensors`` (name -> local tensor), which ``entries`` describe, and of ``plain``."""
        planned = entries, len(plain)
        if self._layout is None or planned != self._planned:
            self._planned, self._layout = planned, plan_image(entries, len(plain))
        return Image(self._layout, tensors, plain)
