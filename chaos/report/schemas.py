"""Write the JSON Schemas of a run's ``summary.json`` and ``history.jsonl``, derived from their types.

Run as ``python -m rackrun.chaos.report.schemas FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from rackrun.chaos.evidence import history, summary

__all__ = ["schemas"]


def schemas() -> dict[str, bytes]:
    """Return the name of each schema file -> its text."""
    found = {"chaos_summary.json": summary.schema(), "chaos_history.json": history.schema()}
    return {
        name: msgspec.json.format(msgspec.json.encode(of, order="deterministic"), indent=1) + b"\n"
        for name, of in found.items()
    }


def main() -> int:
    for name, text in schemas().items():
        (Path(sys.argv[1]) / name).write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
