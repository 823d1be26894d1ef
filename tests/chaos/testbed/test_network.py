"""The network between hosts that are made for it: really cut, really whole again, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.network.bad_link import Link
from rackrun.chaos.faults.network.network_partition import Partition
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import One
from rackrun.chaos.injectors import machine_abilities
from rackrun.chaos.injectors.common.injection import Injected, Missed, StrikeOutcome
from rackrun.chaos.injectors.doctor import check_plan
from rackrun.chaos.injectors.network.link_faults import BadLink
from rackrun.chaos.injectors.network.packet_filters import Lossy, Partitioned
from rackrun.chaos.plan.definition import FlipFlop, Inject, Plan
from rackrun.chaos.testbed.host_placement import hosts_needed, trays_of
from rackrun.chaos.testbed.machine.undo_log import NAMED, UndoLog, heal_all
from rackrun.chaos.testbed.network.enter_host import visit
from rackrun.chaos.testbed.network.hosts import HEAD, PORT, Hosts, hosts_here, left_of
from rackrun.chaos.testbed.network.proxy_control import Links
from rackrun.errors import UsageError

WAIT_S = 60.0
TRAYS = ("tray-00", "tray-01", "tray-02")
CUT = TRAYS[1]
WAYS = {
    "isolated": {(CUT, HEAD), (HEAD, CUT), (CUT, TRAYS[0]), (TRAYS[0], CUT)},
    "one_way": {(CUT, HEAD), (CUT, TRAYS[0])},
    "from_coordinator": {(CUT, HEAD), (HEAD, CUT)},
    "from_peers": {(CUT, TRAYS[0]), (TRAYS[0], CUT)},
}
"""Ways that a shape cuts, of those to and from `CUT`."""
CRASHES = """
import os, signal, sys
from pathlib import Path
from rackrun.chaos.testbed.network.hosts import Hosts
from rackrun.chaos.testbed.machine.undo_log import UndoLog

undo = UndoLog(Path(sys.argv[1]) / "undo")
print(Hosts(Path(sys.argv[1]) / "hosts", ["tray-00", "tray-01"], undo).tag, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

with_hosts = pytest.mark.skipif(hosts_here() is not None, reason=", ".join(hosts_here() or ()))


@pytest.fixture
def undo(tmp_path: Path) -> UndoLog:
    return UndoLog(tmp_path / "undo")


@pytest.fixture
def hosts(tmp_path: Path, undo: UndoLog) -> Iterator[Hosts]:
    made = Hosts(tmp_path / "hosts", TRAYS, undo)
    yield made
    made.close()
    assert made.left() == ()


class Wires:
    """A datagram socket on every host."""

    def __init__(self, hosts: Hosts) -> None:
        self._ends: dict[str, socket.socket] = {}
        for name in hosts.names:
            with visit(hosts.space(name)):
                self._ends[name] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._ends[name].bind((hosts[name].address, 7000))
            self._ends[name].settimeout(WAIT_S)
        self._hosts = hosts

    def send(self, of: str, to: str, what: str) -> None:
        self._ends[of].sendto(f"{of}: {what}".encode(), (self._hosts[to].address, 7000))

    def hear(self, to: str) -> str:
        return self._ends[to].recv(100).decode()

    def close(self) -> None:
        for end in self._ends.values():
            end.close()


@pytest.fixture
def wires(hosts: Hosts) -> Iterator[Wires]:
    made = Wires(hosts)
    yield made
    made.close()


def outcome_of(injected: Injected) -> StrikeOutcome:
    while (outcome := injected.outcome()) is None:  # it ends by itself
        pass
    return outcome


# -- partitions
@with_hosts
@pytest.mark.parametrize("loud", [False, True], ids=["silent", "loud"])
@pytest.mark.parametrize("shape", WAYS)
def test_what_a_partition_cuts_is_lost_and_nothing_else(
    shape: str, loud: bool, hosts: Hosts, wires: Wires, undo: UndoLog
) -> None:
    ways = [(CUT, other) for other in (HEAD, TRAYS[0])] + [(other, CUT) for other in (HEAD, TRAYS[0])]
    for of, to in [*ways, (TRAYS[0], HEAD)]:
        wires.send(of, to, "before")
        assert wires.hear(to) == f"{of}: before"
    cut = Partitioned([[CUT]], Partition(shape=shape, loud=loud), 3, hosts, undo)  # type: ignore[arg-type]
    assert outcome_of(cut).took
    for of, to in [*ways, (TRAYS[0], HEAD)]:
        try:
            wires.send(of, to, "during")
        except PermissionError:
            assert loud, "a rule of its own host says no"
        if (of, to) not in WAYS[shape]:
            assert wires.hear(to) == f"{of}: during"
    cut.take_back()
    for of, to in ways:
        wires.send(of, to, "after")
        assert wires.hear(to) == f"{of}: after"
    assert [path.name for path in undo.folder.iterdir()] == ["000000.json"], "the hosts' own"


@with_hosts
def test_a_silent_partition_breaks_no_connection_and_a_loud_one_does(hosts: Hosts, undo: UndoLog) -> None:
    with visit(hosts.space(HEAD)):
        listening = socket.create_server((hosts[HEAD].address, PORT))
    with visit(hosts.space(CUT)):
        calling = socket.create_connection((hosts[HEAD].address, PORT), WAIT_S)
    answering, _ = listening.accept()
    answering.settimeout(WAIT_S)
    with listening, calling, answering:
        silent = Partitioned([[CUT]], Partition(), 0, hosts, undo)
        assert outcome_of(silent).took
        calling.send(b"late")
        silent.take_back()
        assert answering.recv(10) == b"late"
        loud = Partitioned([[CUT]], Partition(loud=True), 1, hosts, undo)
        calling.send(b"never")
        with pytest.raises(OSError, match=r"reset|refused"):
            calling.recv(10)
        assert outcome_of(loud).took
        loud.take_back()


@with_hosts
def test_trays_that_are_cut_off_together_reach_each_other(hosts: Hosts, wires: Wires, undo: UndoLog) -> None:
    together = Partitioned([TRAYS[:2]], Partition(), 0, hosts, undo)
    assert outcome_of(together).took
    wires.send(TRAYS[0], TRAYS[1], "here")
    assert wires.hear(TRAYS[1]) == "tray-00: here"
    with pytest.raises(Missed, match="no peers"):
        Partitioned([TRAYS], Partition(shape="from_peers"), 1, hosts, undo)


@with_hosts
def test_not_all_packets_are_lost(hosts: Hosts, undo: UndoLog) -> None:
    lossy = Lossy([CUT], 0.2, 0, hosts, undo)
    assert outcome_of(lossy).took
    with visit(hosts.space(HEAD)):
        listening = socket.create_server((hosts[HEAD].address, PORT))
    with listening, visit(hosts.space(CUT)):
        socket.create_connection((hosts[HEAD].address, PORT), WAIT_S).close()


# -- links
@pytest.fixture
def ends(hosts: Hosts) -> Iterator[tuple[Links, Callable[[], tuple[socket.socket, socket.socket]]]]:
    """A proxy, and ``connect() -> (the agent's end, the coordinator's)``."""
    links = Links(hosts, dict(os.environ))
    made: list[socket.socket] = []
    with visit(hosts.space(HEAD)):
        listening = socket.create_server((hosts[HEAD].address, PORT))

    def connect() -> tuple[socket.socket, socket.socket]:
        with visit(hosts.space(CUT)):
            below = socket.create_connection((hosts[HEAD].address, PORT), WAIT_S)
        listening.settimeout(WAIT_S)
        above, _ = listening.accept()
        for end in (below, above):
            end.settimeout(WAIT_S)
        made.extend((below, above))
        return below, above

    yield links, connect
    for end in (*made, listening):
        end.close()
    links.close()


@with_hosts
def test_a_slow_link_brings_everything_in_order_and_is_fast_again_afterwards(ends: tuple[Links, Callable]) -> None:  # type: ignore[type-arg]
    links, connect = ends
    below, above = connect()
    slow = BadLink([CUT], Link(latency_s=0.05, jitter_s=0.05, bytes_per_s=1e5), 0, 7, links)
    sent = b"".join(bytes([number]) * 500 for number in range(20))
    below.sendall(sent)
    assert above.recv(len(sent), socket.MSG_WAITALL) == sent
    assert "go on" in outcome_of(slow).detail
    slow.take_back()
    above.sendall(b"back")
    assert below.recv(4, socket.MSG_WAITALL) == b"back"


@with_hosts
def test_of_a_half_open_connection_only_the_coordinator_learns_that_it_is_closed(ends: tuple[Links, Callable]) -> None:  # type: ignore[type-arg]
    links, connect = ends
    below, above = connect()
    half = BadLink([CUT], Link(half_open=True), 0, 7, links)
    assert outcome_of(half).took
    assert _ends(above)
    below.send(b"is anybody there?")
    below.setblocking(False)
    with pytest.raises(BlockingIOError):
        below.recv(1)
    below.settimeout(WAIT_S)
    half.take_back()
    assert _ends(below)


@with_hosts
def test_lost_replies_never_come_and_requests_do(ends: tuple[Links, Callable]) -> None:  # type: ignore[type-arg]
    links, connect = ends
    below, above = connect()
    mute = BadLink([CUT], Link(replies_lost=True), 0, 7, links)
    below.send(b"request")
    assert above.recv(7, socket.MSG_WAITALL) == b"request"
    above.send(b"reply")
    assert "5 bytes" in outcome_of(mute).detail
    mute.take_back()
    assert _ends(below), "what is lost is lost: the connection is none any more"
    again, above = connect()
    above.send(b"reply")
    assert again.recv(5, socket.MSG_WAITALL) == b"reply"


@pytest.mark.stories
@with_hosts
def test_a_reset_breaks_what_there_is_and_what_comes(ends: tuple[Links, Callable], hosts: Hosts) -> None:  # type: ignore[type-arg]
    links, connect = ends
    below, above = connect()
    below.send(b"?")
    assert above.recv(1) == b"?", "the link knows of this connection"
    reset = BadLink([CUT], Link(reset=True), 0, 7, links)
    assert outcome_of(reset).took
    assert _ends(below)
    assert _ends(above)
    with (
        visit(hosts.space(CUT)),
        contextlib.suppress(ConnectionResetError),  # it may be over before it is there
        socket.create_connection((hosts[HEAD].address, PORT), WAIT_S) as late,
    ):
        assert _ends(late)
    reset.take_back()
    below, above = connect()
    below.send(b"!")
    assert above.recv(1) == b"!"


# -- nothing is left
@with_hosts
def test_hosts_and_rules_of_a_harness_that_was_killed_are_taken_back_by_hand(tmp_path: Path) -> None:
    crash = [sys.executable, "-c", CRASHES, str(tmp_path)]
    crashed = subprocess.run(crash, stdout=subprocess.PIPE, check=False, text=True)
    assert crashed.returncode == -signal.SIGKILL
    tag = crashed.stdout.strip()
    assert len(list(NAMED.glob(f"{tag}-*"))) == 4
    subprocess.run([sys.executable, "-m", "rackrun.chaos.testbed.machine.undo_log", str(tmp_path / "undo")], check=True)
    assert not list(NAMED.glob(f"{tag}-*"))


@with_hosts
def test_a_namespace_that_somebody_is_in_is_seen(tmp_path: Path) -> None:
    undo = UndoLog(tmp_path / "undo")
    hosts = Hosts(tmp_path / "hosts", ["tray-00", "tray-01"], undo)
    lives = subprocess.Popen(
        hosts.command("tray-01", ["sh", "-c", "echo; exec sleep 600"], sys.executable), stdout=subprocess.PIPE
    )
    with lives:
        assert lives.stdout is not None
        lives.stdout.readline()
        assert len(left_of(hosts.numbers)) == 5, "four names, one process"
        heal_all(undo.folder)
        assert [line.partition(": ")[2] for line in left_of(hosts.numbers)] == [f"/proc/{lives.pid}/ns/net"]
        lives.kill()
    assert hosts.left() == ()


@with_hosts
def test_a_process_on_a_host_is_elsewhere_in_all_that_rackrun_looks_at(hosts: Hosts) -> None:
    looks = "import socket; print(socket.gethostname(), socket.gethostbyname('head'), open('/proc/sys/kernel/random/boot_id').read())"
    seen = subprocess.run(
        hosts.command(CUT, [sys.executable, "-c", looks], sys.executable), stdout=subprocess.PIPE, check=True, text=True
    )
    name, head, boot = seen.stdout.split()
    assert (name, head) == (CUT, hosts[HEAD].address)
    assert boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -- what cannot be
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "has 1"),
        (["--trays", "1", "train.py"], "2 to 100"),
        (["--trays", "x", "train.py"], "2 to 100"),
        (["--trays", "3", "--nnodes", "3", "train.py"], "--nnodes is chosen"),
        (["--trays", "3", "--rack=r.yaml", "train.py"], "--rack is chosen"),
    ],
)
def test_a_command_that_cannot_be_spread_over_hosts_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trays_of(words)


def test_the_scripts_own_options_are_its_own() -> None:
    assert trays_of(["--trays=3", "train.py", "--trays", "9"]) == (3, ["train.py", "--trays", "9"])


def test_hosts_are_for_plans_that_cut_the_network_and_for_no_others() -> None:
    assert hosts_needed(Plan(plan=FlipFlop(fault=Partition(), target=One(Subjects.TRAY), times=2, on_s=1, off_s=1)))
    assert all(
        hosts_needed(Plan(plan=Inject(fault=kind(), target=One(kind.strikes[0])))) == (kind in (Partition, Link))
        for kind in get_args(Fault)
        if not any(field.required for field in __import__("msgspec").structs.fields(kind))
    )


@pytest.mark.parametrize(
    "link",
    [Link(), Link(lost=1.5), Link(latency_s=-1), Link(bytes_per_s=0), Link(reset=True, half_open=True)],
    ids=["none", "more than all", "before it was sent", "never", "two"],
)
def test_a_link_that_means_nothing_is_refused(link: Link) -> None:
    with pytest.raises(Unsupported) as refused:
        check_plan(Plan(plan=Inject(fault=link, target=One(Subjects.AGENT))))
    assert refused.value.remedy


def test_a_machine_that_cannot_have_hosts_refuses_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_abilities, "hosts_here", lambda: ("there is no nft", "install nftables"))
    with pytest.raises(Unsupported, match="no nft") as refused:
        check_plan(Plan(plan=Inject(fault=Partition(), target=One(Subjects.TRAY))))
    assert refused.value.remedy == "install nftables."


def _ends(connected: socket.socket) -> bool:
    """Closed or reset, sooner or later."""
    try:
        return connected.recv(1) == b""
    except ConnectionError:
        return True
