"""Checkpoints in memory and on disk, verified byte by byte.

What stands: the parts. Memory that survives its writer (`arena`), images (`image`, `layout`, `boxes`, `entries`), reading
them into another world (`reshard`), who keeps what for whom (`placement`), parity (`parity`), how much memory that takes
(`memory`), generations on disk (`durable`, `retention`, `export`). What joins them, and the runtime's use of them, is not
built yet; until then the runtime has snapshots of its own (`rackrun.worker.snapshot`).
"""
