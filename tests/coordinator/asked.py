"""Policies for `test_policy_host`, which do as the failure says. Run in a process of its own."""

from __future__ import annotations

import os
import sys
from typing import Any

from rackrun.policy import ClusterView, Decision, Failure, Rung


def choose(failure: Failure, view: ClusterView) -> Any:
    match failure.what:
        case "raises":
            raise ValueError("no idea")
        case "exits":
            sys.exit(3)
        case "dies":
            os._exit(7)
        case "loops":
            while True:
                pass
        case "nonsense":
            return "swap"
        case "wrong":
            return Decision(rung="jump")  # type: ignore[arg-type]
        case "prints":
            print("this is for the standard error")
        case "leaves it":
            return None
    return Decision(rung=Rung.SWAP, reason=f"{view.world_size} ranks", targets=view.takeovers)


not_a_function = 3
