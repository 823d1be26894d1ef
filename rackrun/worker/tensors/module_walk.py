"""Walks through the modules of a model like torch's own methods, in a fraction of their time.

``named_modules`` and the methods built on it pass each name up through one generator for each level, which takes some
microseconds for every module. A step walks several times, and a large model has thousands of modules. Names, their
order, and the treatment of shared modules are the same as torch's.
"""

from __future__ import annotations

from torch import nn

__all__ = ["modules"]


def modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the same (name, module) pairs as ``root.named_modules()``."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    left: list[tuple[str, nn.Module]] = [("", root)]
    while left:
        path, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        if children := module._modules:
            prefix = f"{path}." if path else ""
            left += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return found
