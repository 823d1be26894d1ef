"""Fills a rank's state from images of ranks of another world: from disk when a job starts, or from old ranks'
snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.checkpoint.image.image_layout import ImageLayout, TensorEntry
from rackrun.checkpoint.image.reshard import Read, fill, plan_from
from rackrun.worker.state.state_image import entry_of
from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["Refill", "check_alike"]


class Refill:
    """A plan for filling a state. Creating it changes no value; it only allocates tensors that are missing (an
    optimizer's).

    ``holders``: the images that any tensor may come from. ``source(path, entry)``: the image for one tensor, as this
    rank is to have it, or None for any of ``holders``. Raises `LayoutMismatch` when the images do not hold all of the
    state.
    """

    def __init__(
        self,
        state: TrackedState,
        manifest: StateManifest,
        rank: int,
        layouts: Sequence[ImageLayout],
        holders: Sequence[int],
        source: Callable[[str, TensorEntry], int | None],
    ) -> None:
        self._state, self._manifest = state, state.fitted(manifest)
        self._tensors = state.allocate(self._manifest)
        parts = {info.path: state.as_part(info, self._tensors[info.path]) for info in self._manifest.tensors}
        parts |= state.parts()
        wanted: dict[int | None, list[TensorEntry]] = {}
        self._places: dict[str, torch.Tensor] = {}
        for path, tensor in self._tensors.items():
            target = entry_of(path, parts[path], rank)
            self._places[target.name] = tensor
            wanted.setdefault(source(path, target), []).append(target)
        self.fetches = plan_from(layouts.__getitem__, wanted, holders, turn=rank)
        """The reads from each image, in the order of their bytes."""

    def run(self, read: Read, threads: int = 1) -> None:
        """Fill the state with ``read(image, start, stop)``, with several threads for several images. An exception of
        ``read`` leaves the state torn."""

        def fill_from(image: int) -> None:
            fill(self.fetches[image], self._places, read)

        if threads <= 1 or len(self.fetches) <= 1:
            for image in self.fetches:
                fill_from(image)
        else:
            device = self._state.device
            with ThreadPoolExecutor(threads, "rackrun-refill", initializer=use_device, initargs=(device,)) as pool:
                for filled in [pool.submit(fill_from, image) for image in self.fetches]:
                    filled.result()
        self._state.load_plain(self._manifest, self._tensors)


def check_alike(manifests: Iterable[StateManifest], whose: str) -> None:
    """Raise `LayoutMismatch` when ranks had different values in a tensor of the same name, so that it is undecided
    which the new ranks get."""
    seen: dict[str, int] = {}
    for manifest in manifests:
        for path, mine in manifest.whole.items():
            if seen.setdefault(path, mine) != mine:
                raise LayoutMismatch(
                    f"{path} is not the same on all of {whose}.",
                    remedy="go on with as many ranks, or shard it as a DTensor.",
                )
