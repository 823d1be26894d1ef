"""Each is refused before any process starts: exit code 2, what and what to do, and nothing left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rackrun import launcher
from rackrun.launch.options.arguments import make_parser, parse
from rackrun.version import __version__

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('never reached')\n")
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "short").write_text("x")
    (tmp_path / "rack.yaml").write_text("format: 1\nrack: []\n")
    (tmp_path / "file").write_text("a file, not a directory")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "journal.sqlite").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("rackrun.launcher.signal.signal", lambda *_: None)  # pytest's own handlers stay
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message, after one run in this very process: it must not have got as far as a fork."""
    try:
        code: object = launcher.main(arguments)
    except SystemExit as error:  # argparse's way
        code = error.code
    said = capsys.readouterr().err
    assert code == 2, said
    return said


def files(here: Path) -> set[str]:
    return {str(path.relative_to(here)) for path in here.rglob("*")}


TWO = ("--nnodes", "2", "--rdzv-id", "job", "--rdzv-endpoint", "127.0.0.1:{port}")
CASES: dict[str, tuple[tuple[str, ...], Mapping[str, str], tuple[str, ...]]] = {
    "no script": ((), {}, ("training_script",)),
    "unknown script": (("nowhere.py",), {}, ("there is no script nowhere.py", "check the path")),
    "directory without main": (("used",), {}, ("__main__.py",)),
    "unknown module": (("-m", "no_such_module_at_all"), {}, ("there is no module",)),
    "unknown executable": (("--no-python", "no-such-program"), {}, ("there is no executable", "chmod")),
    "module and no-python": (("-m", "--no-python", "x"), {}, ("exclude each other",)),
    "spares take all": (("--nproc-per-node", "2", "--spares", "2", "train.py"), {}, ("--spares 2 of 2 slots", "lower")),
    "negative spares": (("--spares", "-1", "train.py"), {}, ("--spares -1 is negative",)),
    "unknown option": (("--nothing", "train.py"), {}, ("--nothing", "see rackrun --help")),
    "as many workers as no host has": (("--nproc-per-node", "9" * 20, "train.py"), {}, ("more than 10000 workers",)),
    "as many hosts as there are not": (("--nnodes", "9" * 20, "train.py"), {}, ("more than 100000 hosts",)),
    "checkpoints where nothing can be made": (
        ("--checkpoint-dir", "/proc/none/ckpt", "train.py"),
        {},
        ("--checkpoint-dir /proc/none/ckpt cannot be used", "no directory can be made in /proc"),
    ),
    "checkpoints in an unknown store": (
        ("--checkpoint-dir", "s3x://bucket/run", "train.py"),
        {},
        ("s3x:// is not supported", "or one of s3://, gs://, az://, abfs://.\n"),
    ),
    "a script whose name is no UTF-8": (("tr\udcff.py",), {}, ("the script", "is no UTF-8", "another name")),
    "a directory whose name is no UTF-8": (
        ("--checkpoint-dir", "c\udcff", "train.py"),
        {},
        ("--checkpoint-dir", "is no UTF-8", "another name"),
    ),
    "an argument that is no UTF-8": (("train.py", "x\udcff"), {}, ("an argument of the script", "is no UTF-8")),
    "checkpoints in a file": (("--checkpoint-dir", "file", "train.py"), {}, ("it is no directory",)),
    "checkpoints below a file": (("--checkpoint-dir", "file/ckpt", "train.py"), {}, ("file is no directory",)),
    "logs by address where nothing can be made": (
        ("--log-dir", "file:///proc/none", "train.py"),
        {},
        ("--log-dir /proc/none cannot",),
    ),
    "logs where nothing can be made": (("--log-dir", "/proc/none", "train.py"), {}, ("--log-dir /proc/none cannot",)),
    "policy of no module": (("--policy", "no_such_module:f", "train.py"), {}, ("No module named 'no_such_module'",)),
    "spares no number": (("--spares", "many", "train.py"), {}, ("--spares", "many")),
    "PET spares no number": (("train.py",), {"PET_SPARES": "many"}, ("--spares", "many")),
    "PET flag no number": (("train.py",), {"PET_QUIET": "yes"}, ("PET_QUIET", "use 0 or 1")),
    "more ranks at the least than there are": (
        ("--nproc-per-node", "4", "--spares", "1", "--min-ranks", "4", "train.py"),
        {},
        ("--min-ranks 4", "the 3 ranks", "give 3 at the most"),
    ),
    "negative ranks": (("--min-ranks", "-1", "train.py"), {}, ("--min-ranks -1", "0 for a fixed size")),
    "a size that is fixed and shrinks": (
        ("--min-ranks", "0", "--policy", "swap,shrink", "train.py"),
        {},
        ("--policy names shrink", "--min-ranks 0"),
    ),
    "PET choice unknown": (("train.py",), {"PET_SLOW_RANKS": "swop"}, ("PET_SLOW_RANKS", "'swop'", "swap,shift")),
    "PET lost state unknown": (("train.py",), {"PET_LOST_STATE": "again"}, ("--lost-state 'again'", "stop, restart")),
    "no trays": (("--trays", "0", "train.py"), {}, ("--trays 0", "give 1 to")),
    "no rack file": (("--rack", "nowhere.yaml", "train.py"), {}, ("nowhere.yaml cannot be read", "examples/racks")),
    "a rack file that is none": (("--rack", "rack.yaml", "train.py"), {}, ("rack.yaml:2", "did you mean 'racks'?")),
    "a mesh of more than there is": (
        ("--nproc-per-node", "4", "--spares", "1", "--mesh", "dp=2,tp=2", "train.py"),
        {},
        ("--mesh dp=2,tp=2 is 4 ranks, and there are 4 slots, 1 of them spares", "lower --spares"),
    ),
    "no workers": (("--nproc-per-node", "0", "train.py"), {}, ("leaves nothing to run",)),
    "unknown device": (("--nproc-per-node", "abacus", "train.py"), {}, ("abacus", "give a number")),
    "nnodes garbled": (("--nnodes", "a:b", "train.py"), {}, ("neither N nor MIN:MAX",)),
    "nnodes upside down": (("--nnodes", "3:2", "train.py"), {}, ("not a range",)),
    "checkpoints every no steps": (
        ("--checkpoint-dir", "c", "--checkpoint-every", "0", "train.py"),
        {},
        ("--checkpoint-every 0",),
    ),
    "checkpoints to nowhere": (("--checkpoint-every", "5", "train.py"), {}, ("without --checkpoint-dir",)),
    "checkpoints nowhere": (("--checkpoint-dir", "", "train.py"), {}, ("--checkpoint-dir names no directory",)),
    "no checkpoint kept": (("--checkpoint-dir", "c", "--checkpoint-keep", "0", "train.py"), {}, ("would keep none",)),
    "copies of an unknown kind": (("--snapshot-copies", "raid:5", "train.py"), {}, ("raid:5", "local, mirror, xor")),
    "copies over racks": (("--snapshot-copies", "mirror:rack", "train.py"), {}, ("level rack is not possible",)),
    "three copies": (("--snapshot-copies", "mirror:3", "train.py"), {}, ("3 copies are not kept", "--checkpoint-dir")),
    "sets of one": (("--snapshot-copies", "xor:1", "train.py"), {}, ("xor:1", "protects nothing")),
    "sets of more trays than there are": (
        ("--trays", "4", "--snapshot-copies", "xor:8", "train.py"),
        {},
        ("sets of 8 need as many trays, and there are 4", "xor:4"),
    ),
    "sets of more trays than there are, of which two may be lost": (
        ("--trays", "4", "--snapshot-copies", "rs:8+2", "train.py"),
        {},
        ("sets of 10 need as many trays, and there are 4", "rs:2+2"),
    ),
    "sets of which none may be lost": (
        ("--trays", "4", "--snapshot-copies", "rs:4+0", "train.py"),
        {},
        ("rs:4+0", "rs:N+M"),
    ),
    "sets on one tray": (("--snapshot-copies", "xor", "train.py"), {}, ("sets of 2 need", "there is 1", "--trays")),
    "negative restarts": (("--max-restarts", "-1", "train.py"), {}, ("--max-restarts -1",)),
    "etcd": (("--rdzv-backend", "etcd", "train.py"), {}, ("etcd is not supported", "--rdzv-endpoint")),
    "virtual local rank": (("--virtual-local-rank", "train.py"), {}, ("not supported",)),
    "numa binding": (("--numa-binding", "node", "train.py"), {}, ("not supported",)),
    "redirects garbled": (("-r", "9", "train.py"), {}, ("--redirects",)),
    "unknown signal": (("--signals-to-handle", "SIGNOPE", "train.py"), {}, ("SIGNOPE",)),
    "rdzv-conf garbled": (("--rdzv-conf", "x", "train.py"), {}, ("--rdzv-conf",)),
    "torchcomms": (("train.py",), {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}, ("TORCHCOMMS", "unset it")),
    "filler empty": (("--filler", " ", "train.py"), {}, ("--filler names no command", "for example")),
    "filler not there": (("--filler", "no_such_program -x", "train.py"), {}, ("no executable no_such_program", "path")),
    "filler half quoted": (("--filler", "sleep '1", "train.py"), {}, ("No closing quotation", "quote it")),
    "filler lingers": (
        ("--filler", "sleep 1", "--filler-grace", "5", "train.py"),
        {},
        ("--filler-grace 5", "0 to 0.4"),
    ),
    "filler grace alone": (("--filler-grace", "0.1", "train.py"), {}, ("without --filler",)),
    "unknown preload": (("--preload", "no_such_module_at_all", "train.py"), {}, ("--preload", "no such module")),
    "standalone on two": (("--standalone", "--nnodes", "2", "train.py"), {}, ("--standalone means one host",)),
    "two hosts, nowhere to meet": (("--nnodes", "2", "train.py"), {}, ("--rdzv-endpoint",)),
    "two hosts, no token": ((*TWO, "train.py"), {}, ("--token-file", "chmod 600")),
    "two hosts, no id": (
        ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:{port}", "--token-file", "token", "train.py"),
        {},
        ("--rdzv-id",),
    ),
    "no token there": ((*TWO, "--token-file", "nowhere", "train.py"), {}, ("cannot be read", "--token-file")),
    "short token": ((*TWO, "--token-file", "short", "train.py"), {}, ("16 characters", "urandom")),
    "unknown host": (
        (
            "--nnodes",
            "2",
            "--rdzv-id",
            "j",
            "--token-file",
            "token",
            "--rdzv-endpoint",
            "no-such-host.invalid:1",
            "train.py",
        ),
        {},
        ("no-such-host.invalid", "check the name"),
    ),
    "endpoint without port": (
        ("--nnodes", "2", "--rdzv-id", "j", "--token-file", "token", "--rdzv-endpoint", "h:x", "train.py"),
        {},
        ("names no host and port",),
    ),
    "port of something else": ((*TWO, "--token-file", "token", "train.py"), {}, ("in use by something that is not",)),
    "out-dir is a file": (("--out-dir", "file", "train.py"), {}, ("cannot be written", "another --out-dir")),
    "out-dir below a file": (("--out-dir", "file/x", "train.py"), {}, ("cannot be written",)),
}


class NotUs(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def foreign_port() -> object:
    with HTTPServer(("127.0.0.1", 0), NotUs) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("case", CASES)
def test_is_refused_and_nothing_is_left(
    case: str,
    here: Path,
    foreign_port: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments, env, said = CASES[case]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    before = files(here)
    message = refused(capsys, *(argument.format(port=foreign_port) for argument in arguments))
    for part in said:
        assert part in message
    assert message.count("\n") == 1, message
    assert files(here) == before


def test_a_policy_of_no_module_is_refused_without_a_traceback(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(capfd, "--policy", "no_such_module:f", "train.py")
    assert message.startswith("rackrun: error: the policy no_such_module:f cannot be loaded"), message
    (here / "broken.py").write_text("1 / 0\n")
    assert "Traceback" in refused(capfd, "--policy", "broken:f", "train.py"), (
        "where it went wrong in the user's own code"
    )


def test_the_port_of_another_job_is_refused_by_its_name(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_job(self: NotUs) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"run_id": "somebody-elses", "protocol": 1}')

    monkeypatch.setattr(NotUs, "do_GET", other_job)
    with HTTPServer(("127.0.0.1", 0), NotUs) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        arguments = [argument.format(port=server.server_port) for argument in TWO]
        message = refused(capsys, *arguments, "--token-file", "token", "train.py")
        server.shutdown()
        thread.join()
    assert "in use by rackrun job somebody-elses, this is job" in message


def test_a_token_that_others_can_read_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "token").chmod(0o644)
    message = refused(capsys, *(a.format(port=_free_port()) for a in TWO), "--token-file", "token", "train.py")
    assert "can be read by others" in message
    assert "chmod 600" in message


def test_help_works_and_names_both_groups_and_the_exit_codes() -> None:
    ran = subprocess.run([sys.executable, "-m", "rackrun", "--help"], capture_output=True, text=True, env=_env())
    assert ran.returncode == 0
    for part in ("--nproc-per-node", "--spares", "exit codes", "Default: 3"):
        assert part in ran.stdout


def test_the_version_is_printed_without_torch() -> None:
    show = "import sys; from rackrun.launcher import main; code = main(['--version']); sys.exit(code or 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, env=_env())
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"rackrun {__version__}\n", "")


def test_the_version_may_come_after_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--standalone", "--nproc-per-node", "2", "--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"rackrun {__version__}\n"


def test_help_tells_words_with_commas_from_lists_of_words() -> None:
    told = make_parser().format_help()
    assert "{notice" not in told
    assert "--slow-ranks ACTION" in told


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _env() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root)}
