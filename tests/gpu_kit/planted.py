"""Checks that do what checks must not, for the tests of the kit's runner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu.registry import Context, Found, Skip, check, failed


@check("A1", "all is well", expected="7", limit_s=20)
def well(context: Context) -> Found:
    context.note(f"mode {context.mode}")
    return Found(7.0, "things")


@check("A2", "it is not as expected", expected="7", limit_s=20)
def defect(context: Context) -> Found:
    return failed("6 is not 7", 6.0, "things")


@check("A3", "a figure that is worse", expected="7", limit_s=20, must=False)
def figure(context: Context) -> Found:
    return failed("6 is not 7", 6.0)


@check("A4", "it cannot run here", expected="-", limit_s=20)
def cannot(context: Context) -> Found:
    raise Skip("there is no moon")


@check("A5", "not in a dry run", expected="-", limit_s=20, not_dry="the host has no such thing")
def real(context: Context) -> Found:
    raise AssertionError("it was run")


@check("B1", "it raises", expected="-", limit_s=20)
def raises(context: Context) -> Found:
    (context.folder / "rank-0.txt").write_text("the rank's last words\n")
    raise ZeroDivisionError("by nothing")


@check("B2", "it hangs, with a child in a session of its own", expected="-", limit_s=1.5)
def hangs(context: Context) -> Found:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("hanging", flush=True)
    time.sleep(600)
    return Found()


@check("B3", "it is killed by a signal", expected="-", limit_s=20)
def dies(context: Context) -> Found:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Found()


@check("B4", "it ends without an answer", expected="-", limit_s=20)
def silent(context: Context) -> Found:
    os._exit(5)


@check("B5", "it answers, and leaves a process", expected="-", limit_s=20)
def leaves(context: Context) -> Found:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return Found("done")


def _meets(context: Context, mine: str, other: str) -> Found:
    (context.shared / mine).touch()
    while not (context.shared / other).exists():
        if time.monotonic() > context.deadline - 2:
            return failed(f"{other} did not run at the same time")
        time.sleep(0.01)
    (context.shared / f"{mine}-over").touch()
    return Found()


@check("B12", "it meets B13", expected="-", limit_s=30, beside=True)
def meets_one(context: Context) -> Found:
    return _meets(context, "B12", "B13")


@check("B13", "it meets B12", expected="-", limit_s=30, beside=True)
def meets_other(context: Context) -> Found:
    return _meets(context, "B13", "B12")


@check("B14", "it begins when B12 and B13 are over", expected="-", limit_s=30)
def alone(context: Context) -> Found:
    here = [name for name in ("B12", "B13") if not (context.shared / f"{name}-over").exists()]
    return failed(f"{here} run beside it") if here else Found()


@check("D1", "it waits for the test", expected="-", limit_s=60)
def waits(context: Context) -> Found:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("waiting", flush=True)
    time.sleep(600)
    return Found()


@check("G1", "only if asked for", expected="-", limit_s=20)
def asked(context: Context) -> Found:
    return Found("asked")
