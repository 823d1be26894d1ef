"""Detects a thread that spins: it runs in a loop that calls nothing and stores nothing.

Such a loop does no work. It can only wait for a change by another thread or process, or run forever. So its processor
time is no sign of life (`rackrun.agent.workers.hang_detector`). The byte code decides: any instruction that might do
something makes the loop an ordinary one, which may be work. A loop that calls, computes or stores something in every
round is never reported as spinning.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType

__all__ = ["SpinDetector", "idle_loop"]

_HARMLESS = frozenset(
    {
        *("NOP", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", "POP_TOP", "COPY", "SWAP", "DUP_TOP", "ROT_TWO", "ROT_THREE"),
        *("LOAD_CONST", "LOAD_CONST_IMMORTAL", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"),
        *(
            "LOAD_FAST_LOAD_FAST",
            "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
            "LOAD_GLOBAL",
            "LOAD_NAME",
            "LOAD_DEREF",
            "LOAD_ATTR",
        ),
        *("COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT", "TO_BOOL", "BINARY_SUBSCR"),
    }
)
_HARMLESS_PREFIXES = ("JUMP_", "POP_JUMP_")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_NO_NEXT = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN_", "RAISE_", "RERAISE")
_KNOWN_MAX = 256


def idle_loop(code: CodeType, at: int) -> frozenset[int] | None:
    """Return the byte offsets of all instructions that a loop through the one at ``at`` may reach, if these call
    nothing and store nothing.

    Returns None if there is no loop, or if it may do something.
    """
    instructions = {one.offset: one for one in dis.get_instructions(code)}
    if at not in instructions:
        return None
    after = _successors(code, list(instructions.values()))
    before: dict[int, list[int]] = {}
    for source, targets in after.items():
        for target in targets:
            before.setdefault(target, []).append(source)
    loop = _reached(at, after) & _reached(at, before)
    names = [instructions[offset].opname for offset in loop]
    harmless = all(name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES) for name in names)
    return frozenset(loop) if loop and harmless else None


def _successors(code: CodeType, instructions: list[dis.Instruction]) -> dict[int, list[int]]:
    """Return, by each instruction's offset, the offsets of those that may follow it, including exception handlers."""
    after: dict[int, list[int]] = {}
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        after[one.offset] = [one.argval] if one.opcode in _JUMPS else []
        if following is not None and not one.opname.startswith(_NO_NEXT):
            after[one.offset].append(following.offset)
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        for offset, targets in after.items():
            if entry.start <= offset < entry.end:
                targets.append(entry.target)
    return after


def _reached(begin: int, edges: dict[int, list[int]]) -> set[int]:
    """Return the nodes that can be reached from ``begin`` by one edge or more."""
    found: set[int] = set()
    todo = [*edges.get(begin, ())]
    while todo:
        if (offset := todo.pop()) not in found:
            found.add(offset)
            todo += edges.get(offset, ())
    return found


class SpinDetector:
    """Watches the thread ``ident`` from another thread, several times a second."""

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self._known: dict[tuple[CodeType, int], frozenset[int] | None] = {}
        self._here: tuple[int, CodeType, frozenset[int]] | None = None
        self._since_ns = 0

    def poll(self, now_ns: int) -> int:
        """Return since when, in ns, every call has found the thread in the same idle loop; 0 if it is in none now."""
        frame = sys._current_frames().get(self._ident)
        loop = None if frame is None else self._loop(frame.f_code, frame.f_lasti)
        here = (id(frame), frame.f_code, loop) if frame is not None and loop is not None else None
        if here is None or here != self._here:
            self._since_ns = now_ns if here is not None else 0
        self._here = here
        return self._since_ns

    def _loop(self, code: CodeType, at: int) -> frozenset[int] | None:
        if (code, at) not in self._known:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[code, at] = idle_loop(code, at)
        return self._known[code, at]
