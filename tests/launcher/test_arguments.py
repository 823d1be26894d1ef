"""torchrun's arguments mean what they mean there, to the last abbreviation."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from rackrun.agent.worker_start.worker_logs import WorkerLogs
from rackrun.checkpoint.redundancy import isal
from rackrun.checkpoint.redundancy.shard_placement import Redundancy
from rackrun.errors import UsageError
from rackrun.launch.options import arguments
from rackrun.launch.options.arguments import MAX_RESTARTS, LaunchOptions, make_parser, parse
from rackrun.launch.options.policy_options import PolicyOptions
from rackrun.protocol.agent_config import LogConfig
from rackrun.protocol.ids import Rank
from rackrun.protocol.policy_types import Rules, Rung, Weights
from rackrun.worker.batch.mesh_axes import MIN_RANKS_VARIABLE, axes_of
from rackrun.worker.snapshots.durable_checkpoints import DurableOptions

OURS = {
    "--log-to",
    "--log_to",
    "--log-line-prefix-template",  # torchrun's own from 2.14 on
    "--log_line_prefix_template",
    "--spares",
    "--filler",
    "--filler-grace",
    "--filler_grace",
    "--trays",
    "--rack",
    "--mesh",
    "--cross-clique",
    "--cross_clique",
    "--out-dir",
    "--out_dir",
    "--token-file",
    "--token_file",
    "--ledger",
    "--check-replicas",
    "--check_replicas",
    "--nan-probation",
    "--nan_probation",
    "--checkpoint-dir",
    "--checkpoint_dir",
    "--checkpoint-every",
    "--checkpoint_every",
    "--checkpoint-keep",
    "--checkpoint_keep",
    "--lost-state",
    "--lost_state",
    "--min-ranks",
    "--min_ranks",
    "--lease",
    "--policy",
    "--policy-weights",
    "--policy_weights",
    "--wait-for-hardware",
    "--wait_for_hardware",
    "--provider",
    "--acquire-timeout",
    "--acquire_timeout",
    "--framework",
    "--preload",
    "--quiet",
    "--version",
    "--slow-after",
    "--slow-ranks",
    "--slow_after",
    "--slow_ranks",
    "--snapshot-copies",
    "--snapshot_copies",
}


class Refused(Exception):
    pass


def resolve(parser: argparse.ArgumentParser, option: str) -> str:
    """What ``option`` stands for: a dest, or why not."""

    def refuse(message: str) -> None:
        raise Refused(message)

    parser.error = refuse  # type: ignore[method-assign, assignment]
    try:
        found = parser._parse_optional(option)
    except Refused as error:
        return str(error)
    if isinstance(found, list):  # Python 3.12 and later
        found = found[0] if len(found) == 1 else None
    return found[0].dest if found and found[0] else "unknown"


THEIRS = sorted({option for action in get_args_parser()._actions for option in action.option_strings})
PREFIXES = sorted({option[:length] for option in THEIRS for length in range(3, len(option) + 1)} | set(THEIRS))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_abbreviation_of_torchrun_still_stands_for_the_same(prefix: str) -> None:
    assert resolve(make_parser(), prefix) == resolve(get_args_parser(), prefix)


def test_our_own_options_are_there_and_torchrun_has_none_of_them() -> None:
    parser = make_parser()
    assert not OURS & set(THEIRS)
    lately = {"--shutdown-timeout", "--shutdown_timeout"}  # torchrun's, but not of torch 2.10
    assert {option for action in parser._actions for option in action.option_strings} - {*THEIRS, *lately} == OURS
    assert resolve(parser, "--sp") == "spares"


OF_THE_SCRIPT = [
    ["--checkpoint", "x"],  # could be three of rackrun's
    ["--fill", "0.5"],
    ["--log=x"],  # two of torchrun's
    ["--spares", "7", "--nproc-per-node", "9"],
    ["--", "--help", "-r", "3"],
    ["-m", "--standalone"],
    ["word", "--policy"],
    ["--version"],
]


@pytest.mark.parametrize("given", OF_THE_SCRIPT, ids=" ".join)
@pytest.mark.parametrize(
    "before",
    [
        [],
        ["--standalone", "--spares", "1", "--nproc_per_node=3"],
        ["--sp", "1", "-r3", "--nproc_per_node", "2", "--"],
        ["-t", "3", "--quiet"],
    ],
    ids=" ".join,
)
def test_what_follows_the_script_is_the_scripts_whatever_it_abbreviates(
    script: str, before: list[str], given: list[str]
) -> None:
    options = parse([*before, script, *given])
    assert (options.script.path, list(options.script.args)) == (script, given)
    assert options.spares == ("--spares" in before or "--sp" in before)


@pytest.mark.parametrize(
    "given",
    [["--checkpoint", "x"], ["--nproc", "2"], ["--spares"], ["--nothing", "3"], ["--spares", "x"], [], ["--"]],
    ids=" ".join,
)
def test_what_precedes_the_script_is_refused_as_ever(script: str, given: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*given, script] if given and given != ["--"] else given)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_the_defaults_are_torchruns_but_for_restarts(script: str) -> None:
    options = parse([script, "--lr", "3"])
    assert (options.slots, options.nodes_min, options.nodes_max, options.spares, options.trays) == (1, 1, 1, 0, 1)
    assert options.max_restarts == MAX_RESTARTS == 3
    assert options.script.path == script
    assert options.script.args == ("--lr", "3")
    assert options.endpoint is None
    assert options.signals[:2] == (signal.SIGTERM, signal.SIGINT)


def test_state_that_is_lost_stops_the_job_unless_there_are_checkpoints_or_it_was_said_otherwise(script: str) -> None:
    assert not parse([script]).start_over
    assert parse(["--lost-state", "restart", script]).start_over
    assert parse(["--checkpoint-dir", "c", script]).start_over
    assert not parse(["--checkpoint-dir", "c", "--lost-state", "stop", script]).start_over


def test_workers_are_told_how_far_the_world_may_shrink(script: str) -> None:
    assert parse([script]).worker_env[MIN_RANKS_VARIABLE] == "1"
    assert parse(["--nproc-per-node", "2", "--min-ranks", "2", script]).worker_env[MIN_RANKS_VARIABLE] == "2"
    assert parse(["--min-ranks", "0", script]).worker_env[MIN_RANKS_VARIABLE] == "0"


def test_workers_are_told_of_all_options_whatever_stands_in_the_environment_of_the_launcher(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is started by a job's script would keep its checkpoints among those of the other."""
    asked = ["--checkpoint-dir", "c", "--checkpoint-every", "5", "--mesh", "dp=1", "--check-replicas", "3"]
    every, none = parse([*asked, "--nan-probation", script]).worker_env, parse([script]).worker_env
    assert none.keys() == every.keys()
    assert DurableOptions.from_environment("") is None
    for name, value in every.items():
        monkeypatch.setenv(name, value)
    assert DurableOptions.from_environment("") is not None
    for name, value in none.items():
        monkeypatch.setenv(name, value)
    assert DurableOptions.from_environment("") is None
    assert axes_of(None, 1, os.environ) == ()
    assert (none["RACKRUN_CHECK_REPLICAS"], none["RACKRUN_NAN_PROBATION"]) == ("0", "0")


def test_all_our_options_are_on_the_launcher_s_page() -> None:
    told = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    assert not [option for option in sorted(OURS) if "_" not in option and f"`{option}" not in told]


def test_an_explicit_number_of_restarts_is_obeyed(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["--max-restarts", "0", script]).max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert parse([script]).max_restarts == 0
    assert parse(["--max_restarts=5", script]).max_restarts == 5


def test_slow_ranks_are_told_of_unless_something_else_is_asked_for(script: str) -> None:
    assert (parse([script]).slow_ranks, parse([script]).slow_after_s) == ("notice", 10.0)
    asked = parse(["--slow-ranks", "swap", "--slow-after", "2.5", script])
    assert (asked.slow_ranks, asked.slow_after_s) == ("swap", 2.5)
    for never in ("0", "-1", "nan", "inf"):
        with pytest.raises(UsageError, match=f"--slow-after {float(never)} is no time"):
            parse(["--slow-after", never, script])


def test_copies_of_snapshots_are_named_as_checkpoints_are(script: str) -> None:
    assert parse([script]).redundancy == Redundancy.mirror(2, "tray")
    assert parse(["--snapshot-copies", "local", script]).redundancy == Redundancy.local()
    for text, width in (("xor", 8), ("xor:tray", 8), ("xor:3", 3)):
        assert parse(["--trays", "3", "--snapshot-copies", text, script]).redundancy == Redundancy.xor(width, "tray")


def test_sets_that_may_lose_two_need_the_codec_and_sets_that_may_lose_one_do_not(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise isal.CodecMissing("it is not here.", remedy="pip install rackrun[rs]")

    monkeypatch.setattr(isal, "check", missing)
    assert parse(["--trays", "4", "--snapshot-copies", "rs:3+1", script]).redundancy == Redundancy.rs(3, 1, "tray")
    with pytest.raises(UsageError, match=r"rs:2\+2: it is not here.*pip install rackrun\[rs\]"):
        parse(["--trays", "4", "--snapshot-copies", "rs:2+2", script])
    monkeypatch.setattr(isal, "check", lambda: None)
    assert parse(["--trays", "4", "--snapshot-copies", "rs:2+2", script]).redundancy == Redundancy.rs(2, 2, "tray")
    for level in ("@rack", ":rack"):
        with pytest.raises(
            UsageError, match=r"across trays here; the level rack is not possible\. Remedy: give rs:2\+2;"
        ):
            parse(["--trays", "4", "--snapshot-copies", f"rs:2+2{level}", script])


def test_pet_variables_work_for_ours_as_for_theirs(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SPARES": "1", "NPROC_PER_NODE": "4", "TRAYS": "2", "QUIET": "1", "LEDGER": "digest"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    options = parse([script])
    assert (options.spares, options.slots, options.trays, options.quiet, options.ledger) == (1, 4, 2, True, "digest")
    assert parse(["--spares", "2", script]).spares == 2


def test_a_policy_is_an_order_of_rungs_or_a_function_that_can_be_loaded(script: str, tmp_path: Path) -> None:
    assert parse([script]).policy == PolicyOptions()
    given = parse(["--policy", "swap,wait", "--policy-weights", "cost=2", "--wait-for-hardware", "1.5", script]).policy
    assert given == PolicyOptions(
        rules=Rules(order=(Rung.SWAP, Rung.WAIT)), weights=Weights(cost=2.0), repair_patience_ms=1500
    )
    (tmp_path / "mine.py").write_text("def choose(failure, view):\n    return None\n")
    assert parse(["--policy", "mine:choose", script]).policy == PolicyOptions(function="mine:choose")


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (["--policy", "swap,repair"], "there is no rung 'repair'"),
        (["--policy", "mine:"], "names no function"),
        (["--policy", "nowhere_at_all:choose"], "cannot be loaded: ModuleNotFoundError"),
        (["--policy-weights", "speed=1"], "cannot be a weight"),
        (["--wait-for-hardware", "-1"], "is no time to wait"),
        (["--wait-for-hardware", "nan"], "is no time to wait"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_before_anything_starts(
    arguments: list[str], because: str, script: str
) -> None:
    with pytest.raises(UsageError, match=because):
        parse([*arguments, script])


def endpoint_of(*arguments: str, script: str, tmp_path: Path) -> LaunchOptions:
    return parse(["--rdzv-id", "job", "--token-file", str(tmp_path / "token"), *arguments, script])


@pytest.mark.parametrize(
    ("arguments", "endpoint"),
    [
        (["--nnodes", "2", "--rdzv-endpoint", "head"], ("head", 29400)),
        (["--nnodes", "2:4", "--rdzv-endpoint", "head:1234", "--rdzv-backend", "c10d"], ("head", 1234)),
        (["--nnodes", "2", "--rdzv-endpoint", "[::1]:1234"], ("::1", 1234)),
        (["--nnodes", "2", "--master-addr", "head", "--node-rank", "1"], ("head", 29500)),
        (["--nnodes", "2", "--master-addr", "head", "--master-port", "77"], ("head", 77)),
        (["--standalone", "--rdzv-endpoint", "head:1234"], None),
        (["--rdzv-backend", "c10d"], None),
    ],
)
def test_several_hosts_meet_where_torchrun_would(
    arguments: list[str], endpoint: tuple[str, int] | None, script: str, tmp_path: Path
) -> None:
    assert endpoint_of(*arguments, script=script, tmp_path=tmp_path).endpoint == endpoint


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29500"],
        ["--rdzv-endpoint", "[::1]:29500", "--rdzv-id", "77"],
        ["--nnodes", "1:1", "--rdzv-endpoint", "node17:29500", "--rdzv-id", "77"],  # $SLURM_NNODES is 1 today
    ],
)
def test_one_host_alone_needs_no_secret_and_meets_nobody(arguments: list[str], script: str) -> None:
    assert parse([*arguments, script]).endpoint is None


def test_one_host_that_others_may_join_later_has_a_secret(script: str, tmp_path: Path) -> None:
    options = endpoint_of("--nnodes", "1", "--rdzv-endpoint", "node17:29500", script=script, tmp_path=tmp_path)
    assert options.endpoint == ("node17", 29500)


def test_torchruns_timeouts_are_used(script: str) -> None:
    options = parse(["--rdzv-conf", "join_timeout=5,last_call_timeout=2", "--shutdown-timeout", "7", script])
    assert (options.join_timeout_ms, options.last_call_ms, options.grace_s) == (5000, 2000, 7.0)


def test_devices_are_counted_by_torch(script: str) -> None:
    assert parse(["--nproc-per-node", "cpu", script]).slots >= 1


def test_a_policy_that_asks_for_racks_needs_somebody_who_gives_them(script: Path) -> None:
    with pytest.raises(UsageError, match="names acquire, and there is nobody who could give a rack"):
        parse(["--policy", "swap,acquire", str(script)])
    with pytest.raises(UsageError, match="--acquire-timeout is given without --provider"):
        parse(["--acquire-timeout", "5", str(script)])
    with pytest.raises(UsageError, match="no time to wait"):
        parse(["--provider", "local", "--acquire-timeout", "0", str(script)])
    with pytest.raises(UsageError, match="'tries=1' is none of"):
        parse(["--provider", "local:tries=1", str(script)])
    with pytest.raises(UsageError, match="names no provider"):
        parse(["--provider", "slurm", str(script)])
    assert parse(["--policy", "no-acquire", str(script)]).provider.spec == ""
    given = parse(["--provider", "local:after=2", "--acquire-timeout", "60", "--policy", "acquire-wait", str(script)])
    assert (given.provider.expected_s, given.provider.timeout_ms) == (7.0, 60_000)
    assert given.policy.rules.meanwhile == "wait"


def test_the_prefix_of_teed_lines_may_name_the_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = parse(["--log-line-prefix-template", "${hostname} ${rank}/${local_rank}: ", str(script)])
    logs = WorkerLogs(LogConfig(directory=os.devnull, prefix=options.log_prefix), "run", slots=2)
    assert logs._prefix(1, Rank(5)).decode() == f"{socket.gethostname()} 5/1: "
    assert parse([str(script)]).log_prefix == ""


def test_an_option_of_a_newer_torchruns_parser_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser takes it; rackrun, which does not know what it means, says so."""

    def newer() -> argparse.ArgumentParser:
        parser = get_args_parser()
        parser.add_argument("--something-new", type=str, default="as ever")
        return parser

    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(arguments, "get_args_parser", newer)
    parse([str(script)])
    with pytest.raises(UsageError, match="--something-new is an option of a newer torchrun"):
        parse(["--something-new", "otherwise", str(script)])
