"""F and G: processes that share a GPU. What they hold, what is left when one is killed or hangs, and what the driver says of a wild pointer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import SCRIPTS, Job, train
from benchmarks.gpu.memory import used
from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, Skip, check, failed
from benchmarks.gpu.shared import compared, reference, strike

__all__: list[str] = []

_OF_DRIVER = "what the driver does with a process's memory"
GIB, MIB = 2**30, 2**20
_HOLD = """
import sys, time, torch
held = torch.ones(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(600)
"""


class _Holder:
    """A process with so much of the GPU's memory."""

    def __init__(self, gib: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(gib)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "held":
            raise RuntimeError(f"a process cannot hold {gib} GiB of the GPU")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@check(
    "F1",
    "what a process holds: a context; with one NCCL rank",
    expected="0.5 to 0.7 GB; <= 0.3 more",
    limit_s=60,
    must=False,
    not_dry=_OF_DRIVER,
)
def footprint(context: Context) -> Found:
    import torch

    torch.cuda.init()
    before = used()
    holder = _Holder(0.001)
    of_context = used() - before
    holder.kill()
    time.sleep(1.0)
    before = used()
    with Ranks(context, "processes:connected", 2) as ranks:
        ranks.wait_for("connected-0")
        ranks.wait_for("connected-1")
        each = (used() - before) / 2
        ranks.say("enough")
    context.note(f"with NCCL {each / GIB:.2f} GiB")
    return Found(of_context / GIB, "GiB", ok=each - of_context <= 0.5 * GIB)


def connected(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    communicator = rank.communicator("connected")
    communicator.call("allreduce", [torch.ones(4, device=rank.device)], seams.asynchronous()).wait()
    torch.cuda.synchronize()
    rank.say(f"connected-{rank.rank}")
    rank.wait_for("enough")
    return {}


@check("F2", "SIGKILL of a process with 20 GiB: its memory is free", expected="<= 1 s", limit_s=60, not_dry=_OF_DRIVER)
def memory_freed(context: Context) -> Found:
    import torch

    torch.zeros(1, device=context.device)
    before = used()
    holder = _Holder(20)
    held = used() - before
    if held < 19 * GIB:
        raise Skip("other processes change this GPU's memory meanwhile")
    os.kill(holder.process.pid, signal.SIGKILL)
    began = time.monotonic()
    while used() - before > GIB:
        if time.monotonic() - began > 20:
            return failed("20 s after the kill its memory is not free")
        time.sleep(0.002)
    took_s = time.monotonic() - began
    holder.process.wait()
    return Found(took_s, "s", ok=took_s <= 1.0)


@check(
    "F3",
    "a swap on a shared GPU: the spare warm, and cold (its first communicator is that of the swap)",
    expected="<= 2 s; <= 5 s",
    limit_s=110,
    must=False,
    not_dry="D7 goes this way; no device has to become warm",
)
def swap(context: Context) -> Found:
    took, steps, strikes = (
        {},
        60,
        [strike(1, 20, "forward")],
    )  # as many steps as in D7, whose run without strikes is kept
    undisturbed = reference(context, "ddp", steps)
    for name, more in (("warm", ()), ("cold", ("--cold",))):
        lines = train(context.within(name), "struck", wrap="ddp", steps=steps, strikes=strikes, spares=1, more=more)
        found = compared(context, undisturbed, lines, 3, strikes=1)
        if not found.ok or not isinstance(found.value, float):
            return failed(f"{name}: {found.note}")
        took[name] = found.value
    context.note(f"cold {took['cold']:.2f} s")
    return Found(took["warm"], "s", ok=took["warm"] <= 2.0 and took["cold"] <= 5.0)


# -- memory of one process in another
def _pickled(tensor: Any) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401 - it teaches the pickler what a tensor of a GPU is

    return bytes(ForkingPickler.dumps(tensor))


def exporter(rank: Rank) -> Any:
    """Gives its tensor away, and lives until it is killed, or told that it is enough."""
    import torch

    tensor = torch.arange(rank.given["size"] // 8, dtype=torch.int64, device=rank.device)
    torch.cuda.synchronize()
    new = rank.folder / "handle.new"
    new.write_bytes(_pickled(tensor))
    new.rename(rank.folder / "handle")
    rank.say("exported")
    rank.wait_for("enough")
    return {}


def importer(rank: Rank) -> Any:
    import pickle

    import torch
    import torch.multiprocessing

    if rank.rank == 1:
        return exporter(rank)
    torch.cuda.init()
    torch.zeros(1, device=rank.device)
    rank.wait_for("exported")
    there = pickle.loads((rank.folder / "handle").read_bytes())
    wanted = int(there.sum().item())
    copy, times = torch.empty_like(there), []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy.copy_(there)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    rank.say("imported")
    if rank.given["kill"]:
        same, ends = 0, time.monotonic() + 3
        while time.monotonic() < ends:
            same += int(there.sum().item()) == wanted
        return {"reads": same, "copy_s": min(times)}
    rank.say("enough")
    return {"same": bool(torch.equal(copy, there)), "copy_s": sorted(times)[3]}


@check(
    "F4",
    "the exporter of CUDA IPC memory is killed while another reads it",
    expected="recorded: lives or dies",
    limit_s=60,
    must=False,
    not_dry=_OF_DRIVER,
)
def exporter_killed(context: Context) -> Found:
    with Ranks(context, "processes:importer", 2, {"size": GIB, "kill": True}) as ranks:
        ranks.wait_for("imported")
        ranks.kill(1)
        try:
            told = ranks.answer(0)
        except RuntimeError as error:
            return Found("dies", note=str(error)[:300])
    return Found("lives", note=f"{told['reads']} reads gave the right sum within 3 s")


@check(
    "F5",
    "restore from another process of this GPU by CUDA IPC",
    expected=">= 1.5 TB/s; equal",
    limit_s=60,
    must=False,
    not_dry=_OF_DRIVER,
)
def by_ipc(context: Context) -> Found:
    size = 4 * GIB
    with Ranks(context, "processes:importer", 2, {"size": size, "kill": False}) as ranks:
        told = ranks.answer(0)
    rate = 2 * size / told["copy_s"] / 1e12
    return Found(rate, "TB/s", ok=told["same"] and rate >= 1.5) if told["same"] else failed("other bytes")


# -- what hangs
def _replaced(lines: list[dict[str, Any]]) -> set[int]:
    """Ranks that another process ended as."""
    first: dict[int, int] = {}
    for line in lines:
        if line["what"] == "begin":
            first.setdefault(line["rank"], line["pid"])
    return {line["rank"] for line in lines if line["what"] == "end" and line["pid"] != first.get(line["rank"])}


def _hung(context: Context, strikes: list[dict[str, Any]], wanted: set[int], bound_s: float) -> Found:
    steps = 60  # as in D7, whose run without strikes is kept
    undisturbed = reference(context, "ddp", steps)
    lines = train(context, "struck", wrap="ddp", steps=steps, strikes=strikes, spares=len(strikes))
    found = compared(context, undisturbed, lines, 3, strikes=len(strikes))
    if not found.ok or not isinstance(found.value, float):
        return found
    took_s = found.value
    if (replaced := _replaced(lines)) != wanted:
        return failed(f"ranks {sorted(replaced)} were replaced, not {sorted(wanted)}", took_s, "s")
    return Found(took_s, "s", f"ranks {sorted(replaced)} were replaced", ok=took_s <= bound_s)


@check(
    "F6",
    "a kernel hangs on one rank of three: who is replaced, and when",
    expected="that rank; <= 10 s",
    limit_s=110,
    not_dry="a kernel that hangs",
    beside=True,
)
def hung_kernel(context: Context) -> Found:
    return _hung(context, [strike(1, 20, "forward", "hang")], {1}, 10.0)


@check(
    "F7",
    "a filler with 20 GiB when its spare is needed",
    expected="gone, and its memory, <= 1 s",
    limit_s=80,
    not_dry="it is about the GPU's memory; benchmarks/filler.py has it on hosts",
)
def filler_gone(context: Context) -> Found:
    gib = 20
    record = context.folder / "job" / "record.jsonl"
    command = f"{sys.executable} {SCRIPTS / 'fill.py'} {record} {gib}"
    arguments = ["--wrap", "ddp", "--steps", "1000000"]  # it is ended when the filler is gone
    with Job(context, "job", "train.py", arguments, ranks=2, spares=1, options=["--filler", command]) as job:
        filler = job.wait_for(lambda line: line["what"] == "filler")["pid"]
        before = used()
        victim = job.wait_for(lambda line: line["what"] == "done" and line["rank"] == 1)["pid"]
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        while Path(f"/proc/{filler}").exists():
            if time.monotonic() - began > 30:
                return failed("the filler runs 30 s after its spare was needed")
            time.sleep(0.002)
        gone_s = time.monotonic() - began
        while before - used() < 15 * GIB:
            if time.monotonic() - began > 30:
                return failed(f"the filler is gone after {gone_s:.2f} s, and its memory is not free 30 s after")
            time.sleep(0.002)
        freed_s = time.monotonic() - began
    context.note(f"its process {gone_s:.2f} s")
    return Found(freed_s, "s", ok=freed_s <= 1.0)


@check(
    "F8",
    "a rank whose device does not come back when the world breaks",
    expected="replaced too; <= 12 s",
    limit_s=110,
    not_dry="a kernel that hangs",
    beside=True,
)
def device_stays_away(context: Context) -> Found:
    strikes = [strike(1, 20, "forward", "hang"), strike(2, 20, "update", after=None)]
    return _hung(context, strikes, {1, 2}, 12.0)


# -- an Xid
_WILD = """
import torch, triton, triton.language as tl
@triton.jit
def wild(pointer):
    tl.store(pointer + (1 << 40), 1.0)
wild[(1,)](torch.zeros(1, device="cuda"))
torch.cuda.synchronize()
"""


@check(
    "G1",
    "an illegal access of another process: Xid 31, and who is harmed",
    expected="heard <= 1 s, of the application; nobody else",
    limit_s=60,
    not_dry="an Xid is the driver's",
)
def illegal_access(context: Context) -> Found:
    import select

    import torch

    from rackrun.protocol.gpu_health import Health
    from rackrun.topology.gpu_driver.kernel_log import KernelLog
    from rackrun.topology.gpu_driver.nvml_watch import NvmlWatch
    from rackrun.topology.gpu_driver.readings import XidEvent
    from rackrun.topology.health.xid import judge_xid

    script = context.folder / "wild.py"  # Triton reads the source of a kernel from its file
    script.write_text(_WILD)
    some = torch.randn(1024, 1024, device=context.device)
    wanted = (some @ some).sum().item()
    log = KernelLog.open()
    heard: dict[str, tuple[int, float]] = {}
    with NvmlWatch(period_ms=200) as watch:
        watch.next(30.0)
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ends, same, ended_at = time.monotonic() + 30, True, None
        while time.monotonic() < ends and len(heard) < 2:
            same = same and (some @ some).sum().item() == wanted
            if ended_at is None and process.poll() is not None:
                ended_at, ends = time.monotonic(), time.monotonic() + 5
            said = watch.next(0.05)
            if isinstance(said, XidEvent):
                heard.setdefault("NVML", (said.xid, time.monotonic()))
            if isinstance(log, KernelLog) and select.select([log], [], [], 0)[0]:
                for xid in log.read():
                    heard.setdefault("kernel", (xid.xid, time.monotonic()))
    output = process.communicate(timeout=10)[0]
    if not process.returncode:
        return failed("the wild access ended well: nothing was proved")
    if not same:
        return failed("a multiplication of another process has other bits since")
    if not heard:
        return failed(f"no Xid was heard; the process said {output.strip()[-200:]}")
    numbers = {name: xid for name, (xid, _) in heard.items()}
    verdicts = {judge_xid(xid).health for xid in numbers.values()}
    context.note(f"{numbers}, judged {sorted(one.name for one in verdicts)}")
    last = min(at for _, at in heard.values())
    late_s = max(0.0, last - (ended_at or last))
    return Found(late_s, "s", ok=late_s <= 1.0 and verdicts <= {Health.APP, Health.OK})
