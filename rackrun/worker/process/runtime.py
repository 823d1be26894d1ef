"""Makes this process a worker: under an agent, alone, or under torchrun.

Under an agent the default process group is elastic, and the coordinator decides about the world. Alone (plain
``python``) the world is one rank, on loopback groups, which are exact. Under ``torchrun`` the same group uses one
communicator that is never replaced: the script trains, and prints once that a failure ends it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rackrun.errors import UsageError
from rackrun.link.channel import WorkerChannel
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
from rackrun.protocol.boot import Boot, current
from rackrun.protocol.commands import GenerationPlan, Member
from rackrun.protocol.events import WorkerElastic
from rackrun.protocol.ids import BEGIN, Incarnation, SlotId, Step, step_in
from rackrun.worker import torch_compat
from rackrun.worker.communicators.communicator import Communicator
from rackrun.worker.communicators.nccl_environment import prepare_environment
from rackrun.worker.communicators.setup_broadcasts import Broadcasts
from rackrun.worker.membership.communicator_builder import build_communicator
from rackrun.worker.membership.elastic_group import BACKEND
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.control_thread import ControlThread
from rackrun.worker.steps.unit_times import UNKNOWN, Allowance, UnitTimes

__all__ = ["Runtime", "start"]


class Runtime:
    """The worker's connections: world, channel (None without an agent), heartbeat page. Creating it joins the world."""

    def __init__(self, boot: Boot | None) -> None:
        if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS") == "1":
            raise UsageError(
                "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 bypasses registered backends, so groups could not be replaced.",
                remedy="unset it.",
            )
        prepare_environment()
        torch_compat.check()
        self.boot = boot
        self._entered_s = time.monotonic()
        self._entries = UnitTimes()
        self.device = _device(boot)
        if self.device.type == "cuda":
            torch_compat.require("nccl")
        page_fd = boot.page_fd if boot else HeartbeatPage.create("alone")
        self.page = HeartbeatPage(page_fd)
        self.page.enter(Activity.SETUP, BEGIN, *UNKNOWN)
        self.channel = WorkerChannel(boot.channel_fd) if boot else None
        slot, incarnation = (boot.slot, boot.incarnation) if boot else (SlotId("alone/0"), Incarnation(0))
        self.world = WorkerMembership(self.page, self.device, slot, incarnation, boot.token if boot else "")
        self.world.broadcasts = Broadcasts(boot)
        if not self.world.queue.is_host:
            torch_compat.watch_waits(self.world.own_time.stream_wait)
        rank, size = self._init_groups(boot)
        if self.channel and boot:  # not earlier: a plan builds the groups that exist when it arrives
            ControlThread(boot, self.channel, self.page, self.world, self.snapshots).start()
            self.channel.send(WorkerElastic(slot=boot.slot, incarnation=boot.incarnation))
            if not boot.spare:
                self.world.join(self.world.wait_plan())
        elif size > 1:
            self._join_torchrun(rank)
        else:
            self.world.begin_alone()

    def snapshots(self) -> tuple[Step, ...]:
        """Return the ids of this worker's sealed snapshots, oldest first. Those of a former layout are included until a
        gate has passed in this one."""
        layout, begun = self.world.layout, self.world.passed > self.world.began
        found = (Step(named) for named in sorted(self.page.snapshots()))
        return tuple(named for named in found if not begun or step_in(layout, named) is not None)

    @property
    def spare(self) -> bool:
        """Whether this process was started as a spare; False without an agent."""
        return self.boot is not None and self.boot.spare

    def _init_groups(self, boot: Boot | None) -> tuple[int, int]:
        rank, size = (
            (boot.rank, boot.world_size)
            if boot
            else (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        )
        torch_compat.install()
        torch_compat.register_backend(BACKEND, lambda: self.world.create_default(*self._place))
        self._make_default_group(rank, size)
        return rank, size

    def _make_default_group(self, rank: int, size: int) -> None:
        self._place = rank, size
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
        torch_compat.adopt_default_group()

    def begin_main(self) -> None:
        """Start to measure the time from entering ``main`` to run.steps()."""
        self._entered_s = time.monotonic()

    def main_reached_steps(self) -> None:
        """Record that ``main`` has reached run.steps()."""
        self._entries.took(time.monotonic() - self._entered_s)

    @property
    def setup_ms(self) -> int:
        """The longest time that ``main`` took to reach run.steps(), in milliseconds."""
        return int(1e3 * self._entries.longest_s)

    def entry_allowance(self) -> Allowance:
        """Return the limits without progress for ``main`` when it is entered again."""
        return self._entries.entry()

    def begin_again(self, plan: GenerationPlan) -> None:
        """Start over like a new process, with a default group and no other.

        The group joins the generation of ``plan``; where the plan does not cut all shards anew, this process waits like
        a spare instead. Raises `Superseded`.
        """
        mine = self.member_of(plan)
        self.world.begin_again(plan, mine.rank)
        torch_compat.forget_groups()
        torch_compat.forget_meshes()
        self.set_rank_environment(mine.rank, plan.world_size)
        self.world.broadcasts.begin_again()
        self.world.broadcasts.republish_at(plan.store)
        self._make_default_group(mine.rank, plan.world_size)
        if plan.reshard is not None:
            self.world.start_build(plan)
            self.world.join(plan)

    def set_rank_environment(self, rank: int, world_size: int) -> None:
        """Set the environment's rank and world size, so that they agree with torch's."""
        of_role = {"ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(world_size)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), **of_role}

    def member_of(self, plan: GenerationPlan) -> Member:
        """Return this process's entry in a plan that it has received."""
        assert self.boot is not None, "only an agent brings plans"
        me = self.boot.slot, self.boot.incarnation
        return next(member for member in plan.members if (member.slot, member.incarnation) == me)

    def _join_torchrun(self, rank: int) -> None:
        if rank == 0:
            print(
                "rackrun: started by torchrun: training runs, but a failure ends it; start it with rackrun to go on.",
                file=sys.stderr,
            )
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not served,
            timeout=timedelta(minutes=10),
        )
        self._store = store
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

        def build(name: str, group_rank: int, group_size: int) -> Communicator:
            within = dist.PrefixStore(f"rackrun/{attempt}/{name}", store)
            return build_communicator(self.device, within, group_rank, group_size, timedelta(minutes=10))

        self.world.join_fixed(build)


_runtime: Runtime | None = None


def start() -> Runtime:
    """Return the runtime of this process, which the first call creates."""
    global _runtime  # noqa: PLW0603 - torch's default group is one per process too
    if _runtime is None:
        _runtime = Runtime(current())
    return _runtime


_SHARE = "RACKRUN_SHARE_GPUS"


def _share_gpu(local: int) -> int:
    """Let several ranks share a GPU, for tests, and return the GPU's index.

    NCCL refuses two ranks of one host on one GPU. Each rank claims a host of its own, so NCCL connects them by sockets.
    The claimed names are unique: trays that share a host have the same local ranks, and so have hosts.
    """
    print(
        f"rackrun: local rank {local} shares a GPU with others ({_SHARE}=1): for tests, and slow",
        file=sys.stderr,
        flush=True,
    )
    for name, value in {
        "NCCL_HOSTID": f"rackrun-{socket.gethostname()}-{os.getpid()}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)
    return local % torch.cuda.device_count()


def _refuse_cpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> None:
    """Raise `UsageError` if this host has GPUs that are not hidden, torch is built for them, and it sees none: the job
    would silently compute on CPUs. (The launcher refuses a torch for CPUs.)"""
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "all").strip() == ""
    if torch.version.cuda is None or hidden or not any(devices.glob("nvidia[0-9]*")):
        return
    why = "torch.cuda.is_available() is False"
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever it says is the reason
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    raise UsageError(
        f"this host has GPUs, and torch {torch.__version__} sees none: {why.rstrip('.')}.",
        remedy="see nvidia-smi: the driver may be too old for this torch, or of another version than its libraries; or hide the "
        "GPUs to train on CPUs (CUDA_VISIBLE_DEVICES=).",
    )


def _device(boot: Boot | None) -> torch.device:
    if not torch.cuda.is_available():
        _refuse_cpus(os.environ)
        return torch.device("cpu")
    local = boot.local_rank if boot else int(os.environ.get("LOCAL_RANK", "0"))
    if os.environ.get(_SHARE) == "1" and torch.cuda.device_count():
        local = _share_gpu(local)
    if local >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local} has no GPU: this host has {torch.cuda.device_count()}.",
            remedy="start no more workers a tray than it has GPUs (--nproc-per-node), or hide them all (CUDA_VISIBLE_DEVICES=).",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
