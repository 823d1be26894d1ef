"""``rackctl`` in this process, as its entry point runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rackrun.ctl.main import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def rackctl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """``rackctl("ckpt", "ls", folder) -> Said``. What is refused is refused in one line, with a remedy."""

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["rackctl", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        if err.startswith("rackctl: error: "):
            assert err.count("\n") == 1
            assert "Remedy: " in err
        return Said(int(ended.value.code or 0), out, err)

    return run
