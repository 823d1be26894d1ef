"""What is imported before workers are forked: garbage is not collected meanwhile, and a user's module has its say in that."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from rackrun.agent.worker_start.fork_server import preload


def test_a_preload_may_turn_collections_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_without_collections.py").write_text("import gc\nwas_on = gc.isenabled()\ngc.disable()\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert preload(["module_without_collections"]) == []
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert sys.modules.pop("module_without_collections").was_on
