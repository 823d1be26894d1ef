"""Placement of 100,000 GPUs: 1,389 racks of 72, from nothing, and repaired after one fault.

    python benchmarks/placement.py            about 15 s on one core
    python benchmarks/placement.py --racks 20

Measured: reading the topology into arrays (once for a topology), a placement from nothing without the arrays and with them,
and the repair of one lost GPU, of one lost tray, and of one lost GPU in a clique without spares, whose whole group moves. Each is
a median. Naming all slots and hashing them is shown by itself: a repair tells who moved, and needs neither.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import machine, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.racks import Clique, CliqueId, Gpu, Rack, Topology, Tray
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.rank_assignment import Fitness, Placement, place

TRAYS, GPUS, SPARES = 18, 4, 8


def racks(count: int) -> Topology:
    """NVL72 racks, 16 under one leaf switch, 16 leaves under one spine."""
    built, cliques = [], []
    for rack in range(count):
        trays = tuple(
            Tray(
                name=f"r{rack:04}-t{tray:02}",
                index=tray,
                gpus=tuple(Gpu(uuid=f"GPU-{rack:04}-{tray:02}-{gpu}", index=gpu) for gpu in range(GPUS)),
            )
            for tray in range(TRAYS)
        )
        built.append(
            Rack(serial=f"{rack:04}", trays=trays, fabric=(f"leaf-{rack // 16}", f"spine-{rack // 256}", "core"))
        )
        cliques.append(
            Clique(id=CliqueId(f"domain-{rack:04}", 1), gpus=tuple(gpu.uuid for t in trays for gpu in t.gpus))
        )
    return Topology.of(built, cliques)


def median(run: Callable[[], object], times: int) -> dict[str, float]:
    """Of wall time, and of this process's time on a core: somebody else may be using the machine."""
    wall, cpu = [], []
    for _ in range(times):
        start, busy = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    return {"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "best_wall_s": min(wall)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--racks", type=int, default=1389)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    topology = racks(args.racks)
    fresh = Topology.from_json(topology.to_json())
    mesh = Mesh.of({"pp": 8, "dp": args.racks, "tp": 8})
    assert mesh.world_size == args.racks * (TRAYS * GPUS - SPARES)

    def from_nothing() -> Placement:
        vars(fresh).pop("seats", None)
        return place(fresh, mesh, spares=SPARES)

    board = PlacementArrays(topology)
    placed = place(board, mesh, spares=SPARES)
    whole = dict.fromkeys([f"r0007-t{tray:02}" for tray in (16, 17)], Fitness.BAD)
    wide = Mesh.of({"pp": 8, "dp": args.racks - 1, "tp": 8})
    roomy = place(board, wide, spares=SPARES)
    bare = place(board, wide, previous=roomy, health=whole)

    def repaired(before: Placement, health: dict[str, Fitness], moved: int) -> Callable[[], None]:
        def repair() -> None:
            after = place(board, before.mesh, previous=before, health=health)
            assert len(after.moves) == moved

        return repair

    repairs = iter([place(board, mesh, previous=placed) for _ in range(args.times)])
    times = args.times
    result: dict[str, Any] = {
        "machine": machine(),
        "gpus": len(board.slots),
        "racks": args.racks,
        "ranks": mesh.world_size,
        "from_nothing": median(from_nothing, times),
        "read_into_arrays": median(lambda: PlacementArrays(topology), times),
        "from_nothing_with_arrays": median(lambda: place(board, mesh, spares=SPARES), times),
        "one_gpu_lost": median(repaired(placed, {"r0007-t03/1": Fitness.BAD}, 1), 20 * times),
        "one_tray_lost": median(repaired(placed, {"r0007-t03": Fitness.BAD}, 4), 20 * times),
        "whole_group_moves": median(repaired(bare, {**whole, "r0007-t03/1": Fitness.BAD}, 8), 20 * times),
        "names_and_hash": median(lambda: next(repairs).content_id, times),
    }
    path = save("placement" if args.racks == 1389 else "placement-small", result)
    print("| what | wall, ms | on a core, ms | best wall, ms |\n|---|---|---|---|")
    for name, taken in result.items():
        if isinstance(taken, dict) and "wall_s" in taken:
            shown = " | ".join(f"{seconds * 1e3:.1f}" for seconds in taken.values())
            print(f"| {name.replace('_', ' ')} | {shown} |")
    print(f"\n{path.relative_to(path.parents[2])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
