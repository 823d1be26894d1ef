"""The process of one check: ``python -m benchmarks.gpu.child JSON``. What it finds lies in ``result.json`` of its folder, whole or not at all.

It begins when it is told its limit, in a line on its standard input. So it can be started while the check before it is at work: it then imports what
is slow to import, and touches no GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.registry import Check, Context, Found, Skip, load
from rackrun.agent.host import proc

__all__ = ["TRACES_S", "main"]

TRACES_S = 5.0
"""So long before the limit the stacks of all threads go to the log."""


def main(given: str) -> NoReturn:
    order: dict[str, Any] = json.loads(given)
    proc.die_with(order["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    checks = load(order["modules"])
    if order["ahead"]:
        with contextlib.suppress(ImportError):  # the check that needs it says so
            from benchmarks.gpu import seams  # noqa: F401 - with all of torch and rackrun, it takes seconds
    told = sys.stdin.readline()
    if not told:
        os._exit(0)  # it is not to begin any more
    limit_s = float(told)
    faulthandler.enable()
    faulthandler.dump_traceback_later(traces_after(limit_s), exit=False)
    deadline = time.monotonic() + limit_s
    os.environ["RACKRUN_KIT_DEADLINE"] = repr(deadline)  # ranks and scripts print their stacks in time, too
    context = Context(order["mode"], Path(order["folder"]), Path(order["shared"]), limit_s, deadline)
    answer = _answer(order["id"], checks, context)
    written = context.folder / "result.json.new"
    written.write_text(json.dumps(answer))
    written.rename(context.folder / "result.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without destructors of CUDA and NCCL: what was found is found


def traces_after(limit_s: float) -> float:
    return max(limit_s - TRACES_S, limit_s / 2)


def _answer(wanted: str, checks: list[Check], context: Context) -> dict[str, Any]:
    try:
        one = next(one for one in checks if one.id == wanted)
        found = one.run(context)
    except Skip as error:
        outcome, found = "skip", Found(note=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this check's failure, and the others go on
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome, found = "fail", Found(note=f"{type(error).__name__}: {error} ({where})")
    else:
        outcome = "ok" if found.ok else "fail"
    note = "; ".join(filter(None, [found.note, *context.notes]))
    return {"outcome": outcome, "value": found.value, "unit": found.unit, "note": note}


if __name__ == "__main__":
    main(sys.argv[1])
