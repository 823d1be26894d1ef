"""The launcher's options that torchrun does not have."""

from __future__ import annotations

import argparse
import os
from typing import get_args

from torch.distributed.argparse_util import check_env, env

from rackrun.protocol.job_config import SlowRanks
from rackrun.version import __version__

__all__ = ["add_own_options"]


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser. Each has the attribute ``ours``, which keeps their abbreviations apart from
    torchrun's."""
    add = parser.add_argument_group("rackrun", "What torchrun does not have.").add_argument
    for action in (
        add("--spares", action=env, type=int, default=0, metavar="N", help="Slots held back as warm spares, out of those "
            "that exist: --nproc-per-node 8 --spares 1 trains with WORLD_SIZE 7."),
        add("--filler", action=env, type=str, default=None, metavar="COMMAND", help="What to run beside every spare while it "
            "waits, at low priority, on the GPU of its slot. It gets a SIGTERM when the spare is needed, and is killed with all that "
            "it has started; it is started again beside whatever spare waits then."),
        add("--filler-grace", "--filler_grace", action=env, type=float, default=None, metavar="SECONDS", help="From that "
            "SIGTERM to SIGKILL, at most 0.4. Default: 0.2, and 0 where workers have GPUs: there the spare needs the memory, and waits "
            "until the filler is gone."),
        add("--trays", action=env, type=int, default=1, metavar="N", help="Stand-in for several compute trays on this "
            "host: N agents with --nproc-per-node slots each."),
        add("--rack", action=env, type=str, default=None, metavar="FILE", help="A rack file: trays, GPUs, NVLink domains. On "
            "one host every tray of it gets an agent here, with a worker for each GPU; of several hosts each runs the tray that "
            "has its name."),
        add("--mesh", action=env, type=str, default="", metavar="AXIS=N,..", help="The ranks as a mesh, the fastest axis last: "
            "dp=16,tp=4. Ranks that differ only along tp and ep stay in one NVLink clique. WORLD_SIZE is the product; slots "
            "beyond it and the spares wait."),
        add("--cross-clique", "--cross_clique", action=check_env, help="Go on over the network where a tp or ep group finds "
            "no room in any NVLink clique, instead of stopping."),
        add("--out-dir", "--out_dir", action=env, type=str, default=None, metavar="DIR", help="Journal, endpoint and "
            "result of the run. Default: a new directory under ${XDG_STATE_HOME:-~/.local/state}/rackrun/runs."),
        add("--token-file", "--token_file", action=env, type=str, default=os.environ.get("RACKRUN_TOKEN_FILE"),
            metavar="FILE", help="The job's shared secret: required with several hosts, the same on all of them. "
            "Default: $RACKRUN_TOKEN_FILE; on one host a new one is made."),
        add("--ledger", action=env, choices=("ids", "digest"), default="ids", help="What the journal keeps of the sample "
            "ids of each step: all of them, or a count and a digest."),
        add("--checkpoint-dir", "--checkpoint_dir", action=env, type=str, default=None, metavar="DIR", help="Where elastic "
            "scripts keep checkpoints, for a job that is lost as a whole: the same command, started again, goes on from "
            "the newest. The same directory on every host."),
        add("--checkpoint-every", "--checkpoint_every", action=env, type=int, default=None, metavar="STEPS", help="Steps "
            "from one to the next. Default: about as many as take five minutes."),
        add("--checkpoint-keep", "--checkpoint_keep", action=env, type=int, default=3, metavar="N", help="How many of the "
            "newest stay."),
        add("--lost-state", "--lost_state", action=env, choices=("stop", "restart"), default=None, help="When the last copy "
            "of some state is lost: stop with the reason, or begin again, from the newest checkpoint or step 0. Default: restart "
            "with --checkpoint-dir, else stop."),
        add("--lease", action=env, type=float, default=15.0, metavar="SECONDS", help="A tray whose agent has not been heard for so long "
            "is lost. A network that is silent for less than half of it costs none. The same on every host. Default: 15."),
        add("--snapshot-copies", "--snapshot_copies", action=env, type=str, default="mirror", metavar="WHAT", help="What other "
            "trays keep of the snapshots of shards that have no replica: mirror, a copy of each; xor, parity over sets of up to "
            "8 trays, which takes a seventh of that memory (xor:N: over N trays); rs:N+M, parity over sets of N+M trays, of which "
            "any M may be lost at once (needs rackrun[rs]); local, nothing. Default: mirror."),
        add("--policy", action=env, type=str, default="", metavar="WHAT", help="What to do on a failure: RUNG,.. in the order of "
            "preference (absorb, swap, move, acquire, shrink, wait, restart, stop), no-RUNG,.. to forbid some, or MODULE:FUNCTION, "
            "which is asked (docs/policies.md). Default: what is expected to lose the fewest GPU-seconds."),
        add("--policy-weights", "--policy_weights", action=env, type=str, default="", metavar="WHAT=N,..", help="What counts how "
            "much in what --policy expects: goodput (default 1), cost (0), resilience (1)."),
        add("--min-ranks", "--min_ranks", action=env, type=int, default=1, metavar="N", help="How far the world may shrink where lost "
            "ranks are not replaced; it grows again when workers can join. Default: 1. 0: its size is fixed."),
        add("--wait-for-hardware", "--wait_for_hardware", action=env, type=float, default=0.0, metavar="SECONDS", help="How long "
            "all ranks stand still for a tray to come back or to be added, where no spare and no free slot is left. Default: not."),
        add("--provider", action=env, type=str, default="", metavar="WHO", help="Where another rack comes from when no spare is left: "
            "local[:racks=N,after=SECONDS], simulated ones on this host; MODULE:FUNCTION[:ARGS], one of your own "
            "(docs/providers.md). Default: from nowhere."),
        add("--acquire-timeout", "--acquire_timeout", action=env, type=float, default=None, metavar="SECONDS", help="How long a rack "
            "may take to come before it is not waited for any more. Default: 3600."),
        add("--slow-ranks", "--slow_ranks", action=env, choices=get_args(SlowRanks), default="notice", metavar="WHAT",
            help="When a rank is slower than its peers, step after step: notice, say so; swap, replace it at a step boundary too, if a "
            "better slot has a spare; shift, give it fewer micro-batches and the others more; swap,shift, the one where that can be, "
            "else the other; off, do not look. Default: notice."),
        add("--slow-after", "--slow_after", action=env, type=float, default=10.0, metavar="SECONDS", help="So long, and in at "
            "least 15 of 20 steps, a rank must have been slower before that counts. Default: 10."),
        add("--check-replicas", "--check_replicas", action=env, type=int, default=0, metavar="STEPS", help="Compare digests of "
            "parameters and optimizer state between data-parallel replicas every so many steps; a rank whose bits are others is replaced, and all "
            "go back to where they were equal. Default: 0, never."),
        add("--nan-probation", "--nan_probation", action=check_env, help="A step whose loss is inf or NaN is computed once more before "
            "it counts; a rank whose loss is finite then has a GPU that is noted, and left after the second time."),
        add("--preload", action=env, type=str, default="", metavar="MODULE[,..]", help="Modules to import once, before "
            "workers are forked. They must neither start threads nor touch a GPU."),
        add("--quiet", action=check_env, help="No status line and no line about recoveries."),
        add("--version", action="version", version=f"rackrun {__version__}", help="Print the version of rackrun and exit."),
    ):  # fmt: skip
        action.ours = True  # type: ignore[attr-defined]  # see _Parser
