"""The launcher's options that torchrun does not have."""

from __future__ import annotations

import argparse
import os
from typing import get_args

from torch.distributed.argparse_util import check_env, env

from rackrun.protocol.job_config import SlowRanks
from rackrun.protocol.policy_types import Rung
from rackrun.version import __version__

__all__ = ["add_own_options"]


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser. Each has the attribute ``ours``, which keeps their abbreviations apart from
    torchrun's."""
    add = parser.add_argument_group("rackrun", "Options that torchrun does not have.").add_argument
    for action in (
        add("--spares", action=env, type=int, default=0, metavar="N", help="Number of warm spares in the whole job. They are taken "
            "from the existing slots: --nproc-per-node 8 --spares 1 trains with WORLD_SIZE 7. Default: 0."),
        add("--filler", action=env, type=str, default=None, metavar="COMMAND", help="Command to run beside every spare while it "
            "waits, at low priority, on the GPU of its slot. When the spare is needed, the command gets a SIGTERM and is then killed "
            "with all processes that it has started. It starts again beside the next waiting spare. Default: none."),
        add("--filler-grace", "--filler_grace", action=env, type=float, default=None, metavar="SECONDS", help="Time between the "
            "filler's SIGTERM and SIGKILL, at most 0.4. Default: 0.2; 0 where workers have GPUs, because the spare needs the memory."),
        add("--trays", action=env, type=int, default=1, metavar="N", help="Simulate N compute trays on this host: N agents with "
            "--nproc-per-node slots each. Default: 1."),
        add("--rack", action=env, type=str, default=None, metavar="FILE", help="Rack file with trays, GPUs and NVLink domains. A "
            "single host runs an agent for every tray of the file, with one worker per GPU. With several hosts, each host runs the "
            "tray that has its name. Default: none."),
        add("--mesh", action=env, type=str, default="", metavar="AXIS=N,..", help="Mesh of the ranks, the fastest axis last: "
            "dp=16,tp=4. WORLD_SIZE is the product of the sizes. Ranks that differ only along tp and ep stay in one NVLink clique. "
            "Default: one data-parallel axis over all slots that are no spares."),
        add("--cross-clique", "--cross_clique", action=check_env, help="If a tp or ep group fits in no NVLink clique, let it use "
            "the network instead of stopping the job."),
        add("--out-dir", "--out_dir", action=env, type=str, default=None, metavar="DIR", help="Directory for the journal, the logs "
            "and the result of the run. Default: a new directory under ${XDG_STATE_HOME:-~/.local/state}/rackrun/runs."),
        add("--token-file", "--token_file", action=env, type=str, default=os.environ.get("RACKRUN_TOKEN_FILE"),
            metavar="FILE", help="File with the job's shared secret. Several hosts need one, the same on all of them. "
            "Default: $RACKRUN_TOKEN_FILE; on one host rackrun makes a new secret."),
        add("--ledger", action=env, choices=("ids", "digest"), default="ids", help="What the journal keeps of each step's sample "
            "ids: all ids, or their count and a digest. Default: ids."),
        add("--checkpoint-dir", "--checkpoint_dir", action=env, type=str, default=None, metavar="DIR", help="Directory in which "
            "elastic scripts write checkpoints: a path that all hosts share, or s3://, gs://, az://. After the loss of the whole "
            "job the same command continues from the newest checkpoint. Default: none."),
        add("--checkpoint-every", "--checkpoint_every", action=env, type=int, default=None, metavar="STEPS", help="Steps "
            "between two checkpoints. Default: about as many as take five minutes."),
        add("--checkpoint-keep", "--checkpoint_keep", action=env, type=int, default=3, metavar="N", help="Number of newest "
            "checkpoints to keep. Default: 3."),
        add("--lost-state", "--lost_state", action=env, choices=("stop", "restart"), default=None, help="What to do when the last "
            "copy of some state is lost: stop with the reason, or restart from the newest checkpoint or step 0. Default: restart "
            "with --checkpoint-dir, stop without."),
        add("--lease", action=env, type=float, default=15.0, metavar="SECONDS", help="Time without a message after which a tray is "
            "lost. A network outage of less than half of it costs no tray. Give the same value on every host. Default: 15."),
        add("--snapshot-copies", "--snapshot_copies", action=env, type=str, default="mirror", metavar="KIND", help="What other "
            "trays keep of the snapshots of shards without a replica. mirror: a copy of each. xor: parity over sets of up to 8 trays, "
            "for a seventh of the memory (xor:N: sets of N trays). rs:N+M: parity over sets of N+M trays, any M of which may be lost "
            "at once (needs rackrun[rs]). local: nothing. Default: mirror."),
        add("--log-to", "--log_to", action="append", default=[], metavar="KIND:TARGET", help="Where to write the values of run.log, "
            "once per committed step: jsonl:PATH, tensorboard:DIR, wandb:PROJECT, mlflow:URI[#EXPERIMENT] or otlp:URL. May be given "
            "several times (docs/loggers.md). Default: none."),
        add("--policy", action=env, type=str, default="", metavar="POLICY", help="What to do after a failure. RUNG,..: the first "
            f"possible of these ({', '.join(rung.value for rung in Rung)}). no-RUNG,..: any but these. "
            "MODULE:FUNCTION: ask this Python function (docs/write_a_policy.md). Default: the answer with the lowest expected loss in "
            "GPU-seconds; with reduction='fast' a shrink only if nothing else is possible (docs/policies.md)."),
        add("--policy-weights", "--policy_weights", action=env, type=str, default="", metavar="NAME=N,..", help="Weights of the "
            "expected loss: goodput, cost and resilience. Default: goodput=1,cost=0,resilience=1."),
        add("--min-ranks", "--min_ranks", action=env, type=int, default=1, metavar="N", help="Smallest number of ranks to which "
            "the world may shrink when lost ranks cannot be replaced. It grows again when workers can join. 0: the world never "
            "shrinks. Default: 1."),
        add("--wait-for-hardware", "--wait_for_hardware", action=env, type=float, default=0.0, metavar="SECONDS", help="Time that "
            "all ranks may wait for a tray to return or to be added, when no spare and no free slot is left. Default: 0, no wait."),
        add("--provider", action=env, type=str, default="", metavar="PROVIDER", help="Who provides another rack when no spare is left. "
            "local[:racks=N,after=SECONDS]: simulated racks on this host. MODULE:FUNCTION[:ARGS]: a provider of your own "
            "(docs/providers.md). Default: none."),
        add("--acquire-timeout", "--acquire_timeout", action=env, type=float, default=None, metavar="SECONDS", help="Time that the "
            "job waits for a rack from the provider. Default: 3600."),
        add("--slow-ranks", "--slow_ranks", action=env, choices=get_args(SlowRanks), default="notice", metavar="ACTION",
            help="What to do about a rank that is persistently slower than its peers. notice: report it. swap: also replace it at a "
            "step boundary, if a better slot has a spare. shift: also give it fewer micro-batches. swap,shift: swap if possible, "
            "else shift. off: do not look for slow ranks. Default: notice."),
        add("--slow-after", "--slow_after", action=env, type=float, default=10.0, metavar="SECONDS", help="Time for which a rank "
            "must be slower than its peers, in at least 15 of 20 steps, before it counts as slow. Default: 10."),
        add("--check-replicas", "--check_replicas", action=env, type=int, default=0, metavar="STEPS", help="Compare digests of "
            "parameters and optimizer state between data-parallel replicas every STEPS steps. A rank with different bits is replaced, "
            "and all ranks go back to the last step at which they were equal. Default: 0, never."),
        add("--nan-probation", "--nan_probation", action=check_env, help="Compute a step with an inf or NaN loss once more before it "
            "counts. If the loss is finite then, the GPU of its rank is noted, and the rank leaves it at the second time."),
        add("--preload", action=env, type=str, default="", metavar="MODULE[,..]", help="Modules to import once, before workers are "
            "forked. They must not start threads or use a GPU. Default: none."),
        add("--framework", action=env, type=str, default="", choices=("", "hf", "lightning", "titan"), metavar="NAME", help="Train "
            "every Trainer of transformers (hf), Lightning (lightning) or torchtitan (titan) in the script with rackrun's steps, without a "
            "change of the script (docs/huggingface.md, docs/lightning.md, docs/torchtitan.md). Default: none."),
        add("--quiet", action=check_env, help="Print no status line and no lines about recoveries."),
        add("--version", action="version", version=f"rackrun {__version__}", help="Print the version of rackrun and exit."),
    ):  # fmt: skip
        action.ours = True  # type: ignore[attr-defined]  # see _Parser
