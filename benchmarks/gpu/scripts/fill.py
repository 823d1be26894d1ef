"""A filler: it fills a part of its GPU and multiplies, until it is told to go. ``fill.py RECORD GIB``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Record


def main() -> None:
    record, gib = Record(sys.argv[1]), float(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = torch.ones(int(gib * 2**30), dtype=torch.uint8, device=device)
    some = torch.randn(256, 256, device=device)
    record.write("filler", slot=os.environ.get("RACKRUN_FILLER", ""), bytes=held.numel())
    while True:
        some = torch.tanh(some @ some)


if __name__ == "__main__":
    main()
