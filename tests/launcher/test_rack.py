"""``--rack``, ``--mesh``, ``--cross-clique``: what they come to, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.errors import UsageError
from rackrun.launch.options.arguments import LaunchOptions, parse
from rackrun.launch.options.rack_options import check_mesh, mesh_text, parse_mesh, rack_here
from rackrun.launcher import _agent_configs
from rackrun.protocol.agent_config import AgentConfig
from rackrun.topology.sources.partial_topology import PartialTopology

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "racks"
NVL72, TWO, HGX, CPU = (
    str(EXAMPLES / f"{name}.yaml") for name in ("gb200-nvl72", "two-gb200-nvl72", "hgx-h100", "cpu")
)
UNEVEN = """
format: 1
racks:
  - serial: a
    trays:
      - {name: left, host: left.example.org, gpus: 3}
      - {name: right, gpus: 2}
    nvlink: {domain: d, clique: 1}
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "rack.yaml").write_text(UNEVEN)
    (tmp_path / "token").write_text("0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # as the launcher's main does
    return "train.py"


def configs(options: LaunchOptions) -> list[AgentConfig]:
    return _agent_configs(options, "run", "token", "http://x", "logs")


def two_hosts(host: str, script: str, monkeypatch: pytest.MonkeyPatch) -> LaunchOptions:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    return parse(
        ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29400", "--rdzv-id", "j", "--token-file", "token",
         "--rack", "rack.yaml", script]
    )  # fmt: skip


# -- what it comes to
def test_on_one_host_every_tray_of_the_file_gets_an_agent(script: str) -> None:
    options = parse(["--rack", NVL72, "--spares", "8", script])
    assert (options.trays, options.nodes_min * options.trays, options.nodes_max * options.trays) == (18, 18, 18)
    agents = configs(options)
    assert [(agent.tray, agent.slots) for agent in agents] == [(f"tray-{index:02}", 4) for index in range(18)]
    assert all(agent.simulated and agent.nnodes == 18 for agent in agents)


def test_trays_may_have_different_numbers_of_gpus(script: str) -> None:
    assert [(agent.tray, agent.slots) for agent in configs(parse(["--rack", "rack.yaml", script]))] == [
        ("left", 3),
        ("right", 2),
    ]


def test_an_agent_gets_its_own_tray_of_the_file_and_what_nccl_is_to_know(script: str) -> None:
    agent = configs(parse(["--rack", NVL72, script]))[3]
    (partial,) = msgspec.json.decode(agent.topology, type=list[PartialTopology])
    assert (partial.kind, partial.where, [tray.host for tray in partial.trays]) == ("rack file", NVL72, ["tray-03"])
    assert [env["NCCL_MNNVL_ENABLE"] for env in agent.slot_env] == ["2"] * 4
    assert agent.slot_env[0]["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1,mlx5_3,mlx5_4"


def test_a_single_tray_is_this_machine_and_not_simulated(script: str) -> None:
    (agent,) = configs(parse(["--rack", CPU, script]))
    assert (agent.slots, agent.simulated) == (5, False)


@pytest.mark.parametrize(("host", "tray"), [("left", "left"), ("left.example.org", "left"), ("right.lan", "right")])
def test_of_several_hosts_each_runs_the_tray_that_it_is(
    host: str, tray: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = two_hosts(host, script, monkeypatch)
    (agent,) = configs(options)
    assert (agent.tray, agent.simulated, agent.nnodes) == (tray, False, 2)
    assert (options.nodes_min * options.trays, options.nodes_max * options.trays) == (2, 2)


def test_without_a_rack_file_agents_know_nothing_of_a_rack(script: str) -> None:
    (agent,) = configs(parse(["--nproc-per-node", "2", script]))
    assert (agent.topology, agent.slot_env, agent.simulated) == (b"", (), False)
    assert all(agent.simulated for agent in configs(parse(["--trays", "2", script])))


def test_numbers_that_agree_with_the_file_are_no_contradiction(script: str) -> None:
    assert parse(["--rack", NVL72, "--trays", "18", "--nproc-per-node", "4", script]).trays == 18


def test_a_mesh_goes_to_the_coordinator_and_to_the_workers(script: str) -> None:
    options = parse(["--rack", NVL72, "--spares", "8", "--mesh", "dp=16, tp=4", "--cross-clique", script])
    assert (options.mesh, options.cross_clique) == ((("dp", 16), ("tp", 4)), True)
    assert configs(options)[0].env["RACKRUN_MESH"] == "dp=16,tp=4" == mesh_text(options.mesh)
    plain = parse([script])
    assert (plain.mesh, plain.cross_clique, configs(plain)[0].env["RACKRUN_MESH"]) == ((), False, "")


def test_a_mesh_needs_no_rack_file(script: str) -> None:
    assert parse(["--nproc-per-node", "5", "--spares", "1", "--mesh", "dp=2,tp=2", script]).mesh == (
        ("dp", 2),
        ("tp", 2),
    )


# -- what is refused
def rack(file: str, **given: Any) -> object:
    settings = {"nodes": (1, 1), "nproc": "1", "trays": 1, "host": "here", "trays_max": 1000, **given}
    return rack_here(Path(file), **settings)


@pytest.mark.parametrize(
    ("file", "given", "why"),
    [
        (NVL72, {"trays": 2}, "--trays 2 contradicts .* which has 18"),
        (NVL72, {"nproc": "8"}, "--nproc-per-node 8 contradicts .*tray-00 has 4 GPUs"),
        (NVL72, {"nproc": "auto"}, "--nproc-per-node auto contradicts"),
        (NVL72, {"nodes": (2, 2)}, "--nnodes 2 contradicts .* which has 18 trays"),
        (
            NVL72,
            {"nodes": (16, 18)},
            "this host is here, .* no tray of that name, only tray-00, .* and 12 more.*host: here",
        ),
        (NVL72, {"trays_max": 4}, "18 trays, and a host can stand for 4"),
        ("nowhere.yaml", {}, "cannot be read"),
        ("bad.yaml", {}, r"bad.yaml:3: .*'racs'.*did you mean 'racks'"),
        ("gaps.yaml", {}, "numbered 0, 2"),
        ("twins.yaml", {"nodes": (2, 2)}, "calls a and b so"),
    ],
)
def test_a_rack_that_cannot_be_is_refused(
    file: str, given: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("format: 1\n\nracs: []\n")
    Path("gaps.yaml").write_text(
        "format: 1\nracks: [{trays: [{name: a, gpus: [{uuid: GPU-a, index: 0}, {uuid: GPU-b, index: 2}]}]}]\n"
    )
    Path("twins.yaml").write_text("format: 1\nracks: [{trays: [{name: a, host: here}, {name: b, host: here.lan}]}]\n")
    with pytest.raises(UsageError, match=why) as caught:
        rack(file, **given)
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=-1", "dp=2,dp=2", "dp=2,,tp=2", "2", "dp=2;tp=2"])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--nproc-per-node", "5", "--spares", "1", "--mesh", "dp=5"],
            "5 ranks, and there are 5 slots, 1 of them spares",
        ),
        (["--rack", NVL72, "--mesh", "dp=16,tp=5"], "80 ranks, and there are 72 slots"),
        (["--rack", HGX, "--mesh", "dp=2,tp=16"], "--mesh dp=2,tp=16"),
        (["--rack", TWO, "--spares", "16", "--mesh", "tp=128"], "--mesh tp=128 with --spares 16"),
        (["--rack", CPU, "--spares", "5"], "--spares 5 of 5 slots of .*cpu.yaml"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_with_a_remedy(arguments: list[str], why: str, script: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        parse([*arguments, script])
    assert caught.value.remedy


def test_a_group_may_cross_where_that_is_allowed(script: str) -> None:
    assert parse(["--rack", HGX, "--mesh", "dp=2,tp=16", "--cross-clique", script]).cross_clique


def test_spares_are_held_back_in_every_domain_or_a_whole_domain_waits() -> None:
    found = rack_here(Path(TWO), nodes=(1, 1), nproc="1", trays=1, host="here", trays_max=100)
    axes = (("dp", 2), ("tp", 64))
    check_mesh(axes, 144, 16, found.topology, cross_clique=False)
    check_mesh((("dp", 1), ("tp", 72)), 144, 16, found.topology, cross_clique=False)
    with pytest.raises(UsageError, match="tp=73"):
        check_mesh((("dp", 1), ("tp", 73)), 144, 16, found.topology, cross_clique=False)
