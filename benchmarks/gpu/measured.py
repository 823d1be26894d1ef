"""The table of what was measured on GPUs against what was expected, from the documents in ``benchmarks/results/gpu``:
``python3 -m benchmarks.gpu.measured`` prints it as it stands in ``docs/gpu_measured.md``.

Of each check the newest outcome counts, on each kind of GPU; what was cut short, or left out, is only told where nothing else is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.registry import load

__all__ = ["RESULTS", "documents", "table"]

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu"
_NOTE_CHARS = 160


def documents(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Oldest first."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: str(one["ended_at"]))


def table(told: Iterable[dict[str, Any]]) -> str:
    """Markdown. A row for each check that some document has, on each kind of GPU, in the order of the kit."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for document in told:
        gpu = f"{document['facts']['gpus'][0]['name']}, torch {document['facts']['torch']}"
        for check in document["checks"]:
            known = newest.get((check["id"], gpu))
            if known is None or _is_told(check) or not _is_told(known):
                newest[check["id"], gpu] = check
    told_of = {name for (name, _), check in newest.items() if _is_told(check)}
    order = [check.id for check in load()]
    rows = ["| | check | expected | found | | on |", "|---|---|---|---|---|---|"]
    for (name, gpu), check in sorted(newest.items(), key=lambda one: (order.index(one[0][0]), one[0][1])):
        if _is_told(check) or name not in told_of:
            rows.append(_row(name, gpu, check))
    return "\n".join(rows)


def _is_told(check: dict[str, Any]) -> bool:
    return check["outcome"] in ("ok", "fail")


def _row(name: str, gpu: str, check: dict[str, Any]) -> str:
    value = check["value"]
    found = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    note = " ".join(check["note"].split())
    told = ": ".join(filter(None, [f"{found} {check['unit']}".strip(), note[:_NOTE_CHARS]]))
    mark = {"ok": "yes", "fail": "**no**" if check["must"] else "worse"}.get(check["outcome"], check["outcome"])
    cells = (name, check["title"], check["expected"], told, mark, gpu)
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    print(table(documents()))
