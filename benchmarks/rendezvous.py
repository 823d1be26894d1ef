"""What building a group costs the exchange and its members: one group, built once, its members as threads of this process.

    python benchmarks/rendezvous.py                 8 to 128 ranks (a minute)
    python benchmarks/rendezvous.py --ranks 16      does it still work

The exchange serves in a process of its own, as an agent does it. **Heard** and **told** are the messages and bytes that it receives, and sends to
members; **server** is its processor time; **until built** the time until the last member has its communicator. Members share one interpreter and this
machine, so times say how they grow, not how long a network takes. **Met**: who builds on demand waits for all members first. A message is pushed to every
member of a room, so messages grow with the square of the group's size, and bytes faster, as each rank says an address for each other. For larger
groups they are extrapolated from the largest two, and the server's time from its messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rackrun.link import exchange  # noqa: E402
from rackrun.worker.communicators.exchange_store import ExchangeStore  # noqa: E402
from rackrun.worker.membership.communicator_builder import build_communicator  # noqa: E402

TOKEN = "token"
PATIENCE = timedelta(minutes=5)
LARGER = (1024, 10_000)


class Counted:
    """What the exchange's members have said and heard so far."""

    def __init__(self) -> None:
        self.heard = self.heard_bytes = self.told = self.told_bytes = 0
        said, hear = exchange._Member._said, exchange._Member.hear

        def count_said(*given: Any, **_: Any) -> None:
            key, value = given[1:]
            self.heard += 1
            self.heard_bytes += len(exchange._pack(key, value))
            said(*given)

        def count_hear(*given: Any, **_: Any) -> None:
            message = given[1]
            self.told += 1
            self.told_bytes += len(message)
            hear(*given)

        exchange._Member._said, exchange._Member.hear = count_said, count_hear  # type: ignore[method-assign]

    def now(self) -> list[float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return [self.heard, self.heard_bytes, self.told, self.told_bytes, used.ru_utime + used.ru_stime]


def serve(ours: Connection) -> None:
    """Answers each request for what has been counted; ends when nobody asks any more."""

    async def main() -> None:
        counted = Counted()
        server = exchange.ExchangeServer("127.0.0.1", TOKEN)
        ours.send(await server.start())
        try:
            while await asyncio.to_thread(ours.recv):
                ours.send(counted.now())
        finally:
            await server.close()

    asyncio.run(main())


def build(address: str, room: str, size: int, *, meets: bool) -> float:
    """Seconds until all have their communicator."""
    built: list[Any] = []
    errors: list[Exception] = []

    def member(rank: int) -> None:
        try:
            store = ExchangeStore(address, TOKEN, room)
            if meets:
                store.set(f"here/{rank}", b"")
                store.wait([f"here/{peer}" for peer in range(size)], PATIENCE)
            built.append(build_communicator(torch.device("cpu"), store, rank, size, PATIENCE))
            store.close()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=member, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    for communicator in built:
        communicator.break_()
    if errors:
        raise errors[0]
    return took


def measure(size: int, *, meets: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=[theirs])
    server.start()
    try:
        address = mine.recv()
        ask = partial(_ask, mine)
        before = ask()
        took = build(address, f"1/group-{size}-{meets}", size, meets=meets)
        heard, heard_bytes, told, told_bytes, cpu = (b - a for a, b in zip(before, ask(), strict=True))
    finally:
        mine.send(False)
        server.join()
    return {
        "ranks": size, "met": meets, "heard": heard, "heard_bytes": heard_bytes, "told": told, "told_bytes": told_bytes,
        "server_s": round(cpu, 4), "built_s": round(took, 3),
    }  # fmt: skip


def _ask(mine: Connection) -> list[float]:
    mine.send(True)
    found: list[float] = mine.recv()
    return found


def extrapolated(rows: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Messages and bytes as a power of the size, through the two largest; the server's time as the messages that it sends."""
    small, large = rows[-2], rows[-1]
    doublings = math.log(ranks / large["ranks"]) / math.log(large["ranks"] / small["ranks"])
    out: dict[str, Any] = {"ranks": ranks, "met": large["met"]}
    for name in ("heard", "heard_bytes", "told", "told_bytes"):
        out[name] = large[name] * (large[name] / small[name]) ** doublings
    out["server_s"] = large["server_s"] * out["told"] / large["told"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found: list[dict[str, Any]] = []
    print(f"{'ranks':>6} {'met':>5} {'heard':>8} {'KB':>9} {'told':>11} {'MB':>11} {'server, s':>10} {'built, s':>9}")
    for meets in (False, True):
        rows = [measure(size, meets=meets) for size in options.ranks]
        found += rows
        more = [extrapolated(rows, ranks) for ranks in LARGER] if len(rows) > 1 else []
        for row in [*rows, *more]:
            built = f"{row['built_s']:9.2f}" if "built_s" in row else "   fitted"
            print(
                f"{row['ranks']:6} {'yes' if row['met'] else 'no':>5} {row['heard']:8.0f} {row['heard_bytes'] / 1e3:9.1f} {row['told']:11.0f} "
                f"{row['told_bytes'] / 1e6:11.2f} {row['server_s']:10.3f} {built}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
