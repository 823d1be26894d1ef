"""Parsing of torchrun's arguments and rackrun's own, checked as far as possible before anything is started.

Importing this module imports torch: set OMP_NUM_THREADS before.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from torch.distributed.argparse_util import env
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser

from rackrun.checkpoint.base.location import RemotePath, absolute, local_path
from rackrun.checkpoint.durable.storage.object_store import files_at
from rackrun.checkpoint.redundancy.shard_placement import Redundancy
from rackrun.coordinator.journal.journal_writer import LedgerMode
from rackrun.coordinator.sinks.targets import SinkTarget, parse_target
from rackrun.errors import UsageError
from rackrun.launch.options.filler_options import filler
from rackrun.launch.options.job_size import size_of
from rackrun.launch.options.output_directories import check_directory
from rackrun.launch.options.own_options import add_own_options
from rackrun.launch.options.policy_options import PolicyOptions, policy
from rackrun.launch.options.provider_options import ProviderOptions, provider
from rackrun.launch.options.rack_options import Axes, HostRack, mesh_text
from rackrun.launch.options.snapshot_copies import redundancy
from rackrun.link.address import host_and_port
from rackrun.protocol.agent_config import FillerConfig, ScriptConfig
from rackrun.protocol.job_config import SlowRanks
from rackrun.protocol.policy_types import Rules, Rung

__all__ = ["DEFAULT_PORT", "MAX_RESTARTS", "LaunchOptions", "make_parser", "parse"]

MAX_RESTARTS = 3
"""Default of --max-restarts. torchrun's is 0; no other default differs."""
DEFAULT_PORT = 29400

_DESCRIPTION = """\
rackrun runs a PyTorch training script on every GPU and keeps it running when hardware fails: a warm spare replaces a
lost rank within seconds. It takes every argument of torchrun, with the same meaning.

  rackrun --standalone --nproc-per-node 5 --spares 1 train.py --lr 3e-4
  rackrun --nnodes 18 --nproc-per-node 4 --spares 8 --rdzv-endpoint head:29400 --rdzv-id job7 \\
          --token-file /shared/job7.token train.py

exit codes: 0 done; 1 the script failed; 2 bad usage, nothing was started; 3 the job cannot survive the failure; 128+N
ended by signal N
"""


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options, checked."""

    script: ScriptConfig
    run_id: str
    """"": the user named none."""
    nodes_min: int
    nodes_max: int
    trays: int
    """Number of agents on this host."""
    slots: int
    """Workers on each tray, spares included; 0: ``rack`` gives the number for each."""
    spares: int
    filler: FillerConfig
    """The command that runs beside spares."""
    rack: HostRack | None
    mesh: Axes
    """Axes and sizes; (): none was given."""
    cross_clique: bool
    max_restarts: int
    endpoint: tuple[str, int] | None
    """Host and port of the coordinator; None: the job runs on this host alone."""
    node_rank: int | None
    out_dir: Path | None
    log_dir: str | None
    log_to: tuple[SinkTarget, ...]
    """Where the values of ``run.log`` are written."""
    redirects: str
    tee: str
    local_ranks_filter: str
    log_prefix: str
    """Prefix of teed lines; "": torchrun's."""
    token_file: Path | None
    ledger: LedgerMode
    redundancy: Redundancy
    """Redundancy of snapshots over trays."""
    worker_env: dict[str, str]
    """Options that workers receive through their environment: the mesh, checkpoints, comparison of replicas.

    Options that were not given are set as well, because variables in the launcher's environment may be from another
    job.
    """
    start_over: bool
    """Whether to begin again when the last copy of some state is lost."""
    min_ranks: int
    """Smallest number of ranks to which the world may shrink; 0: it never shrinks."""
    policy: PolicyOptions
    provider: ProviderOptions
    slow_ranks: SlowRanks
    slow_after_s: float
    quiet: bool
    role: str
    local_addr: str | None
    join_timeout_ms: int
    last_call_ms: int
    grace_s: float
    lease_s: float
    signals: tuple[signal.Signals, ...]
    of_steps: tuple[str, ...]
    """Options that were given but have no effect on a script without ``@rackrun.elastic``."""


_OF_TORCHRUN = frozenset(
    [
        "nnodes",
        "nproc_per_node",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "standalone",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "event_log_handler",
        "role",
        "module",
        "no_python",
        "run_path",
        "log_dir",
        "redirects",
        "tee",
        "local_ranks_filter",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "node_rank",
        "master_addr",
        "master_port",
        "local_addr",
        "logs_specs",
        "numa_binding",
        "signals_to_handle",
        "shutdown_timeout",
        "virtual_local_rank",
        "training_script",
        "training_script_args",
        "help",
        "log_line_prefix_template",
    ]
)
"""torchrun's options that rackrun accepts, or refuses with a specific reason."""


class _Parser(argparse.ArgumentParser):
    """torchrun's parser with rackrun's options. Every abbreviation that torchrun accepts keeps its meaning."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        return [match for match in found if not getattr(match[0], "ours", False)] or found

    def error(self, message: str) -> NoReturn:
        """End with one line: the usage of all options would hide it."""
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}. Remedy: see {self.prog} --help.\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse only the words before the script's own arguments, because argparse would look for abbreviations among
        those too."""
        given = sys.argv[1:] if args is None else list(args)
        end = self._end_of_own(given)
        found, unknown = super().parse_known_args(given[:end], namespace)
        found.training_script_args = given[end:]
        return found, unknown

    def _end_of_own(self, given: Sequence[str]) -> int:
        """Return the number of words up to and including the script."""
        at = 0
        while at < len(given):
            word = given[at]
            if word == "--":
                return at + 2
            if not word.startswith("-"):
                return at + 1
            at += 2 if self._takes_next(word) else 1
        return at

    def _takes_next(self, option: str) -> bool:
        """Return whether the next word is this option's value. An unknown or ambiguous option takes none: argparse
        refuses it."""
        action = self._option_string_actions.get(option)
        if action is None:
            matches = self._get_option_tuples(option)
            if len(matches) != 1 or matches[0][-1] is not None:  # --spares=2, -r3
                return False
            action = matches[0][0]
        return action.nargs is None


def make_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with rackrun's options added."""
    parser = get_args_parser()
    parser.__class__ = _Parser
    parser.prog = "rackrun"
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in parser._actions:
        if action.dest == "max_restarts":
            action.help = (
                f"Maximum number of restarts of the whole world. Default: {MAX_RESTARTS} (torchrun: 0). "
                f"A spare that takes a lost rank over does not count as a restart."
            )
            if action.default == 0:  # not given by PET_MAX_RESTARTS, which would be a string
                action.default = MAX_RESTARTS
        elif action.dest == "node_rank" and action.default == 0:
            action.default = None
    if all(action.dest != "shutdown_timeout" for action in parser._actions):
        since = parser.add_argument(
            "--shutdown-timeout",
            "--shutdown_timeout",
            action=env,
            type=int,
            default=None,
            help="Seconds between SIGTERM and SIGKILL when workers are stopped. Default: 30.",
        )
        since.ours = True  # type: ignore[attr-defined]  # see _Parser
    if not any(action.dest == "log_line_prefix_template" for action in parser._actions):  # torch before 2.14
        added = parser.add_argument(
            "--log-line-prefix-template",
            "--log_line_prefix_template",
            action=env,
            type=str,
            default=None,
            help="Prefix of teed lines, in which ${role_name}, ${rank}, ${local_rank} and ${hostname} are replaced. "
            "Default: torchrun's prefix.",
        )
        setattr(added, "ours", True)  # noqa: B010 - an abbreviation means what it means there
    add_own_options(parser)
    return parser


def parse(arguments: Sequence[str] | None = None) -> LaunchOptions:
    """Parse and check all arguments. Raises UsageError for what cannot work, and SystemExit(2) for what argparse itself
    refuses."""
    try:
        parser = make_parser()
    except ValueError as error:  # a flag's PET_ variable is not a number
        flags = [name for name in os.environ if name.startswith("PET_")]
        raise UsageError(
            f"one of {', '.join(flags)} cannot be read: {error}.", remedy="use 0 or 1 for flags."
        ) from error
    args = parser.parse_args(arguments)
    _refuse_what_is_no_utf8(args)
    _refuse_unknown_choices(parser, args)
    _refuse_what_has_no_meaning(args)
    size = size_of(args)
    _check_logs(args)
    rendezvous = _rendezvous_config(args.rdzv_conf)
    endpoint = _endpoint(args, size.nodes_max)
    token_file = Path(args.token_file).expanduser() if args.token_file else None
    if endpoint and token_file is None:
        raise UsageError(
            "several hosts need a shared secret, and there is no --token-file.",
            remedy="make one (head -c 32 /dev/urandom | base64 > job.token; chmod 600 job.token), copy it to every host, "
            "and name it with --token-file or RACKRUN_TOKEN_FILE.",
        )
    run_id = "" if args.rdzv_id == "none" or args.standalone else args.rdzv_id
    if "/" in run_id or run_id.startswith("."):
        raise UsageError(f"--rdzv-id {run_id!r} cannot name a directory.", remedy="leave out '/' and leading dots.")
    if endpoint and not run_id:
        raise UsageError(
            "several hosts need a common name for the job, and there is no --rdzv-id.",
            remedy="give the same --rdzv-id on every host, for example the scheduler's job id.",
        )
    asked = policy(args.policy, args.policy_weights, args.wait_for_hardware)
    return LaunchOptions(
        script=_script(args),
        run_id=run_id,
        nodes_min=size.nodes_min,
        nodes_max=size.nodes_max,
        trays=size.trays,
        slots=size.slots,
        spares=args.spares,
        filler=filler(args.filler, args.filler_grace),
        rack=size.rack,
        mesh=size.mesh,
        cross_clique=args.cross_clique,
        max_restarts=args.max_restarts,
        endpoint=endpoint,
        node_rank=args.node_rank,
        out_dir=local_path(args.out_dir, "--out-dir").expanduser().absolute() if args.out_dir else None,
        log_dir=str(local_path(args.log_dir, "--log-dir")) if args.log_dir else args.log_dir,
        log_to=_log_to(args.log_to),
        redirects=args.redirects,
        tee=args.tee,
        local_ranks_filter=args.local_ranks_filter,
        log_prefix=args.log_line_prefix_template or "",
        token_file=token_file,
        ledger=args.ledger,
        redundancy=redundancy(args.snapshot_copies, size.nodes_max * size.trays),
        worker_env={
            **_checkpoints(args),
            "RACKRUN_MESH": mesh_text(size.mesh) if size.mesh else "",
            "RACKRUN_MIN_RANKS": str(args.min_ranks),
            **_check_replicas(args.check_replicas),
            "RACKRUN_NAN_PROBATION": "1" if args.nan_probation else "0",
        },
        start_over=(args.lost_state or ("restart" if args.checkpoint_dir else "stop")) == "restart",
        min_ranks=_min_ranks(args.min_ranks, size.ranks, asked.rules),
        policy=asked,
        provider=provider(args.provider, args.acquire_timeout, asked.rules),
        slow_ranks=args.slow_ranks,
        slow_after_s=_slow_after_s(args.slow_after),
        quiet=args.quiet,
        role=args.role,
        local_addr=args.local_addr,
        join_timeout_ms=_milliseconds(rendezvous, ("join_timeout", "timeout"), 600.0),
        last_call_ms=_milliseconds(rendezvous, ("last_call_timeout",), 1.0),
        grace_s=_grace_s(args.shutdown_timeout),
        lease_s=_lease_s(args.lease),
        signals=_signals(args.signals_to_handle),
        of_steps=_of_steps(args),
    )


# -- one check each --------------------------------------------------------------------------------------------------
def _min_ranks(given: int, ranks: int, rules: Rules) -> int:
    if given < 0:
        raise UsageError(f"--min-ranks {given} is no number of ranks.", remedy="give 1 or more, or 0 for a fixed size.")
    if given > ranks:
        raise UsageError(
            f"--min-ranks {given} is more than the {ranks} ranks that there are.",
            remedy=f"give {ranks} at the most, or 0 for a fixed size.",
        )
    if not given and Rung.SHRINK in rules.order:
        raise UsageError(
            "--policy names shrink, and --min-ranks 0 holds the world to its size.",
            remedy="leave one of them out.",
        )
    return given


def _of_steps(args: argparse.Namespace) -> tuple[str, ...]:
    given = {
        "--checkpoint-dir": args.checkpoint_dir,
        "--log-to": args.log_to,
        "--check-replicas": args.check_replicas,
        "--nan-probation": args.nan_probation,
        "--snapshot-copies": args.snapshot_copies != "mirror",
        "--slow-ranks": args.slow_ranks not in ("notice", "off"),
        "--policy": args.policy,
        "--provider": args.provider,
        "--filler": args.filler,
    }
    return tuple(option for option, is_given in given.items() if is_given)


def _refuse_what_is_no_utf8(args: argparse.Namespace) -> None:
    """Refuse texts that no message to agents and workers can hold."""
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    given["the script"] = given.pop("--training-script")
    given["the working directory"] = os.getcwd()
    for name, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
                what = "an argument of the script" if name == "--training-script-args" else name
                raise UsageError(
                    f"{what} {text.encode(errors='backslashreplace').decode()} is no UTF-8.",
                    remedy="give it another name, or make a link to it that has one.",
                )


def _refuse_unknown_choices(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check values from PET_ variables, which argparse does not check."""
    for action in parser._actions:
        given = getattr(args, action.dest, None)
        if action.choices is not None and given is not None and given not in action.choices:
            raise UsageError(
                f"{max(action.option_strings, key=len)} {given!r} is not known (from PET_{action.dest.upper()}).",
                remedy=f"give one of {', '.join(map(str, action.choices))}.",
            )


def _refuse_what_has_no_meaning(args: argparse.Namespace) -> None:
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") == "1":
        raise UsageError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 bypasses the process groups that rackrun can repair.",
            remedy="unset it.",
        )
    if args.rdzv_backend not in {"", "static", "c10d"} and not args.standalone:
        raise UsageError(
            f"--rdzv-backend {args.rdzv_backend} is not supported: the coordinator is the rendezvous.",
            remedy="leave it out; with several hosts give --rdzv-endpoint HOST:PORT.",
        )
    _refuse_what_is_not_known(args)
    for option, given in (
        ("--logs-specs", args.logs_specs),
        ("--duplicate-stdout-filters", args.duplicate_stdout_filters),
        ("--duplicate-stderr-filters", args.duplicate_stderr_filters),
        ("--numa-binding", args.numa_binding),
        ("--virtual-local-rank", args.virtual_local_rank),
    ):
        if given:
            raise UsageError(
                f"{option} is not supported by rackrun.", remedy="leave it out, or use torchrun for this job."
            )
    if args.framework and args.no_python:
        raise UsageError("--framework and --no-python exclude each other.", remedy="name a Python script.")
    if args.module and args.no_python:
        raise UsageError("--module and --no-python exclude each other.", remedy="leave one of them out.")


def _refuse_what_is_not_known(args: argparse.Namespace) -> None:
    """Refuse options of a newer torchrun, which its parser accepts but which would have no effect here."""
    for action in get_args_parser()._actions:
        given = getattr(args, action.dest, None)
        if action.dest not in _OF_TORCHRUN and action.option_strings and given not in (action.default, None, False):
            raise UsageError(
                f"{max(action.option_strings, key=len)} is an option of a newer torchrun, which this rackrun does not know.",
                remedy="leave it out, or use torchrun for this job.",
            )


def _check_logs(args: argparse.Namespace) -> None:
    for option, text in (("--redirects", args.redirects), ("--tee", args.tee)):
        try:
            Std.from_str(text)
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{option} {text!r}: {error}.", remedy="give 0 to 3, or 0:1,1:3 for ranks 0 and 1."
            ) from error
    try:
        _ = [int(rank) for rank in args.local_ranks_filter.split(",") if args.local_ranks_filter]
    except ValueError as error:
        raise UsageError(
            f"--local-ranks-filter {args.local_ranks_filter!r} is no list of numbers.", remedy="for example 0,1,2."
        ) from error
    if args.log_dir and args.log_dir != os.devnull:
        check_directory("--log-dir", local_path(args.log_dir, "--log-dir").absolute())


def _log_to(given: Sequence[str]) -> tuple[SinkTarget, ...]:
    targets = tuple(parse_target(text) for text in given)
    for target in targets:
        if targets.count(target) > 1:
            raise UsageError(f"--log-to {target} is given twice.", remedy="give it once.")
        if target.path is not None and target.kind == "jsonl":
            if target.path.is_dir():
                raise UsageError(f"--log-to {target} is a directory.", remedy="name a file in it.")
            check_directory("--log-to", target.path.parent)
        elif target.path is not None:
            check_directory("--log-to", target.path)
    return targets


def _rendezvous_config(text: str) -> dict[str, str]:
    try:
        return dict(_parse_rendezvous_config(text))
    except ValueError as error:
        raise UsageError(f"--rdzv-conf {text!r}: {error}.", remedy="give KEY=VALUE[,KEY=VALUE].") from error


def _check_replicas(steps: int) -> dict[str, str]:
    if steps < 0:
        raise UsageError(f"--check-replicas {steps} is no number of steps.", remedy="give 1 or more, or 0 for never.")
    return {"RACKRUN_CHECK_REPLICAS": str(steps)}


def _slow_after_s(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--slow-after {seconds} is no time.", remedy="give seconds, more than 0.")
    return seconds


def _lease_s(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 1):
        raise UsageError(f"--lease {seconds} is too short, or no time.", remedy="give seconds, 1 or more.")
    return seconds


def _milliseconds(config: dict[str, str], keys: tuple[str, ...], default_s: float) -> int:
    for key in keys:
        if key in config:
            try:
                return int(float(config[key]) * 1e3)
            except ValueError as error:
                raise UsageError(f"--rdzv-conf {key}={config[key]} is no number.", remedy="give seconds.") from error
    return int(default_s * 1e3)


def _endpoint(args: argparse.Namespace, nodes_max: int) -> tuple[str, int] | None:
    alone = nodes_max == 1 and not args.token_file  # no host could join without a token
    if args.standalone or alone or (nodes_max == 1 and not args.rdzv_endpoint):
        if args.standalone and nodes_max > 1:
            raise UsageError("--standalone means one host.", remedy="leave out --standalone or --nnodes.")
        return None
    text, port = args.rdzv_endpoint, DEFAULT_PORT
    if not text:
        if args.master_port is None and args.master_addr == "127.0.0.1":
            raise UsageError(
                f"--nnodes {args.nnodes} needs a place to meet, and there is no --rdzv-endpoint.",
                remedy=f"give --rdzv-endpoint HOST[:PORT] (default port {DEFAULT_PORT}), the same on every host.",
            )
        text, port = args.master_addr, args.master_port or 29500
    if nodes_max == 1 and text in {"localhost:0", "127.0.0.1:0", "[::1]:0"}:
        return None
    try:
        return host_and_port(text, port)
    except ValueError as error:
        raise UsageError(
            f"--rdzv-endpoint {text!r} names no host and port ({error}).",
            remedy="give HOST:PORT; an IPv6 address in brackets, as in [fd00::1]:29400.",
        ) from error


def _checkpoints(args: argparse.Namespace) -> dict[str, str]:
    if args.checkpoint_every is not None and args.checkpoint_every < 1:
        raise UsageError(f"--checkpoint-every {args.checkpoint_every} is no number of steps.", remedy="give 1 or more.")
    if args.checkpoint_keep < 1:
        raise UsageError(f"--checkpoint-keep {args.checkpoint_keep} would keep none.", remedy="give 1 or more.")
    if args.checkpoint_dir is None:
        if args.checkpoint_every is not None:
            raise UsageError("--checkpoint-every is given without --checkpoint-dir.", remedy="say where to.")
    elif not args.checkpoint_dir:
        raise UsageError("--checkpoint-dir names no directory.", remedy="say where to, or leave it out.")
    directory = absolute(args.checkpoint_dir, but=("memory",)) if args.checkpoint_dir else ""
    if isinstance(directory, RemotePath):
        if directory.scheme == "memory":
            raise UsageError(
                f"--checkpoint-dir {directory} is memory of one process, and ranks are many.",
                remedy="give a directory, or a bucket that all hosts reach.",
            )
        files_at(directory)  # refused now, where the package for that store is not installed
    elif directory:
        of_runs = Path(directory) / "run"  # all that is written is below it
        check_directory("--checkpoint-dir", of_runs if of_runs.is_dir() else Path(directory))
    return {
        "RACKRUN_CHECKPOINT_DIR": str(directory),
        "RACKRUN_CHECKPOINT_KEEP": str(args.checkpoint_keep),
        "RACKRUN_CHECKPOINT_EVERY": str(args.checkpoint_every or ""),
    }


def _grace_s(given: int | None) -> float:
    text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30") if given is None else str(given)
    try:
        seconds = float(text)
    except ValueError as error:
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text} is no number.", remedy="give seconds.") from error
    if seconds < 0:
        raise UsageError(f"--shutdown-timeout {text} is negative.", remedy="give seconds.")
    return seconds


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(signal.Signals[name])
        except KeyError as error:
            raise UsageError(
                f"--signals-to-handle: there is no signal {name}.", remedy="for example SIGTERM,SIGINT."
            ) from error
    return tuple(found)


def _script(args: argparse.Namespace) -> ScriptConfig:
    name: str = args.training_script
    preload = tuple(filter(None, (module.strip() for module in args.preload.split(","))))
    for module in preload:
        if not _can_import(module):
            raise UsageError(f"--preload {module}: there is no such module.", remedy="check the name and PYTHONPATH.")
    if args.module:
        if not _can_import(name):
            raise UsageError(f"there is no module {name}.", remedy="check the name and PYTHONPATH.")
    elif args.no_python and not args.run_path:
        if shutil.which(name) is None:
            raise UsageError(f"there is no executable {name}.", remedy="give its path, and chmod +x it.")
    else:
        path = Path(name)
        if not path.exists():
            raise UsageError(f"there is no script {name} (in {Path.cwd()}).", remedy="check the path.")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError(f"{name} is a directory without __main__.py.", remedy="name the script in it.")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{name} cannot be read.", remedy="check its permissions.")
    return ScriptConfig(
        path=name,
        args=tuple(args.training_script_args),
        module=args.module,
        no_python=args.no_python and not args.run_path,
        preload=preload,
        framework=args.framework,
    )


def _can_import(module: str) -> bool:
    """Return whether the module's top-level package exists. Looking for a submodule would import its parents."""
    top = module.partition(".")[0]
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as `python -m` does
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.remove(here)
