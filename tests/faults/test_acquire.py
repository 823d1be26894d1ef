"""No spare is left, a tray is killed, and another rack is got: the same training, and nothing of the rack is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.scripts.strike import Fault
from tests.faults.trained import Trained

pytestmark = pytest.mark.slow

Train, Reference = Callable[..., Trained], Callable[[str], Trained]
TRAY_LOST = Fault(name="agent", place="backward", rank=3, step=5, then="AGENT")


def test_a_rack_comes_while_all_stand_still(train: Train, reference: Reference) -> None:
    options = ["--provider", "local", "--policy", "swap,acquire-wait", "--max-restarts", 0]
    trained = train("ddp", [TRAY_LOST], spares=0, trays=2, options=options)
    trained.unheard = frozenset({2, 3})
    trained.assert_same_training(reference("ddp"), [TRAY_LOST])
    (recovery,) = trained.recoveries
    assert recovery["rungs"] == ["acquire", "swap"], trained
    assert {lost["to"] for lost in recovery["lost"]} == {"rack-1-00/0", "rack-1-00/1"}, trained
