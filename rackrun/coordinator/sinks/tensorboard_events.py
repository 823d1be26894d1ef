"""``tensorboard:DIR``: event files, made with TensorBoard's own writer and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rackrun.coordinator.sinks.sink import Key, Opening, Record

__all__ = ["TensorBoardEvents"]

_SUFFIX = ".rackrun"


class TensorBoardEvents:
    """A directory of event files. Each opening begins a file, and says from which step on older files do not count."""

    run = ""

    def __init__(self, opening: Opening) -> None:
        self._directory = Path(opening.target)
        self._fresh, self._first_step = opening.fresh, opening.first_step
        self._writer: Any = None

    def begin(self, newest: Key | None, run: str) -> Key | None:  # noqa: ARG002 - a directory has one run
        """Open a new event file. Another training's files move to ``earlier-N``, which TensorBoard shows as a run."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._fresh:
            _put_aside(self._directory)
        self._writer = EventFileWriter(str(self._directory), filename_suffix=_SUFFIX)
        if newest is not None:
            self._purge(newest.step + 1)
        elif not self._fresh:  # nobody knows how far it was
            self._purge(self._first_step)
        return newest

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            _text(name, value) if isinstance(value, str) else Summary.Value(tag=name, simple_value=float(value))
            for name, value in record.values.items()
        ]
        step = max(record.key.step, 0)
        self._writer.add_event(Event(step=step, wall_time=record.time_s, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def rewind(self, step: int) -> str:
        self._purge(step + 1)
        return ""

    def close(self) -> str:
        self._writer.close()
        return ""

    def _purge(self, step: int) -> None:
        """Tell readers to drop what they have of ``step`` and later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.add_event(Event(step=max(step, 0), session_log=SessionLog(status=SessionLog.START)))


def _text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.metadata import create_summary_metadata

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
    return Summary.Value(tag=name, metadata=create_summary_metadata(display_name=name, description=""), tensor=tensor)


def _put_aside(directory: Path) -> None:
    own = [path for path in directory.glob(f"events.out.tfevents.*{_SUFFIX}") if path.is_file()]
    if not own:
        return
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in own:
        path.rename(aside / path.name)
