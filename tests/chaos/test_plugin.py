"""The pytest plugin as its users see it: what it says of scripts with a mistake, of plans that cannot be, and of scripts that do not run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "testing"
PLUGIN = "rackrun.chaos.pytest_plugin"
WHOLE_JOBS = pytest.mark.timeout(1200)  # several jobs, one after another

HEAD = """
from rackrun.chaos import *
KILL = inject(Kill(), exactly("rank", 1), step=3)
"""


@pytest.fixture
def tested(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``tested("chaos.survives(...)", *options) -> what pytest says`` of a test with these lines, which has to fail unless ``passes``."""
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
    pytester.makeini("[pytest]\n")

    def run(lines: str, *options: str, passes: bool = False) -> str:
        body = "\n".join(f"    {line}" for line in lines.strip().splitlines())
        pytester.makepyfile(f"{HEAD}\ndef test_it(chaos):\n{body}\n")
        result = pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider", *options)
        result.assert_outcomes(passed=int(passes), failed=int(not passes))
        text = "\n".join(result.outlines)
        assert "internal error" not in text.lower()
        told = text.rpartition("= FAILURES =")[2].partition("short test summary")[0]
        assert not re.search(r"\.py:\d+", told), "a traceback says nothing to a user"
        return text

    return run


def planted(bug: str, args: str = "", more: str = "") -> str:
    return f'chaos.survives(r"{SCRIPTS / "planted.py"}", plan=KILL, args=["{bug}"{args}]{more})'


# -- a script with a mistake
@pytest.mark.stories
@WHOLE_JOBS
def test_a_running_mean_that_nobody_tracks_is_named(tested: Callable[..., str]) -> None:
    said = tested(planted("normaliser"))
    assert "planted.py does not survive this plan." in said
    assert "the loss of step 4 is " in said
    assert "normalise.mean, which the step function reaches, is not tracked" in said
    assert re.search(r"not tracked: normalise\.mean on rank 1: [\d.]+, and [\d.]+ without faults", said)
    assert re.search(r"tracked: before step 4 all \d+ tensors and values are equal, on all ranks", said)
    assert "Remedy: run.track(normalise=normalise)" in said
    assert "after step 3: kill of rank 1" in said
    assert re.search(r"pytest --chaos-seed \d+ .*::test_it", said)


@pytest.mark.stories
@WHOLE_JOBS
@pytest.mark.parametrize(
    ("bug", "what"),
    [
        (
            "scheduler",
            [
                r"before step 5, optimizer/groups/0/lr differs\. All that .* scheduler\.last_epoch, .*, are not tracked",
                r"tracked: before step 4 all \d+ tensors and values are equal, on all ranks, and so is the loss of step 4",
                r"Remedy: run\.track\(scheduler=scheduler\)",
            ],
        ),
        ("urandom", [r"does not do the same twice, without any fault: the loss of step 0 is ", r"no os\.urandom"]),
        ("clock", [r"does not do the same twice", r"not tracked: data\.dataset\.order on rank 0"]),
    ],
)
def test_a_mistake_is_named_with_its_step_and_its_remedy(bug: str, what: list[str], tested: Callable[..., str]) -> None:
    said = tested(planted(bug))
    for pattern in what:
        assert re.search(pattern, said), f"{pattern}\n{said}"


@pytest.mark.stories
@WHOLE_JOBS
def test_data_that_depend_on_the_rank_are_named(tested: Callable[..., str]) -> None:
    """A spare has the first rank that is not 0 until it takes a place: the loss of another one shows the mistake."""
    said = tested(planted("rank", more=", ranks=4").replace("KILL", 'inject(Kill(), exactly("rank", 2), step=3)'))
    assert re.search(
        r"the loss of step 4 is .* The process that took over as rank 2 has built data\.dataset\.order otherwise", said
    )
    assert re.search(r"may not depend on run\.rank", said)


@pytest.mark.stories
@WHOLE_JOBS
def test_what_no_loss_shows_is_named_and_may_be_said_to_go_into_no_training(tested: Callable[..., str]) -> None:
    """An average of the weights, which the newcomer has from its own beginning; a list for a plot; a clock, which nothing is said of."""
    said = tested(planted("average"))
    assert re.search(
        r"average\.model\.0\.weight, .* which the script reaches, are not tracked: .* over as rank 1", said
    )
    assert re.search(r"average\.updates on rank 1, another process since step 4, is 4, and 8 without faults", said)
    assert "Remedy: run.track(average=average)" in said
    assert "may_differ" in said
    assert "began_s" not in said
    assert re.search(r"shown\[0\]", tested(planted("plot")))
    tested(planted("plot", more=', may_differ=["shown"]'), passes=True)


@pytest.mark.stories
@WHOLE_JOBS
def test_a_world_that_shrinks_is_said_to_train_otherwise(tested: Callable[..., str]) -> None:
    """Nobody promises the same bits there, so it is no mistake of the script's; that it is right is not shown either."""
    said = tested(planted("none", ", 16", more=', ranks=2, spares=0, options=["--policy", "shrink"]'))
    assert "The run proves nothing" in said
    assert "from step 4 on it has 1 ranks instead of 2" in said
    assert 'reduction="exact"' in said


@pytest.mark.stories
@WHOLE_JOBS
def test_the_example_passes_as_it_is(tested: Callable[..., str], pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider", "--chaos-seed", "7", str(EXAMPLES))
    result.assert_outcomes(passed=5)


@pytest.mark.stories
@WHOLE_JOBS
def test_repro_of_a_failure_fails_again_in_an_empty_environment(tested: Callable[..., str], tmp_path: Path) -> None:
    tested(planted("normaliser"), "--chaos-out", str(tmp_path / "kept"))
    (repro,) = (tmp_path / "kept").glob("*/*/0/repro.sh")
    moved = tmp_path / "somewhere else"
    repro.parent.rename(moved)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    out = ["--out", str(tmp_path / "again")]
    again = subprocess.run(
        ["/bin/sh", str(moved / "repro.sh"), *out], cwd="/", env=environment, capture_output=True, text=True
    )
    assert again.returncode == 1, again.stderr
    assert "normalise.mean" in again.stdout


@pytest.mark.stories
@WHOLE_JOBS
def test_the_run_without_faults_is_shared_and_its_failure_too(tested: Callable[..., str], tmp_path: Path) -> None:
    """Two good tests of one command, two of another; and one that fails."""
    script = f'r"{SCRIPTS / "planted.py"}"'
    tested(
        f"""
for _ in range(2):
    chaos.survives({script}, plan=KILL, args=["none"])
chaos.run({script}, plan=KILL, args=["none", 9])
chaos.run({script}, plan=KILL, args=["none"], env={{"SOMETHING": "1"}})
for _ in range(2):
    try:
        chaos.run({script}, plan=KILL, args=[])
    except BaseException as failed:
        assert "IndexError" in str(failed)
""",
        "--chaos-out",
        str(tmp_path / "kept"),
        passes=True,
    )
    assert len(list((tmp_path / "kept").glob("*/references/*-0"))) == 4


# -- scripts that do not run
@pytest.mark.stories
@WHOLE_JOBS
@pytest.mark.parametrize(
    ("text", "more", "what"),
    [
        ("", "", ["committed no step", "use @rackrun.elastic and run.steps()"]),
        ("import sys; sys.exit(5)", "", ["the run without faults ended with exit code 1", "mend the script first"]),
        ("import time\ntime.sleep(1000)", ", limit_s=12", ["did not end within", "it had not done a step", "limit_s"]),
        (
            "import argparse\nargparse.ArgumentParser().parse_args()",
            ', args=["--lr", 3]',
            ["ended with exit code 1", "unrecognized arguments: --lr 3"],
        ),
    ],
)
def test_a_script_that_cannot_be_compared_is_said_to_be_that(
    text: str, more: str, what: list[str], tested: Callable[..., str], pytester: pytest.Pytester
) -> None:
    pytester.path.joinpath("train.py").write_text(text)
    said = tested(f'chaos.survives("train.py", plan=KILL{more})')
    assert "train.py cannot be tested: the run without faults" in said
    for part in what:
        assert part in said


# -- what is refused before anything runs
@pytest.mark.parametrize(
    ("call", "what"),
    [
        ('survives("other.py", plan=KILL)', "there is no other.py in .* Remedy: name it relative"),
        ('survives("train.py", plan="none.yaml")', "there is no none.yaml"),
        ('survives("train.py", plan="quake.yaml")', "'earthquake' .* Remedy: give one of kill, "),
        ('survives("train.py", plan="kil.yaml")', "'kil' .* Remedy: did you mean kill?"),
        ('survives("train.py", plan=inject(Kill(), exactly("rank", 7)))', "never has a rank 7: its ranks are 0, 1"),
        ('survives("train.py", plan=inject(Kill(), one("spare")), spares=0)', "never has a spare: it has 0 spares"),
        ('survives("train.py", plan=inject(Kill(), several("rank", 3)))', "never has 3 ranks"),
        ('survives("train.py", plan=inject(Kill(), exactly("tray", "tray-05")), trays=3)', "tray-00, tray-01, tray-02"),
        ('survives("train.py", plan=inject(Kill(), one("rank"), step=-3))', "step -3 .* is before the start"),
        ('survives("train.py", plan=inject(Kill(), one("rank"), time_s=-1.0))', "-1.0 s is in the past"),
        ('survives("train.py", plan=make_plan(KILL, slots=0))', "never fits into a budget of 0 slots"),
        ('survives("train.py", plan=inject(DiskFull(), one("storage")))', "the job writes none"),
        ('survives("train.py", plan=KILL, ranks=0)', "a job of 0 ranks"),
        ('survives("train.py", plan=KILL, ranks=3, spares=1, trays=3)', "divided evenly among 3 trays"),
        ('survives("train.py", plan=KILL, options=["--out-dir", "x"])', "--out-dir is chosen by the harness"),
    ],
)
def test_what_cannot_be_is_refused_in_plain_words(call: str, what: str, tmp_path: Path) -> None:
    from rackrun.chaos import DiskFull, Kill, exactly, inject, make_plan, one, several
    from rackrun.chaos.testing import Chaos, References

    names = {
        "DiskFull": DiskFull,
        "Kill": Kill,
        "exactly": exactly,
        "inject": inject,
        "make_plan": make_plan,
        "one": one,
    }
    names |= {"several": several, "KILL": inject(Kill(), exactly("rank", 1), step=3)}
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    for name, fault in (("quake", "earthquake"), ("kil", "kil")):
        text = f"plan: {{do: inject, fault: {{fault: {fault}}}, target: {{who: one, of: rank}}}}"
        (tmp_path / f"{name}.yaml").write_text(text)
    references = References(tmp_path / "references")
    chaos = Chaos(seed=1, folder=tmp_path / "out", references=references, near=tmp_path, test="test_it")
    with pytest.raises((pytest.fail.Exception, ValueError)) as refused:
        eval(f"chaos.{call}", {**names, "chaos": chaos})
    assert re.search(what, str(refused.value)), str(refused.value)
    assert "Remedy: " in str(refused.value)
    assert not references.folder.exists()


def test_a_word_that_chaos_does_not_know_is_refused(tmp_path: Path) -> None:
    from rackrun.chaos.testing import Chaos, References

    chaos = Chaos(seed=1, folder=tmp_path, references=References(tmp_path), near=tmp_path, test="test_it")
    with pytest.raises(TypeError, match="there is no rank; there are ranks, spares"):
        chaos.survives("train.py", rank=3)  # type: ignore[call-arg]


@pytest.mark.stories
def test_the_seed_is_printed_drawn_anew_and_kept_when_it_is_given(tested: Callable[..., str]) -> None:
    def seed_of(*options: str) -> int:
        said = tested("import pytest\npytest.fail(f'seed {chaos.seed}.', pytrace=False)", *options)
        return int(re.findall(r"seed (\d+)\.", said)[0])

    assert seed_of("--chaos-seed", "77") == 77
    assert seed_of() != seed_of()


def test_pytest_starts_without_anything_heavy() -> None:
    """The plugin is loaded in every pytest of an environment that has rackrun."""
    code = (
        f"import sys, pytest; before = set(sys.modules); import {PLUGIN}; "
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('rackrun')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "msgspec", "yaml", "rich", "typer"} & set(eval(loaded.stdout))
