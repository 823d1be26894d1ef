"""Workers that compute otherwise than the rest are told of, once, and stop nothing."""

from __future__ import annotations

from rackrun.core.generation.outbox import Outbox
from rackrun.core.lifecycle.numerics_notices import NumericsNotices, differences
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import WorkerReady
from rackrun.protocol.ids import Incarnation, SlotId

H100 = (("GPU", "H100"), ("driver", "570"))
H200 = (("GPU", "H200"), ("driver", "570"))


def ready(slot: str, numerics: tuple[tuple[str, str], ...]) -> WorkerReady:
    return WorkerReady(slot=SlotId(slot), incarnation=Incarnation(1), numerics=numerics)


def told(*events: WorkerReady) -> list[str]:
    out = Outbox()
    notices = NumericsNotices(out)
    for event in events:
        notices.compare(event)
    return [command.text for command in out.take() if isinstance(command, Notice)]


def test_workers_that_compute_alike_are_not_told_of() -> None:
    assert not told(ready("a/0", H100), ready("a/1", H100), ready("a/0", H100))


def test_a_difference_is_told_once_however_many_have_it() -> None:
    (text,) = told(ready("a/0", H100), *(ready(f"b/{index}", H200) for index in range(8)))
    assert text.startswith("b/0 does not compute as a/0 does: GPU H200 (there H100). ")


def test_another_difference_is_told_besides() -> None:
    newer = (("GPU", "H200"), ("driver", "580"))
    assert len(told(ready("a/0", H100), ready("b/0", H200), ready("b/1", newer))) == 2


def test_a_fleet_of_many_kinds_is_not_listed() -> None:
    assert len(told(ready("a/0", H100), *(ready(f"b/{n}", (("driver", str(n)),)) for n in range(100)))) == 16


def test_a_setting_that_the_script_changes_is_no_difference_to_itself() -> None:
    assert not told(ready("a/0", H100), ready("a/0", H200), ready("a/1", H200))


def test_who_says_nothing_is_compared_with_nobody() -> None:
    assert not told(ready("a/0", ()), ready("a/1", H100), ready("a/2", ()))


def test_only_what_both_have_said_can_differ() -> None:
    assert not differences((("GPU", "H100"), ("NCCL", "2.28")), (("GPU", "H100"),), "here")
