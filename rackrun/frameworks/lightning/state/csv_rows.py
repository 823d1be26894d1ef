"""Continues Lightning's ``metrics.csv`` on a new rank 0, and replaces the file atomically."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Sequence
from typing import Any

__all__ = ["continue_rows", "delete_backup", "replace_atomically", "back_up_rows", "rows_of"]


def replace_atomically(logger: Any) -> None:
    """Let ``logger``, a ``CSVLogger`` that has begun, replace its file as a whole where it gets new columns."""
    writer = logger._experiment
    if writer is not None and not isinstance(writer, _WholeFile):
        writer.__class__ = type(type(writer).__name__, (_WholeFile, type(writer)), {})


def rows_of(logger: Any) -> int:
    """Return how many rows this process has given to ``logger``, a ``CSVLogger``: those of a validation before ``fit``."""
    writer = logger._experiment
    if writer is None:
        return 0
    written = 0
    if logger._fs.isfile(writer.metrics_file_path):
        with logger._fs.open(writer.metrics_file_path, "r", newline="") as file:
            written = len(list(csv.DictReader(file)))
    return written + len(writer.metrics)


def back_up_rows(logger: Any) -> None:
    """Begin ``logger``, a ``CSVLogger``, and keep the rows of a job that may be resumed, which it would delete."""
    path = os.path.join(logger.log_dir, "metrics.csv")
    if logger._experiment is None and logger._fs.isfile(path):
        logger._fs.move(path, f"{path}.before")
        _begin(logger)


def delete_backup(logger: Any) -> None:
    """Delete what `back_up_rows` has kept: the training is a new one."""
    path = os.path.join(logger.log_dir, "metrics.csv.before")
    if logger._fs.isfile(path):
        logger._fs.rm_file(path)


def continue_rows(logger: Any, rows: int) -> None:
    """Begin ``logger``, a ``CSVLogger``, in this process with the first ``rows`` rows of its file: those that belong to
    turns before the one with which this process begins."""
    logger._experiment = None
    path = os.path.join(logger.log_dir, "metrics.csv")
    if not logger._fs.isfile(path) and logger._fs.isfile(f"{path}.before"):
        logger._fs.move(f"{path}.before", path)  # the rank 0 before this process was lost in the lines below
    header: list[str] = []
    kept: list[dict[str, str]] = []
    if logger._fs.isfile(path):
        with logger._fs.open(path, "r", newline="") as file:
            reader = csv.DictReader(file)
            kept = list(reader)[:rows]
            header = list(reader.fieldnames or [])
        logger._fs.move(path, f"{path}.before")
    writer = _begin(logger)
    replace_atomically(logger)
    if kept:
        writer.metrics_keys = header
        _write(writer, header, kept)
    if logger._fs.isfile(f"{path}.before"):
        logger._fs.rm_file(f"{path}.before")


def _begin(logger: Any) -> Any:
    """Return the logger's experiment writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it deletes older files: it finds none
        return logger.experiment


class _WholeFile:
    """Put before the class of an experiment writer."""

    def _rewrite_with_new_header(self: Any, fieldnames: list[str]) -> None:
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            rows = list(csv.DictReader(file))
        _write(self, fieldnames, rows)


def _write(writer: Any, header: Sequence[str], rows: Sequence[dict[str, str]]) -> None:
    beside = f"{writer.metrics_file_path}.new"
    with writer._fs.open(beside, "w", newline="") as file:
        out = csv.DictWriter(file, fieldnames=header)
        out.writeheader()
        out.writerows(rows)
    writer._fs.move(beside, writer.metrics_file_path)
