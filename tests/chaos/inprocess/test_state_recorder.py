"""What ranks write down before every step, and how they wait for the harness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rackrun.chaos.inprocess.state_recorder import (
    FREE,
    StateRecorder,
    StepState,
    _called,
    comparable_plain,
    let_go_on,
    read_step_states,
)


def test_half_a_line_of_a_process_that_was_killed_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "witness").mkdir()
    whole = [StepState(step=step, rank=1, world=2, pid=7, tracked={"w": str(step)}) for step in (0, 1)]
    lines = b"".join(msgspec.json.encode(held) + b"\n" for held in whole)
    (tmp_path / "witness" / "1-7.jsonl").write_bytes(lines + b'{"step": 2, "ra')
    (tmp_path / "witness" / "0-6.jsonl").write_bytes(b'{"st')
    assert read_step_states(tmp_path) == whole
    assert read_step_states(tmp_path / "nowhere") == []


@pytest.mark.parametrize("go", [5, FREE, None])
def test_a_step_that_may_begin_does_not_wait(go: int | None, tmp_path: Path) -> None:
    """Where nobody says anything the run is over."""
    if go is not None:
        let_go_on(tmp_path, go)
    StateRecorder(tmp_path).wait(5)


def test_a_step_waits_until_it_may_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go_on(tmp_path, 3)
    waited: list[int] = []

    def harness(_seconds: float) -> None:
        """It sees one step after the other."""
        waited.append(3 + len(waited))
        let_go_on(tmp_path, waited[-1] + 1)

    monkeypatch.setattr("rackrun.chaos.inprocess.state_recorder.time.sleep", harness)
    StateRecorder(tmp_path).wait(5)
    assert waited == [3, 4]


def test_what_a_step_function_is_called_with_has_the_names_of_its_parameters() -> None:
    def train(step: int, warmth: float, *, clip: float) -> None: ...

    def committed(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """As `rackrun.worker.loop.run.Run.step` has it."""
        function = train
        return lambda step: function(step, *args[1:], **kwargs)

    assert _called(committed(3, 0.5, clip=1.0)) == (train, {"train(warmth)": 0.5, "train(clip)": 1.0})
    assert _called(None) == (None, {})


def test_an_object_says_what_of_it_two_runs_have_in_common() -> None:
    class Record:
        def comparable_state(self) -> dict[str, Any]:
            return {"loss": 0.5}

    plain = {"record": {"loss": 0.5, "seconds": 1.25}, "counter": {"steps": 3}}
    others = {"record": Record(), "counter": object()}
    state: Any = SimpleNamespace(encode_plain=lambda: msgspec.msgpack.encode(plain), others=others)
    assert comparable_plain(state) == {"record": {"loss": 0.5}, "counter": {"steps": 3}}
