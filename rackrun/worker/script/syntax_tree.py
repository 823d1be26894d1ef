"""The syntax tree of the user's script: several checks read it, and it is parsed once in a process."""

from __future__ import annotations

import ast
import functools
import linecache

__all__ = ["syntax_tree"]


def syntax_tree(file: str) -> ast.Module | None:
    """Return the tree of a file as `linecache` knows it; None if there is no source, or it has an error.

    Callers change nothing in it.
    """
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None
