"""Arithmetic in GF(2^8) for Reed-Solomon, with the polynomial x^8 + x^4 + x^3 + x^2 + 1.

Addition is XOR. Only coefficients are computed here, a few for each set; `rackrun.checkpoint.redundancy.isal` computes
on bulk bytes.

The code is Cauchy's (Bloemer and others, 1995), with each column divided by its first entry. Parity 0 is then the XOR
of all stripes, so a set that may lose one member is an XOR set and needs no multiplication. Every square part of the
matrix can be inverted, so any M lost stripes follow from any M parities.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["POINTS", "coefficient", "divide", "multiply", "solve"]

POINTS = 256
"""The most members and parities that one set may have together."""
_POLYNOMIAL = 0x11D


def _powers() -> tuple[list[int], list[int]]:
    """Return the powers of 2, listed twice, and for each number which power it is."""
    power, log, value = [0] * 510, [0] * 256, 1
    for n in range(255):
        power[n] = power[n + 255] = value
        log[value] = n
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return power, log


_POWER, _LOG = _powers()


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return _POWER[_LOG[a] + _LOG[b]] if a and b else 0


def divide(a: int, b: int) -> int:
    """Return the quotient. Raises ZeroDivisionError when ``b`` is 0."""
    if not b:
        raise ZeroDivisionError
    return _POWER[_LOG[a] + 255 - _LOG[b]] if a else 0


def coefficient(parity: int, member: int) -> int:
    """Return the factor of a set's stripe number ``member`` in parity number ``parity``: never 0, 1 in parity 0."""
    assert 0 <= member < POINTS - 1 - parity
    return divide(POINTS - 1 ^ member, POINTS - 1 - parity ^ member)


def solve(rows: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """Return weights with which the ``rows``, a square matrix that can be inverted, add up to ``wanted``."""
    size = len(wanted)
    table = [[*(row[at] for row in rows), wanted[at]] for at in range(size)]  # an equation for each column
    for at in range(size):
        pivot = next(line for line in range(at, size) if table[line][at])
        table[at], table[pivot] = table[pivot], table[at]
        table[at] = [divide(value, table[at][at]) for value in table[at]]
        for other in range(size):
            if other != at and (factor := table[other][at]):
                table[other] = [a ^ multiply(factor, b) for a, b in zip(table[other], table[at], strict=True)]
    return [line[size] for line in table]
